"""Pipelines of ``torch.distributed.pipelining`` as a strategy: the stages are the script's, the order is ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.errors import PlanError, UnsupportedError
from headway.job import Job
from headway.scheduling.pipeline.schedule import PipelineSchedule, RecordedPipelineSchedule
from headway.strategies.footprint import Footprint
from headway.strategies.injection import ScheduleInjection
from headway.strategies.pipeline import memory
from headway.strategies.pipeline.candidates import busiest_rank_ms, candidates, step_bound_ms
from headway.strategies.pipeline.policy import (
    GROUPED,
    RECORDED,
    PipelineStrategy,
    check_whole_backwards,
    grouped_by,
)
from headway.strategies.pipeline.stage_times import micro_batches
from headway.strategies.plugin import InForce, Proposal, StrategyPlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import StepLayout
    from headway.strategies.base import Strategy
    from headway.strategies.pipeline.pipelined import PipelinedModel
    from headway.strategies.pipeline.placement import Placement
    from headway.strategies.pipeline.replicas import Replicate
    from headway.torch_private.pipelining import PipelineSteps


class _Plugin(StrategyPlugin[PipelineStrategy]):
    policy = PipelineStrategy

    def reactions(
        self, graph: GraphBuilder[PipelineSchedule], job: Job, strategy: PipelineStrategy
    ) -> StepLayout:
        del strategy
        from headway.strategies.pipeline.layout import PipelineLayout
        from headway.strategies.pipeline.recorded_layout import RecordedLayout
        from headway.strategies.pipeline.stage_times import check_as_many

        if (ranks := len(graph.schedule.ranks)) != job.world_size:
            raise PlanError(
                "replay of a pipeline needs the ranks of one",
                got=f"{ranks} ranks of a pipeline on {job.world_size} ranks",
                fix="For several pipelines side by side, give a mesh of stages and replicas.",
            )
        if isinstance(graph.schedule, RecordedPipelineSchedule):
            return RecordedLayout(graph)
        check_as_many(graph.schedule.micro_batches, job.steps)
        return PipelineLayout(graph, graph.schedule, job.boundary_bytes)

    def footprint(self, job: Job, schedule: PipelineSchedule, stage: int) -> Footprint:
        """Activations of every micro-batch in flight, and messages that are on their way."""
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
        """One: what a pass sends is one message a neighbour."""
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
        own = grouped_by(strategy)
        if own is None:
            return None
        alike = [  # batches are split anew when a job starts, and not later
            each
            for each in fitting
            if isinstance(each, PipelineStrategy) and each.micro_batches == strategy.micro_batches
        ]
        others = {size: each for each in alike if (size := grouped_by(each)) is not None}
        sizes = tuple(sorted(others.keys() - {own}))
        orders: dict[str, PipelineStrategy] = {each.order: each for each in alike}
        # Not every module permits halved backwards, and a job must not find that out in the middle.
        other_orders = tuple(order for order in ("eager-1f1b",) if order in orders)
        update = {"order": GROUPED, "group_size": own, "group_sizes": sizes, "other_orders": other_orders}
        among = [strategy, *(others[size] for size in sizes), *(orders[order] for order in other_orders)]
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
        strategy = pipelining.planned_of(wrapped) or PipelineStrategy(order="recorded")
        assert isinstance(strategy, PipelineStrategy)
        return InForce(strategy.model_dump(mode="json", exclude_defaults=True))

    def wrap(self, module: nn.Module, strategy: PipelineStrategy, **ddp_options: Any) -> nn.Module:
        del module, ddp_options
        raise UnsupportedError(
            "a module in one piece cannot be wrapped as a pipeline",
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
    """This rank's stage of ``model``, trained under ``strategy`` from its first step on.

    On a mesh, ``placement`` says where this rank is, and ``replicate`` wraps the stage among its replicas. Raises
    UserError where something is missing, PlanError and UnsupportedError where the model cannot be cut so.
    """
    from headway.strategies.pipeline import lost
    from headway.strategies.pipeline.pipelined import PipelinedModel

    if strategy.order == RECORDED:
        raise PlanError(
            "a model that is cut into stages has no order of its own", got=strategy.describe(),
            fix="Name an order in the plan.",
        )  # fmt: skip
    with lost.among("cutting the model into stages"):
        found = PipelinedModel(
            model, optimizer, strategy, loss_fn, example, placement=placement, replicate=replicate
        )
    if not found.steps.will_be_taken_over:  # under headway run --plan it will be, by that plan
        _Injection().take_over(found.steps, strategy)
    return found


class _Injection(ScheduleInjection[PipelineStrategy]):
    def take_over(self, steps: PipelineSteps, strategy: PipelineStrategy) -> None:
        from headway.strategies.pipeline import resplit
        from headway.strategies.pipeline.runtime import PipelineRuntime
        from headway.strategies.pipeline.tuning.follower import Follower
        from headway.strategies.pipeline.tuning.tuner import candidates_of

        if strategy.order == RECORDED:  # the script's own, which it follows by itself
            return
        strategy = strategy.model_copy(
            update={"micro_batches": strategy.micro_batches or steps.micro_batches}
        )
        if not resplit.split_as_planned(steps, strategy):
            strategy = strategy.model_copy(update={"script_micro_batches": None})
        ranks = len(set(steps.rank_of_stage))
        schedule = strategy.schedule_of(steps.stage_count, ranks)
        if steps.replicated:
            for each in candidates_of(strategy):
                check_whole_backwards(each.schedule_of(steps.stage_count, ranks), each)
        runtime = PipelineRuntime(steps, schedule)
        if strategy.follows_network:
            Follower(steps, runtime, strategy)
        steps.note_plan(strategy)


PLUGIN = _Plugin()
