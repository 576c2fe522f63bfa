"""Injection: how a wrapper, or a pipeline's schedule, in an unmodified script becomes a strategy's runtime."""

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
    """What is done with a schedule of ``torch.distributed.pipelining`` whose stages a plan was made for."""

    @abstractmethod
    def take_over(self, steps: PipelineSteps, strategy: S) -> None:
        """Carry out the steps of the script's schedule under ``strategy`` from now on.

        Raises PlanError where the strategy does not fit it.
        """


class Injection(ABC, Generic[S]):
    """What is done instead of the constructor of DistributedDataParallel, for a model that a plan was made for."""

    def wrapper(self) -> type[DistributedDataParallel] | None:
        """A subclass whose instances replace those of DistributedDataParallel; None if these stay."""
        return None

    def wrapper_under(self, strategy: S) -> type[DistributedDataParallel] | None:
        """The same where it follows from the options of ``strategy``; by default it does not.

        Its constructor may call that of DistributedDataParallel, which is the stock one then.
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
        """Construct ``wrapped`` around ``module`` by its class's own constructor, ``init``, under ``strategy``.

        ``given`` are the script's other arguments, by name; what the strategy decides overrides them. Raises
        PlanError if the strategy does not fit the module, UnsupportedError if it would train wrongly.
        """
