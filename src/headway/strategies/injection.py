"""How a strategy replaces DistributedDataParallel or a pipeline schedule in an unmodified script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headway.strategies.base import Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from headway.torch_private.pipelining import PipelineSteps

S = TypeVar("S", bound=Strategy)


class ScheduleInjection(ABC, Generic[S]):
    """Replaces a schedule of ``torch.distributed.pipelining`` for whose stages a plan was made."""

    @abstractmethod
    def take_over(self, steps: PipelineSteps, strategy: S) -> None:
        """Run the steps of the script's schedule under ``strategy`` from now on.

        Raises PlanError if the strategy does not fit the schedule.
        """


class Injection(ABC, Generic[S]):
    """Replaces the constructor of DistributedDataParallel for a model for which a plan was made."""

    def wrapper(self) -> type[DistributedDataParallel] | None:
        """Return the subclass to use instead of DistributedDataParallel; None to keep the latter."""
        return None

    def wrapper_under(self, strategy: S) -> type[DistributedDataParallel] | None:
        """Return the wrapper for the options of ``strategy``; by default ``wrapper()``.

        Its constructor may call the stock constructor of DistributedDataParallel.
        """
        del strategy
        return self.wrapper()

    @abstractmethod
    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        ddp_options: dict[str, Any],
        strategy: S,
    ) -> None:
        """Construct ``wrapped`` around ``module`` with ``init``, the constructor of its class, under ``strategy``.

        ``ddp_options`` are the script's other arguments by name; decisions of the strategy override them. Raises
        PlanError if the strategy does not fit the module, UnsupportedError if it would train wrongly.
        """
