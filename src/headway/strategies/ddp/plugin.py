"""Stock DistributedDataParallel as a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headway.bound import bound_of
from headway.collectives.algorithms import NCCL
from headway.compression.cast import is_only_cast
from headway.compression.codec import takes_all
from headway.compression.registry import proposed as proposed_codecs
from headway.graph.step_layout import profile_of
from headway.job import Job
from headway.model import ModelSpec
from headway.network.link_cost import all_reduce_cost
from headway.scheduling import fusion
from headway.scheduling.buckets import BucketSchedule
from headway.strategies import ddp_steps
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.footprint import Footprint
from headway.strategies.injection import Injection
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout
    from headway.strategies.candidates import Candidate, Question
    from headway.strategies.live.stock import StockSteps

COMPRESSED_CAPS_MB = (None, 1.0, 4.0, 8.0)
CAPS_MB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
SHARES_OF_MODEL = (6, 12, 32)  # buckets that are tried while a job trains


class _Plugin(StrategyPlugin[DistributedDataParallelStrategy]):
    policy = DistributedDataParallelStrategy
    library_calls = ("allreduce",)
    usual = ("",)
    measured_after_recordings = True

    def reactions(
        self, graph: GraphBuilder[BucketSchedule], job: Job, strategy: DistributedDataParallelStrategy
    ) -> StepLayout:
        del strategy
        return ddp_steps.Reactions(graph, job)

    def footprint(self, job: Job, schedule: BucketSchedule, stage: int) -> Footprint:
        return ddp_steps.footprint(job.stages[stage], schedule, job.world_size)

    def propose(self, job: Job) -> Proposal:
        """The default, caps of many sizes, a cap a bucket, and for who permits it, gradients sent as codecs say.

        The bound is for those that send all of every gradient.
        """
        capped = [DistributedDataParallelStrategy(bucket_cap_mb=cap) for cap in CAPS_MB]
        codecs = proposed_codecs() if job.has_parameters and takes_all(job.model) else ()
        if job.on.library == NCCL:  # casting is all that is done there
            codecs = tuple(each for each in codecs if is_only_cast(each))
        compressed = [
            DistributedDataParallelStrategy(bucket_cap_mb=cap, wire=(codec,))
            for codec in codecs
            for cap in COMPRESSED_CAPS_MB
        ]
        proposed = (DistributedDataParallelStrategy(), *capped, *_done_earliest(job), *compressed)
        return Proposal.within(proposed, bound_of(job, "all-reduce"))

    def carried_out_by(
        self, strategy: DistributedDataParallelStrategy, library: str
    ) -> tuple[DistributedDataParallelStrategy, Sequence[str]]:
        if library != NCCL or all(each is None or is_only_cast(each) for each in strategy.wire):
            return strategy, ()
        wire = tuple(each if each is not None and is_only_cast(each) else None for each in strategy.wire)
        said = "wire: codecs that do more than cast are for parameters on the CPU; this is without them"
        return strategy.model_copy(update={"wire": wire if any(wire) else ()}), (said,)

    def explain(self, before: Strategy, after: DistributedDataParallelStrategy) -> Sequence[str]:
        had = before.wire if isinstance(before, DistributedDataParallelStrategy) else ()
        if after.wire == had:
            return ()
        return (f"gradients sent as {after.sent_as()}" if after.wire else "gradients sent as they are",)

    def wrap(
        self, module: nn.Module, strategy: DistributedDataParallelStrategy, **ddp_options: Any
    ) -> nn.Module:
        from headway.strategies.ddp import runtime

        return runtime.wrap(module, strategy, **ddp_options)

    def worth_trying(self, question: Question) -> Sequence[Candidate]:
        """The script's own buckets where others are in force, smaller ones than those, and larger ones.

        Other buckets are tried without a prediction: where cores are busy they are what gains most, and those of a
        large model may be too many.
        """
        from headway.strategies.candidates import Candidate

        stock = question.stock
        assert isinstance(stock, DistributedDataParallelStrategy)
        own = [] if question.script_stock in (None, stock) else [question.script_stock]
        return [
            Candidate(name="stock DDP", strategy=strategy)
            for strategy in (*own, *_with_other_buckets(stock, question.model))
        ]

    def on_stock_ddp(self, strategy: DistributedDataParallelStrategy) -> StockSteps | None:
        from headway.strategies.ddp import runtime
        from headway.strategies.live.stock import StockSteps

        return None if strategy.wire else StockSteps(runtime.options(strategy))

    @property
    def injection(self) -> Injection[DistributedDataParallelStrategy]:
        return _Injection()

    def recognise(self, wrapped: nn.Module) -> InForce | None:
        from headway.strategies.ddp import runtime

        return runtime.in_force(wrapped)


def _with_other_buckets(
    own: DistributedDataParallelStrategy, model: ModelSpec
) -> Iterator[DistributedDataParallelStrategy]:
    """Smaller buckets than those of ``own``, then larger ones; on each side what is nearest to them comes first."""
    own_bytes = min(own.largest_cap_bytes, model.size_bytes)
    sizes_bytes = [model.size_bytes // share for share in SHARES_OF_MODEL]
    smaller = sorted((size for size in sizes_bytes if 0 < size < own_bytes), reverse=True)
    larger = sorted(size for size in sizes_bytes if size > own_bytes)
    for size_bytes in (*smaller, *larger):
        yield DistributedDataParallelStrategy(bucket_cap_mb=size_bytes / 2**20)


def _done_earliest(job: Job) -> list[DistributedDataParallelStrategy]:
    """The buckets whose last all-reduce is done first, where this torch and the model let each have its own cap."""
    from headway.strategies.live import stock

    one_dtype = len({parameter.dtype for parameter in job.model.parameters}) == 1
    if not one_dtype or job.model.find_unused_parameters or not stock.takes_a_cap_a_bucket():
        return []
    ready_ns = profile_of(job.steps.timelines).ready_ns
    groups = fusion.earliest(job.model, ready_ns, all_reduce_cost(job.on).time_ns)
    return [DistributedDataParallelStrategy(bucket_caps_mb=fusion.bucket_caps_mb(groups, job.model))]


class _Injection(Injection[DistributedDataParallelStrategy]):
    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: DistributedDataParallelStrategy,
    ) -> None:
        from headway.strategies.ddp import runtime

        runtime.check_wire(module, strategy)
        init(wrapped, module, **{**given, **runtime.options(strategy)})
        runtime.take_over(wrapped, strategy, given)


PLUGIN = _Plugin()
