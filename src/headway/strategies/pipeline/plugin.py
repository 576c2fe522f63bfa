"""Plugin for pipelines of ``torch.distributed.pipelining``: keeps the script's stages and sets their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.errors import PlanError, UnsupportedError
from headway.job import Job
from headway.scheduling.mesh import groups_along
from headway.scheduling.pipeline.schedule import Pass, PipelineSchedule, RecordedPipelineSchedule
from headway.strategies.base import PIPELINE
from headway.strategies.footprint import Footprint
from headway.strategies.injection import ScheduleInjection
from headway.strategies.pipeline import memory
from headway.strategies.pipeline.policy import (
    GROUPED,
    RECORDED,
    PipelineStrategy,
    check_whole_backwards,
    grouped_by,
)
from headway.strategies.pipeline.stage_times import INPUT_SHARE, StageTimes, micro_batches
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin
from headway.torch_private.pipelining import PipelineSteps

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout
    from headway.strategies.base import Strategy
    from headway.strategies.pipeline.pipelined import PipelinedModel, Placement, Replicate


def candidates(job: Job) -> Iterator[PipelineStrategy]:
    """Candidate orders for the recorded number of micro-batches; none for an unsplit model."""
    count = micro_batches(job.steps) if len(job.stages) > 1 else 0
    if not count:
        return
    if len(job.stages) > (ranks := dict(job.mesh).get(PIPELINE, job.world_size)):
        yield from _looped(job, ranks, count)
        return
    yield PipelineStrategy(micro_batches=count)
    for size in group_sizes(count):
        yield PipelineStrategy(micro_batches=count, order="kfkb", group_size=size)
    yield PipelineStrategy(micro_batches=count, order="eager-1f1b")
    if not job.mesh:  # the replicas of a stage reduce gradients in whole backwards
        yield PipelineStrategy(micro_batches=count, order="zero-bubble")


def _looped(job: Job, ranks: int, micro_batches: int) -> Iterator[PipelineStrategy]:
    """Orders for several stages per rank, if stage ``s`` is on rank ``s % ranks``."""
    if any(
        action.stage % ranks != rank
        for rank, timeline in job.steps.timelines.items()
        for action in StageTimes.of(timeline[0]).passes_ns
    ):
        return
    if micro_batches % ranks == 0:
        yield PipelineStrategy(micro_batches=micro_batches, order="interleaved")
    yield PipelineStrategy(micro_batches=micro_batches, order="looped")


def group_sizes(micro_batches: int) -> list[int]:
    """Group sizes above 1; skips sizes that need more memory than a smaller one for the same number of groups."""
    smallest: dict[int, int] = {}
    for size in range(2, micro_batches + 1):
        smallest.setdefault(-(-micro_batches // size), size)
    return list(smallest.values())


def step_bound_ms(job: Job) -> float:
    """A lower bound (ms) for every order of these stages: the mean over recorded steps, with instant transfers."""
    ranks = tuple(sorted(job.steps.timelines))
    pipelines = groups_along(job.mesh, PIPELINE) if job.mesh else (ranks,)
    return max(_pipeline_bound_ms(job, pipeline) for pipeline in pipelines)


def busiest_rank_ms(job: Job) -> float:
    """A lower bound (ms) wherever stages are placed: the work of the busiest rank."""
    return max(_pipeline_bound_ms(job, (rank,)) for rank in job.steps.timelines)


def _pipeline_bound_ms(job: Job, ranks: Sequence[int]) -> float:
    """The lower bound of one pipeline, whose stages are on ``ranks`` in order."""
    factors = [job.steps.factor_of(rank) for rank in ranks]
    steps = list(zip(*(job.steps.timelines[rank] for rank in ranks), strict=False))
    bounds_ns = [_bound_ns([StageTimes.of(timeline) for timeline in step], factors) for step in steps]
    return sum(bounds_ns) / len(bounds_ns) / 1e6 if bounds_ns else 0.0


def _bound_ns(stages: Sequence[StageTimes], factors: Sequence[float]) -> float:
    """A rank does its own work, and waits for earlier stages between its last backward and its next first forward.

    Of backwards only input gradients count, because weight gradients may be deferred.
    """
    bound_ns = others_ns = 0.0
    for times, factor in zip(stages, factors, strict=True):
        outside_ns = factor * sum(block.duration_ns for block in (*times.before, *times.after))
        forwards = [factor * ns for action, ns in times.passes_ns.items() if action.kind is Pass.FORWARD]
        backwards = [factor * ns for action, ns in times.passes_ns.items() if action.kind is Pass.BACKWARD]
        all_ns = sum(forwards) + sum(backwards) + outside_ns
        needed_ns = sum(forwards) + sum(backwards) * INPUT_SHARE + others_ns
        bound_ns = max(bound_ns, all_ns, needed_ns)
        others_ns += min(forwards, default=0) + min(backwards, default=0) * INPUT_SHARE
    return bound_ns


_OF_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_STAY = "Construct the schedule with n_microbatches as planned, or plan from recordings of that number alone."


def split_as_planned(steps: PipelineSteps, strategy: PipelineStrategy) -> bool:
    """Split the script's batches into the plan's number of micro-batches; returns whether that is a change.

    Raises PlanError if that would change the gradients, as far as this is known before the first step. The first step
    checks that the loss is a mean over samples.
    """
    planned = strategy.micro_batches
    if planned in (None, steps.micro_batches) or strategy.script_micro_batches != steps.micro_batches:
        return False
    assert planned is not None
    got = f"{planned} micro-batches in the plan, {steps.micro_batches} in the script"
    if why := _why_not(steps):
        raise PlanError(
            f"the number of micro-batches cannot be changed: {why}", got=got, expected="the same", fix=_STAY
        )
    steps.split_into(planned)
    steps.when_first_loss(partial(_check_mean, got))
    return True


def _why_not(steps: PipelineSteps) -> str:
    if len(steps.stages) > 1:
        return "the script's ranks have several stages"
    if not steps.divides_gradients:
        return "the script scales gradients itself (scale_grads=False)"
    for stage, module in steps.modules.items():
        if any(isinstance(submodule, _OF_BATCHES) for submodule in module.modules()):
            return f"BatchNorm in stage {stage} would see micro-batches of another size"
    return ""


def _check_mean(got: str, loss_of: Callable[[Any, Any], Any], output: Any, target: Any) -> None:
    """Raise PlanError unless the loss of a micro-batch is the mean of the losses of its parts.

    torch divides gradients by the number of micro-batches. With a sum of losses, or a mean over tokens whose number
    varies per sample, another number of micro-batches would give other gradients.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor) and output.dim()):
        return
    rows = output.shape[0]
    if target.shape[:1] != (rows,):
        return
    if rows == 1:
        pieces = [(torch.cat([output, output]), torch.cat([target, target]))]
    else:
        cuts = (slice(0, rows // 2), slice(rows // 2, rows))
        pieces = [(output[cut], target[cut]) for cut in cuts]
    (full_loss, tolerance), *parts = (_loss(loss_of, *piece) for piece in ((output, target), *pieces))
    samples = [len(outputs) for outputs, _ in pieces]
    mean = sum(count * loss for count, (loss, _) in zip(samples, parts, strict=True)) / sum(samples)
    if abs(mean - full_loss) > tolerance * max(abs(mean), abs(full_loss)):
        raise PlanError(
            "the number of micro-batches cannot be changed: the script's loss is not a mean over samples, so gradients "
            "would differ",
            got=got, expected="a loss whose value equals the mean over halves of the micro-batch", fix=_STAY,
        )  # fmt: skip


def _loss(
    loss_of: Callable[[Any, Any], Any], output: torch.Tensor, target: torch.Tensor
) -> tuple[float, float]:
    """The loss and its tolerance, without gradients and without advancing random number generators.

    The loss is NaN if the script's function fails for this size.
    """
    device = output.device
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            loss = torch.as_tensor(loss_of(output, target))
            exact = max(torch.finfo(tensor.dtype).eps for tensor in (output, loss))
            return float(loss), max(1e-3, exact**0.5)
        except Exception:  # a script's own function, given what it was not written for
            return math.nan, 0.0


class _Plugin(StrategyPlugin[PipelineStrategy]):
    policy = PipelineStrategy

    def reactions(
        self, graph: GraphBuilder[PipelineSchedule], job: Job, strategy: PipelineStrategy
    ) -> StepLayout:
        del strategy
        from headway.strategies.pipeline.layout import PipelineLayout, RecordedLayout
        from headway.strategies.pipeline.stage_times import check_as_many

        if (ranks := len(graph.schedule.ranks)) != job.world_size:
            raise PlanError(
                "cannot replay: the job's ranks are not one pipeline",
                got=f"{ranks} ranks of a pipeline on {job.world_size} ranks",
                fix="For replicated pipelines, give a mesh of stages and replicas.",
            )
        if isinstance(graph.schedule, RecordedPipelineSchedule):
            return RecordedLayout(graph)
        check_as_many(graph.schedule.micro_batches, job.steps)
        return PipelineLayout(graph, graph.schedule, job.boundary_bytes)

    def footprint(self, job: Job, schedule: PipelineSchedule, stage: int) -> Footprint:
        """The activations of micro-batches in flight, and receive buffers."""
        model = job.stages[stage]
        inward = job.boundary_bytes[max(0, stage - 1) : stage + 1]
        return Footprint(
            buffers_bytes=schedule.receive_buffers * sum(inward),
            state_bytes=model.optimizer_state_bytes,
            gradients_apart=True,
            updated_share=1.0,
            passes_in_flight=schedule.most_in_flight(schedule.rank_of_stage[stage], stage),
        )

    def peak_bytes(self, job: Job, schedule: PipelineSchedule, stage: int) -> int | None:
        return memory.peak_bytes(job, schedule, stage)

    def messages(self, schedule: PipelineSchedule, world_size: int, library: str) -> int:
        """One: a pass sends one message per neighbour."""
        del schedule, world_size, library
        return 1

    def propose(self, job: Job) -> Proposal:
        if proposed := tuple(candidates(job)):
            return Proposal(proposed, step_bound_ms(job))
        is_pipeline = len(job.stages) > 1 and micro_batches(job.steps) > 0
        return Proposal((), busiest_rank_ms(job)) if is_pipeline else Proposal()

    def following(
        self, strategy: PipelineStrategy, fitting: Sequence[Strategy]
    ) -> tuple[PipelineStrategy, Sequence[Strategy]] | None:
        group_size = grouped_by(strategy)
        if group_size is None:
            return None
        alike = [  # batches are split anew when a job starts, and not later
            candidate
            for candidate in fitting
            if isinstance(candidate, PipelineStrategy) and candidate.micro_batches == strategy.micro_batches
        ]
        by_size = {size: candidate for candidate in alike if (size := grouped_by(candidate)) is not None}
        sizes = tuple(sorted(by_size.keys() - {group_size}))
        orders: dict[str, PipelineStrategy] = {candidate.order: candidate for candidate in alike}
        # Not every module permits halved backwards, and a job must not find that out in the middle.
        other_orders = tuple(order for order in ("eager-1f1b",) if order in orders)
        update = {
            "order": GROUPED,
            "group_size": group_size,
            "group_sizes": sizes,
            "other_orders": other_orders,
        }
        among = [strategy, *(by_size[size] for size in sizes), *(orders[order] for order in other_orders)]
        return strategy.model_copy(update=update), among

    def explain(self, before: Strategy, after: PipelineStrategy) -> Sequence[str]:
        if after.order == RECORDED or before == after:
            return ()
        changes = ["micro-batches go through the stages in another order"]
        if after.script_micro_batches not in (None, after.micro_batches):
            changes.append(f"{after.micro_batches} micro-batches instead of {after.script_micro_batches}")
        return changes

    @property
    def schedule_injection(self) -> ScheduleInjection[PipelineStrategy]:
        return _Injection()

    def recognise(self, wrapped: Any) -> InForce | None:
        from headway.torch_private import pipelining

        if not pipelining.is_stage(wrapped):
            return None
        strategy = pipelining.plan_of_stage(wrapped) or PipelineStrategy(order="recorded")
        assert isinstance(strategy, PipelineStrategy)
        return InForce(strategy.model_dump(mode="json", exclude_defaults=True))

    def wrap(self, module: nn.Module, strategy: PipelineStrategy, **ddp_options: Any) -> nn.Module:
        del module, ddp_options
        raise UnsupportedError(
            "cannot wrap an unsplit module as a pipeline",
            got=strategy.describe(),
            fix="Build stages and a schedule with torch.distributed.pipelining, and start the script with headway run.",
        )


def pipelined(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: PipelineStrategy,
    loss_fn: Any,
    example: Any = None,
    *,
    placement: Placement | None = None,
    replicate: Replicate | None = None,
) -> PipelinedModel:
    """Build this rank's stage of ``model``, trained under ``strategy`` from the first step on.

    On a mesh, ``placement`` gives this rank's position and ``replicate`` wraps the stage for its replicas. Raises
    UserError if an argument is missing, PlanError and UnsupportedError if the model cannot be split as asked.
    """
    from headway.strategies.pipeline import runtime
    from headway.strategies.pipeline.pipelined import PipelinedModel

    if strategy.order == RECORDED:
        raise PlanError(
            "the plan does not name an order of micro-batches", got=strategy.describe(),
            fix="Set order in the plan, such as 1f1b.",
        )  # fmt: skip
    with runtime.among("cutting the model into stages"):
        pipelined_model = PipelinedModel(
            model, optimizer, strategy, loss_fn, example, placement=placement, replicate=replicate
        )
    if not pipelined_model.steps.awaits_first_step:  # under headway run --plan it will be, by that plan
        _Injection().take_over(pipelined_model.steps, strategy)
    return pipelined_model


class _Injection(ScheduleInjection[PipelineStrategy]):
    def take_over(self, steps: PipelineSteps, strategy: PipelineStrategy) -> None:
        from headway.strategies.pipeline.runtime import PipelineRuntime
        from headway.strategies.pipeline.tuning.follower import Follower
        from headway.strategies.pipeline.tuning.tuner import candidates_of

        if strategy.order == RECORDED:  # the script's own, which it follows by itself
            return
        strategy = strategy.model_copy(
            update={"micro_batches": strategy.micro_batches or steps.micro_batches}
        )
        if not split_as_planned(steps, strategy):
            strategy = strategy.model_copy(update={"script_micro_batches": None})
        ranks = len(set(steps.rank_of_stage))
        schedule = strategy.schedule_of(steps.stage_count, ranks)
        if steps.replicated:
            for candidate in candidates_of(strategy):
                check_whole_backwards(candidate.schedule_of(steps.stage_count, ranks), candidate)
        runtime = PipelineRuntime(steps, schedule)
        if strategy.follows_network:
            Follower(steps, runtime, strategy)
        steps.note_plan(strategy)


PLUGIN = _Plugin()
