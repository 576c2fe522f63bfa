"""Another package's: a strategy of one bucket that backward itself waits for, and a pass that does no good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from headway.collectives.algorithms import ALL_REDUCE
from headway.collectives.selection import native
from headway.errors import PlanError
from headway.graph.build import GraphBuilder, RankCursor
from headway.graph.computation import Item, Part
from headway.graph.step_layout import InRecordedOrder
from headway.job import Job
from headway.passes.base import Pass
from headway.scheduling.buckets import BucketSchedule, make_buckets, whole_parameter
from headway.strategies.base import Strategy
from headway.strategies.footprint import Footprint
from headway.strategies.injection import Injection
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel


class FlatStrategy(Strategy):
    """One all-reduce of everything."""

    name: ClassVar[str] = "flat"

    def decide(self, job: Job) -> BucketSchedule:
        """One bucket, in the order of readiness."""
        parameters = job.model.ready_parameters()
        if len({each.dtype for each in parameters}) > 1:
            raise PlanError("flat takes parameters of one type")
        return BucketSchedule(make_buckets([[whole_parameter(each) for each in parameters]], job.model))

    def describe(self) -> str:
        """Say it in a word."""
        return "flat"


class _Reactions(InRecordedOrder):
    def __init__(self, graph: GraphBuilder[BucketSchedule], job: Job) -> None:
        super().__init__(graph)
        self._parameters = len(job.model.parameters)
        self._left = [self._parameters] * graph.ranks

    def use(self, cursor: RankCursor, module: str) -> None:
        pass

    def ready(self, cursor: RankCursor, parameter: str) -> None:
        graph, (bucket,) = self._graph, self._graph.schedule.buckets
        self._left[cursor.rank] -= 1
        if self._left[cursor.rank] == 0:
            selection = native(ALL_REDUCE, bucket.size_bytes, graph.world_size, graph.cluster.library)
            number = graph.launch(cursor, ALL_REDUCE, 0, bucket.size_bytes, bucket=0, selection=selection)
            graph.wait(cursor, "gradients", number)
            self._left[cursor.rank] = self._parameters

    def unused(self, cursor: RankCursor, parameter: str) -> None:
        self.ready(cursor, parameter)

    def backward_end(self, cursor: RankCursor) -> None:
        self._graph.compute(cursor, Part.FINALIZE, 0)

    def finalize(self, cursor: RankCursor, duration_ns: int) -> None:
        self._graph.compute(cursor, Part.FINALIZE, duration_ns)

    def read(self, cursor: RankCursor, read: Item) -> None:
        self._graph.compute(cursor, Part.READ, read.duration_ns)

    def optimizer(self, cursor: RankCursor, duration_ns: int) -> None:
        self._graph.compute(cursor, Part.OPTIMIZER, duration_ns)


class _Plugin(StrategyPlugin[FlatStrategy]):
    policy = FlatStrategy
    usual = ("",)

    def reactions(self, graph: GraphBuilder[BucketSchedule], job: Job, strategy: FlatStrategy) -> _Reactions:
        return _Reactions(graph, job)

    def footprint(self, job: Job, schedule: BucketSchedule, stage: int) -> Footprint:
        del stage
        return Footprint(job.model.size_bytes, job.model.optimizer_state_bytes, True, 1.0)

    def propose(self, job: Job) -> Proposal:
        return Proposal((FlatStrategy(),), note="flat was thought of")

    def explain(self, before: Strategy, after: FlatStrategy) -> Sequence[str]:
        return ("nothing overlaps any more",)

    def wrap(self, module: nn.Module, strategy: FlatStrategy, **ddp_options: Any) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(module, **{**ddp_options, **OPTIONS})
        _flatten(wrapped, strategy)
        return wrapped

    @property
    def injection(self) -> Injection[FlatStrategy]:
        return _Injection()

    def recognise(self, wrapped: nn.Module) -> InForce | None:
        from torch.nn.parallel import DistributedDataParallel

        strategy: FlatStrategy | None = getattr(wrapped, "flat_strategy", None)
        if strategy is None or not isinstance(wrapped, DistributedDataParallel):
            return None
        names = [name for name, each in wrapped.module.named_parameters() if each.requires_grad]
        return InForce(strategy.model_dump(), (tuple(names),))


OPTIONS = {"bucket_cap_mb": 1e6}


class _Injection(Injection[FlatStrategy]):
    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: FlatStrategy,
    ) -> None:
        init(wrapped, module, **{**given, **OPTIONS})
        _flatten(wrapped, strategy)


def _flatten(wrapped: DistributedDataParallel, strategy: FlatStrategy) -> None:
    import torch
    import torch.distributed as dist

    def reduce(group: dist.ProcessGroup, bucket: Any) -> Any:
        buffer = bucket.buffer()
        buffer.div_(group.size())
        dist.all_reduce(buffer, group=group)
        done: Any = torch.futures.Future()
        done.set_result(buffer)
        return done

    reduce.__annotations__.clear()  # DDP compares them with types, and here they are names
    wrapped.register_comm_hook(wrapped.process_group, reduce)
    wrapped.flat_strategy = strategy  # type: ignore[assignment]


class Laboured(Pass):
    """Computation that takes ``times`` as long."""

    name: ClassVar[str] = "laboured"

    times: float

    def rewrite(self, job: Job) -> Job:
        return replace(job, computation=job.steps.scaled(self.times, {}))

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        print(f"computes {self.times} times as long")
        return module

    def describe(self) -> str:
        return f"laboured {self.times} times"


PLUGIN = _Plugin()
