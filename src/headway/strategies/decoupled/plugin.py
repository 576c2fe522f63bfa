"""The decoupled all-reduce as a strategy.

What the decoupled all-reduce holds: buckets apart from each rank's own gradients, and scratch of its collectives.

A rank's own gradients are there until the next forward needs their parameters. Where gradients are gathered, a bucket
is updated when its own are gone, so that its update needs no more than they did. Where parameters are gathered, a rank
keeps its shard of the gradients and of the optimizer's state, and of the bucket that it updates the state before
and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headway.bound import bound_of
from headway.cluster import BACKGROUND_UPDATE, RUNTIME_COSTS, Cluster
from headway.collectives.algorithms import ALL_GATHER, NCCL, REDUCE_SCATTER, RING
from headway.compression.cast import Cast
from headway.compression.codec import takes_all
from headway.errors import UnsupportedError
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.buckets import GATHER_MODES, BucketSchedule, GatherMode
from headway.strategies.base import Strategy
from headway.strategies.decoupled.granularity import UpdateGranularity, granularity_named
from headway.strategies.decoupled.planner.search import plan
from headway.strategies.decoupled.policy import DecoupledStrategy, strategy_of
from headway.strategies.footprint import Footprint
from headway.strategies.injection import Injection
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout
    from headway.strategies.candidates import Candidate, Question
    from headway.strategies.decoupled.wrapper import DecoupledDataParallel


def permitted_forms(job: Job) -> tuple[Sequence[GatherMode], str]:
    """What decoupled strategies may gather for ``job``, and why they may not gather everything.

    An optimizer that looks at several elements at once needs whole gradients, and one that is not known to take its
    parameters one by one needs all of them before it steps: then nothing is left of forward to hide a gather under.
    Several optimizers would each gather what they have stepped, one after the other, whatever forward needs first.
    """
    if refusal := job.refusals.get(DecoupledStrategy.name):
        return (), f"{refusal}, so decoupled plans are left out"
    kinds = {name: granularity_named(name) for name in job.optimizers.names}
    whole = [name for name, kind in kinds.items() if kind is UpdateGranularity.GLOBAL]
    if whole:
        return (), f"{whole[0]} may read all gradients at once, so decoupled plans are left out"
    by_parameter = [name for name, kind in kinds.items() if kind is UpdateGranularity.PER_PARAMETER]
    if by_parameter:
        return ("gradients",), f"{by_parameter[0]} needs whole gradients, so no plan gathers parameters"
    if job.optimizers.steps_a_backward > 1:
        return ("gradients",), "several optimizers step in turn, so no plan gathers parameters"
    return GATHER_MODES, ""


def as_run(strategy: DecoupledStrategy, job: Job) -> DecoupledStrategy:
    """``strategy`` as ``job`` runs it.

    Raises UnsupportedError where nothing of a decoupled strategy would be left to hide under forward.
    """
    forms, why = permitted_forms(job)
    if strategy.gather in forms:
        return strategy
    if not forms:
        raise UnsupportedError(
            "the plan is not predicted for the recorded job",
            got=why,
            expected="a model and optimizers that the decoupled all-reduce takes",
            fix="Replay a plan of DDP.",
        )
    return strategy.model_copy(update={"gather": forms[0]})


def footprint(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> Footprint:
    """What one of ``world_size`` ranks holds."""
    sizes_bytes = [bucket.size_bytes for bucket in schedule.buckets]
    scratch_bytes = max(
        (
            schedule.algorithms.select(kind, size, world_size).scratch_numel(size, world_size)
            for size in sizes_bytes
            for kind in (REDUCE_SCATTER, ALL_GATHER)
        ),
        default=0,
    )
    buffers_bytes = sum(sizes_bytes) + schedule.channels * scratch_bytes
    if schedule.halves is not None:
        buffers_bytes += sum(schedule.half_bytes(REDUCE_SCATTER, bucket) for bucket in schedule.buckets)
    state_bytes, share = model.optimizer_state_bytes, 0.0
    if schedule.gather == "parameters":
        buffers_bytes += -(-model.size_bytes // world_size)
        share = max(sizes_bytes, default=0) / world_size / max(1, model.size_bytes)
        state_bytes = -(-state_bytes // world_size) + round(state_bytes * share)
    return Footprint(buffers_bytes, state_bytes, gradients_apart=True, updated_share=share)


BFLOAT16 = Cast(dtype="bfloat16")
CAST_CAPS_BYTES = (2**18, 2**20, 2**22, 2**24)
CAPS_BYTES = tuple(2**exponent for exponent in range(16, 27))


class _Plugin(StrategyPlugin[DecoupledStrategy]):
    policy = DecoupledStrategy
    carries_over = True
    usual = ("gather=parameters", "gather=gradients")

    def reactions(
        self, graph: GraphBuilder[BucketSchedule], job: Job, strategy: DecoupledStrategy
    ) -> StepLayout:
        del strategy
        from headway.strategies.decoupled.reactions import Reactions

        return Reactions(graph, job)

    def footprint(self, job: Job, schedule: BucketSchedule, stage: int) -> Footprint:
        return footprint(job.stages[stage], schedule, job.world_size)

    def messages(self, schedule: BucketSchedule, world_size: int, library: str) -> int:
        """As many as the gathers', and the reduce-scatters' are no more."""
        select = schedule.algorithms.select
        sizes = (bucket.size_bytes for bucket in schedule.buckets)
        return sum(select(ALL_GATHER, size, world_size, library).pieces for size in sizes)

    def as_run(self, strategy: DecoupledStrategy, job: Job) -> Strategy:
        return as_run(strategy, job)

    def carried_out_by(
        self, strategy: DecoupledStrategy, library: str
    ) -> tuple[DecoupledStrategy, Sequence[str]]:
        if library != NCCL:
            return strategy, ()
        stock = DecoupledStrategy()
        chosen = ("reduce_scatter", "all_gather", "by_size", "ring_order")
        ignored = [name for name in chosen if getattr(strategy, name) != getattr(stock, name)]
        said = []
        if ignored:
            said.append(f"{', '.join(ignored)}: NCCL chooses algorithms by itself, and ignores this")
        if strategy.wire is not None:
            said.append("wire: the decoupled all-reduce casts gradients on the CPU alone; this is without")
        if not said:
            return strategy, ()
        return strategy.model_copy(update={name: getattr(stock, name) for name in (*chosen, "wire")}), said

    def without_own_costs(self, cluster: Cluster) -> Cluster:
        own = (*RUNTIME_COSTS, BACKGROUND_UPDATE)
        kept = {name: cost for name, cost in cluster.algorithms.items() if name not in own}
        return cluster.model_copy(update={"algorithms": kept, "decoupled_slowdown": None})

    def propose(self, job: Job) -> Proposal:
        """What the planner makes of the job's steps, and buckets of many sizes, in each form that is permitted."""
        forms, note = permitted_forms(job)
        planned = plan(job, forms=forms)
        found = [strategy_of(each.schedule, job.model) for each in planned.schedules]
        found += [
            DecoupledStrategy(bucket_cap_bytes=cap, gather=form).spelled_out(job)
            for form in forms
            for cap in CAPS_BYTES
        ]
        if job.on.library != NCCL and job.has_parameters and takes_all(job.model):
            found += [
                DecoupledStrategy(bucket_cap_bytes=cap, gather=form, wire=BFLOAT16).spelled_out(job)
                for form in forms
                for cap in CAST_CAPS_BYTES
            ]
        if not forms:
            return Proposal(note=note)
        bound = min((bound_of(job, form) for form in forms), key=lambda each: each.step_ns)
        return Proposal.within(tuple(found), bound, note)

    def worth_trying(self, question: Question) -> Sequence[Candidate]:
        from headway.strategies.decoupled.shortlist import worth_trying

        return worth_trying(question)

    def for_any_workers(self, strategy: DecoupledStrategy) -> DecoupledStrategy:
        of_ranks: dict[str, object] = {
            "reduce_scatter": RING, "all_gather": RING, "by_size": (), "ring_order": (),
        }  # fmt: skip
        return strategy.model_copy(update=of_ranks)

    def explain(self, before: Strategy, after: DecoupledStrategy) -> Sequence[str]:
        had, known = "", []
        if isinstance(before, DecoupledStrategy):
            had, known = before.gather, before.algorithms.in_words
        said = [] if after.gather == had else [f"{after.gather} are gathered"]
        said += [each for each in after.algorithms.in_words if each not in known]
        return said if after.wire is None else [*said, f"gradients sent as {after.wire.describe()}"]

    def wrap(self, module: nn.Module, strategy: DecoupledStrategy, **ddp_options: Any) -> nn.Module:
        from headway.strategies.decoupled import wrapper

        return wrapper.wrap(module, strategy, **ddp_options)

    def live_runtime(
        self, module: nn.Module, strategy: DecoupledStrategy, **ddp_options: Any
    ) -> DecoupledDataParallel:
        from headway.strategies.decoupled import wrapper

        return wrapper.unseen(module, strategy, **ddp_options)

    @property
    def injection(self) -> Injection[DecoupledStrategy]:
        return _Injection()

    def wrappers(self) -> tuple[type[nn.Module], ...]:
        from headway.strategies.decoupled.wrapper import DecoupledDataParallel

        return (DecoupledDataParallel,)

    def recognise(self, wrapped: nn.Module) -> InForce | None:
        from headway.strategies.decoupled import wrapper

        return wrapper.in_force(wrapped)

    def refusal(self, wrapped: nn.Module, *, compiled_around: bool) -> str:
        from headway.strategies.decoupled import wrapper

        return wrapper.refusal(wrapped, compiled_around=compiled_around)


class _Injection(Injection[DecoupledStrategy]):
    def wrapper(self) -> type[DistributedDataParallel]:
        from headway.strategies.decoupled.wrapper import DecoupledDataParallel

        return DecoupledDataParallel

    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: DecoupledStrategy,
    ) -> None:
        from headway.strategies.decoupled.wrapper import live_options

        init(wrapped, module, **given, **live_options(strategy, module))


PLUGIN = _Plugin()
