"""UnreducedPlugin: strategies whose wrapper reduces no gradients, and whose ranks do not take their steps together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headway.errors import UnsupportedError
from headway.job import Job
from headway.strategies.base import Strategy
from headway.strategies.injection import Injection
from headway.strategies.plugin import InForce, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout
    from headway_baselines.unreduced import UnreducedDataParallel

S = TypeVar("S", bound=Strategy)


class UnreducedPlugin(StrategyPlugin[S]):
    """What such strategies have in common; ``not_replayed`` says why no recording under one is replayed.

    What they train is not what all-reduce does, which only the user can permit.
    """

    not_replayed: str

    @abstractmethod
    def runtime(self) -> type[UnreducedDataParallel]:
        """The class that wraps models; it takes ``strategy=`` besides DistributedDataParallel's arguments."""

    def reactions(self, graph: GraphBuilder[Any], job: Job, strategy: S) -> StepLayout:
        """Ranks do not take their steps together, so none are laid out: ``over_a_horizon`` simulates them."""
        raise UnsupportedError(
            self.not_replayed,
            expected="a recording under another strategy, or a prediction",
            fix="Record the job under DDP, and use headway replay --plan; or use headway predict --strategy.",
        )

    def messages(self, schedule: Any, world_size: int, library: str) -> int:
        """One: ranks communicate no buckets within a pass."""
        return 1

    def wrap(self, module: nn.Module, strategy: S, **ddp_options: Any) -> nn.Module:
        """Wrap ``module`` in the runtime's class."""
        return self.runtime()(module, strategy=strategy, **ddp_options)

    def updated_by(self, wrapped: nn.Module, optimizer: Optimizer) -> None:
        """Tell the wrapper of its optimizer."""
        if isinstance(wrapped, self.runtime()):
            wrapped.updated_by(optimizer)

    def finish(self, wrapped: nn.Module, timeout_s: float) -> tuple[int, ...] | None:
        """The wrapper's own end, which ``timeout_s`` does not bound; the models of all ranks are in it."""
        import torch.distributed as dist

        if not isinstance(wrapped, self.runtime()):
            return None
        wrapped.finish()
        return tuple(range(dist.get_world_size(wrapped.process_group)))

    @property
    def injection(self) -> Injection[S]:
        """The runtime's class in the place of DistributedDataParallel."""
        return _Injection(self.runtime)

    def wrappers(self) -> tuple[type[nn.Module], ...]:
        """The runtime's class."""
        return (self.runtime(),)

    def recognise(self, wrapped: nn.Module) -> InForce | None:
        """The options that a wrapper was made with."""
        if not isinstance(wrapped, self.runtime()):
            return None
        return InForce(wrapped.strategy.model_dump(mode="json"))


class _Injection(Injection[S], Generic[S]):
    def __init__(self, runtime: Callable[[], type[UnreducedDataParallel]]) -> None:
        self._runtime = runtime

    def wrapper(self) -> type[DistributedDataParallel]:
        return self._runtime()

    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: S,
    ) -> None:
        init(wrapped, module, strategy=strategy, **given)
