"""What a recording says of a model that is averaged in groups."""

from __future__ import annotations

from typing import Any

from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel
from headway.strategies.partial_all_reduce.policy import STATIC, PartialAllReduceStrategy
from headway.strategies.partial_all_reduce.runtime import PartialAllReduce
from headway.strategies.partial_all_reduce.scheduled_coordinator import ScheduledCoordinator
from headway.strategies.plugin import InForce


def in_force(wrapped: Any) -> InForce | None:
    """The options of its strategy, as far as the wrapper knows them; None where it is no such model.

    Who forms groups is the coordinator's matter: a wrapper without a plan only knows whether there is one.
    """
    if isinstance(wrapped, HostDataParallel) and wrapped.worker is not None:
        return InForce(wrapped.strategy.model_dump(mode="json", exclude_defaults=True))
    if not isinstance(wrapped, PartialAllReduce):
        return None
    planned = getattr(wrapped, "strategy", None)
    if isinstance(planned, PartialAllReduceStrategy):
        return InForce(planned.model_dump(mode="json", exclude_defaults=True))
    options: dict[str, Any] = {
        "staleness": wrapped._averaging.staleness,
        "moments": wrapped._policies["moments"],
    }
    if isinstance(wrapped.coordinator, ScheduledCoordinator):
        options["groups"] = STATIC
    return InForce(options)
