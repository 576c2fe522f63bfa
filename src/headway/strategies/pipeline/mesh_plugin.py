"""Plugin for replicated pipelines: lays out a pipeline's order with the gradient reduction of each stage's replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.errors import PlanError, UnsupportedError
from headway.job import Job
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.scheduling.pipeline.schedule import RecordedPipelineSchedule
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.footprint import Footprint
from headway.strategies.injection import ScheduleInjection
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.plugin import PLUGIN as PIPELINES
from headway.strategies.plugin import StrategyPlugin
from headway.strategies.registry import plugin_of, plugins

if TYPE_CHECKING:
    from torch import nn

    from headway.graph.build import GraphBuilder
    from headway.graph.step_layout import InRecordedOrder, StepLayout
    from headway.strategies.base import Strategy
    from headway.torch_private.pipelining import PipelineSteps


class _Plugin(StrategyPlugin[MeshStrategy]):
    policy = MeshStrategy
    measured_after_recordings = True

    def reactions(
        self, graph: GraphBuilder[ReplicatedSchedule], job: Job, strategy: MeshStrategy
    ) -> StepLayout:
        from headway.strategies.pipeline.layout import PipelineLayout, RecordedLayout
        from headway.strategies.pipeline.stage_times import check_as_many

        schedule = graph.schedule
        replicas = {
            stage: _reactions(graph, job, stage, strategy.data)
            for stage in range(schedule.stages)
            if len(schedule.pipelines) > 1
        }
        if isinstance(schedule.pipeline, RecordedPipelineSchedule):
            return RecordedLayout(graph, replicas)
        check_as_many(schedule.pipeline.micro_batches, job.steps)
        return PipelineLayout(
            graph, schedule.pipeline, job.boundary_bytes, pipelines=schedule.pipelines, replicas=replicas
        )

    def footprint(self, job: Job, schedule: ReplicatedSchedule, stage: int) -> Footprint:
        """The pipeline's footprint plus the buckets of the stage."""
        pipeline_footprint = PIPELINES.footprint(job, schedule.pipeline, stage)
        replicas = Job.of(job.stages[stage], len(schedule.pipelines))
        reduced = plugins()[schedule.reduced_by].footprint(replicas, schedule.buckets[stage], 0)
        return replace(
            pipeline_footprint,
            buffers_bytes=pipeline_footprint.buffers_bytes + reduced.buffers_bytes,
            state_bytes=reduced.state_bytes,
            gradients_apart=reduced.gradients_apart,
            updated_share=reduced.updated_share,
        )

    def messages(self, schedule: ReplicatedSchedule, world_size: int, library: str) -> int:
        """The messages of the buckets of the stage with the most."""
        del world_size
        data, replicas = plugins()[schedule.reduced_by], len(schedule.pipelines)
        return max(data.messages(bucket, replicas, library) for bucket in schedule.buckets)

    def as_run(self, strategy: MeshStrategy, job: Job) -> MeshStrategy:
        data = plugin_of(strategy.data).as_run(strategy.data, job)
        return strategy if data == strategy.data else strategy.model_copy(update={"data": data})

    def carried_out_by(self, strategy: MeshStrategy, library: str) -> tuple[MeshStrategy, Sequence[str]]:
        data, ignored = plugin_of(strategy.data).carried_out_by(strategy.data, library)
        return (strategy.model_copy(update={"data": data}) if ignored else strategy), ignored

    def explain(self, before: Strategy, after: MeshStrategy) -> Sequence[str]:
        if not isinstance(before, MeshStrategy):
            return ()
        changed = list(PIPELINES.explain(before.pipeline, after.pipeline))
        if before.data != after.data:
            changed.append(f"{after.data.describe()} within stages")
        return changed

    @property
    def schedule_injection(self) -> ScheduleInjection[MeshStrategy]:
        return _Injection()

    def wrap(self, module: nn.Module, strategy: MeshStrategy, **ddp_options: Any) -> nn.Module:
        del module, ddp_options
        raise UnsupportedError(
            "cannot wrap an unsplit module as replicated pipelines", got=strategy.describe()
        )


def _reactions(
    graph: GraphBuilder[ReplicatedSchedule], job: Job, stage: int, data: Strategy
) -> InRecordedOrder:
    from headway.graph.build import GroupGraph
    from headway.graph.step_layout import InRecordedOrder

    members = graph.schedule.replicas_of(stage)
    of_stage = GroupGraph(graph, graph.schedule.buckets[stage], members, stage, graph.schedule.stages)
    reactions = plugin_of(data).reactions(of_stage, Job.of(job.stages[stage], len(members)), data)
    assert isinstance(reactions, InRecordedOrder)
    graph.slowdowns = of_stage.slowdowns
    return reactions


class _Injection(ScheduleInjection[MeshStrategy]):
    def take_over(self, steps: PipelineSteps, strategy: MeshStrategy) -> None:
        """Check that the script wraps stages as planned, then take over the pipeline's order."""
        for stage, module in steps.modules.items():
            if not any(parameter.requires_grad for parameter in module.parameters()):
                continue  # DDP does not wrap it
            wrapper = plugin_of(strategy.data).recognise(module)
            if wrapper is None or not _is_in_force(strategy, wrapper.options):
                raise PlanError(
                    f"stage {stage} is not wrapped as planned",
                    got=f"no {strategy.data.name}" if wrapper is None else f"{dict(wrapper.options)}",
                    expected=strategy.data.describe(),
                    fix="Wrap stages as the recorded script did, or plan again from a recording of this script.",
                )
        PIPELINES.schedule_injection.take_over(steps, strategy.pipeline)


def _is_in_force(strategy: MeshStrategy, options: Mapping[str, Any]) -> bool:
    """Whether the wrapper's options are those of the plan; of the decoupled all-reduce they are not compared."""
    if isinstance(strategy.data, DecoupledStrategy):
        return True
    return strategy.data == DistributedDataParallelStrategy(**options)


PLUGIN = _Plugin()
