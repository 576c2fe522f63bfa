"""Replays recorded steps on a cluster, under any strategy, and predicts the step of the live job."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from statistics import median
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import ValidationError

from headway import files
from headway.cluster import Cluster
from headway.errors import TraceError, UserError
from headway.graph.build import GraphBuilder
from headway.graph.computation import Computation, Part, Point, Timeline
from headway.graph.recorded import timelines_of
from headway.job import Job, OptimizerUse
from headway.network.fit import cluster_from_trace, host_costs, library_of
from headway.passes.base import Pass, rewritten
from headway.plan import Plan
from headway.plugins import asking
from headway.replayer.cut_recording import CUT_SHARE, SPLIT_SHARE, job_under, names_stages
from headway.replayer.fidelity import check_fidelity
from headway.replayer.incomplete import (
    check_not_averaged,
    check_pipeline,
    check_same_steps,
    check_takes_plans,
    lacks,
    of_recorded_buckets,
)
from headway.replayer.measured_effects import measured_effects
from headway.scheduling.mesh import groups_along
from headway.scheduling.schedule import Schedule
from headway.simulation.building import OperationGraph
from headway.simulator.expectation import (
    Expectation,
    crowded,
    doubts,
    expected_ms,
    half_width_ms,
    share_of_replay,
    unfitted,
)
from headway.simulator.simulate import Simulation, Simulator, check_lives_through, times_in_range
from headway.simulator.what_if import WhatIf
from headway.strategies import registry
from headway.strategies.base import DATA, PIPELINE, Strategy, decided
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.horizon import Outcome
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.registry import plugin_of
from headway.trace.events import Event, Kind, Read
from headway.trace.format import Trace

LARGE = 0.03  # share of a step from which a gap is mentioned


def gap_ns(ranks: Iterable[Sequence[Timeline]]) -> float:
    """The mean time in ns between the end of backward and the optimizer's step, without waits and recorded reads.

    A recorded read of all gradients explains the gap, so it then does not count.
    """
    return float(np.mean([_gap_ns(timeline) for timelines in ranks for timeline in timelines]))


def gap_note(ranks: Iterable[Sequence[Timeline]], step_ms: float) -> tuple[str, ...]:
    """A note on what a large gap means for decoupled plans; empty for a small gap."""
    gap_ms = gap_ns(ranks) / 1e6
    if gap_ms < LARGE * step_ms:
        return ()
    return (
        f"{gap_ms:.1f} ms of each step lie between backward and the optimizer's step, outside any recorded read of "
        "gradients. If the script reads .grad there, decoupled plans will be slower than predicted, because the read "
        "waits for communication.",
    )


def _gap_ns(timeline: Timeline) -> int:
    total = gap = 0
    ended = False
    for item in timeline.items:
        if item.kind == Point.BACKWARD_END:
            ended, gap = True, 0
        elif item.kind == Point.STEP:
            total += gap if ended else 0
            ended, gap = False, 0
        elif item.kind == Part.READ and item.name == Read.LOOK and not item.parameters:
            ended = False
        elif item.kind == Part.REST:
            gap += item.duration_ns
    return total


NO_MESH: Mapping[str, int] = MappingProxyType({})


def recorded_mesh(trace: Trace) -> Mapping[str, int]:
    """The mesh of stages and replicas, outermost dimension first; empty for a job without both.

    Raises TraceError if the stages of ranks do not form a mesh, or if messages or gradient collectives cross its groups.
    """
    stages = len(trace.stages)
    if not stages or stages == trace.world_size or trace.stages_a_rank > 1:
        return NO_MESH
    replicas = trace.world_size // stages
    stage_of = {rank: stage for rank, stage in _stages(trace).items() if stage >= 0}
    for mesh in ({PIPELINE: stages, DATA: replicas}, {DATA: replicas, PIPELINE: stages}):
        if stages * replicas == trace.world_size and all(
            pipeline_ranks[stage] == rank
            for rank, stage in stage_of.items()
            for pipeline_ranks in groups_along(mesh, PIPELINE)
            if rank in pipeline_ranks
        ):
            _check_groups(trace, mesh)
            return MappingProxyType(mesh)
    raise TraceError(
        "replay does not support pipelines whose ranks do not form a mesh of stages and replicas",
        got=", ".join(f"stage {stage} on rank {rank}" for rank, stage in sorted(stage_of.items())),
        expected=f"{stages} stages with equally many replicas, in order",
        fix="Build process groups with torch.distributed.init_device_mesh.",
    )


def recorded_on_mesh(strategies: Sequence[Strategy]) -> Strategy:
    """Combine the recorded strategies into a mesh strategy. Raises TraceError if stages do not use DDP."""
    data = [strategy for strategy in strategies if strategy.dimension == DATA]
    pipelines = [strategy for strategy in strategies if isinstance(strategy, PipelineStrategy)]
    if len(data) != 1 or not isinstance(data[0], DistributedDataParallelStrategy):
        raise TraceError(
            "replay of parallel pipelines needs stages wrapped in DistributedDataParallel",
            got=", ".join(strategy.describe() for strategy in data) or "no known strategy for gradients",
            fix="Use headway diagnose; its breakdown and links are valid for these pipelines too.",
        )
    order = pipelines[0] if pipelines else PipelineStrategy(order="recorded")
    return MeshStrategy(pipeline=order, data=data[0])


def _stages(trace: Trace) -> dict[int, int]:
    return {rank: int(events.stage.max(initial=-1)) for rank, events in trace.events.items()}


def _check_groups(trace: Trace, mesh: Mapping[str, int]) -> None:
    """Raise TraceError unless replicas reduce gradients among themselves and messages stay within a pipeline."""
    replicas = {rank: set(group_ranks) for group_ranks in groups_along(mesh, DATA) for rank in group_ranks}
    pipelines = {
        rank: set(group_ranks) for group_ranks in groups_along(mesh, PIPELINE) for rank in group_ranks
    }
    for rank, events in trace.events.items():
        reduced = events.of_kind(Kind.COLLECTIVE)
        for group in np.unique(np.array(reduced.group)[reduced.bucket >= 0]).tolist():
            if set(trace.members(group)) != replicas[rank]:
                raise TraceError(
                    "replay requires gradients to be reduced among the replicas of a stage",
                    got=f"rank {rank} with ranks {', '.join(map(str, sorted(trace.members(group))))}",
                    expected=f"ranks {', '.join(map(str, sorted(replicas[rank])))}",
                )  # fmt: skip
        messages = events.of_kind(Kind.SEND, Kind.RECEIVE)
        strangers = set(messages.peer[messages.stage >= 0].tolist()) - pipelines[rank]
        if strangers:
            raise TraceError(
                "replay does not support messages between pipelines",
                got=f"rank {rank} to or from rank {min(strangers)}",
            )


def recorded_job(trace: Trace, cluster: Cluster, *, has_parameters: bool = True) -> Job:
    """The job of ``trace`` on ``cluster``, which has the same number of workers.

    ``has_parameters`` is False if buckets stand for parameters. Raises TraceError as ``timelines_of`` does.
    """

    def timelines(factors: Mapping[str, float]) -> dict[int, tuple[Timeline, ...]]:
        return {
            rank: tuple(timeline.undisturbed(cluster.compute_slowdown) for timeline in rank_timelines)
            for rank, rank_timelines in timelines_of(trace, factors).items()
        }

    refusals = (info.refusals for info in reversed(trace.manifest.ranks))
    return Job(
        stages=trace.stages or (trace.model,),
        boundary_bytes=boundary_bytes(trace),
        mesh=recorded_mesh(trace),
        world_size=trace.world_size,
        cluster=cluster,
        computation=Computation(timelines({}), with_factors=timelines),
        optimizers=_optimizers(trace),
        refusals={name: why for refusal in refusals for name, why in refusal.items()},
        has_parameters=has_parameters,
        measured=measured_effects(trace),
    )


def boundary_bytes(trace: Trace) -> tuple[int, ...]:
    """The bytes that each stage except the last passes on per micro-batch: the median size of its messages.

    Activations and their gradients have the same size.
    """
    if not trace.stages:
        return ()
    sizes: dict[int, list[int]] = defaultdict(list)
    for events in trace.events.values():
        rows: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
        for row in events.of_kind(Kind.SEND):
            if row.stage >= 0:
                rows[row.step, row.stage, row.micro_batch].append(row)
        for (_, stage, _), sends in rows.items():
            for boundary, row in zip(_boundaries(stage, sends, trace.ranks_of_stages), sends, strict=True):
                sizes[boundary].append(row.size_bytes)
    return tuple(round(median(sizes[stage] or [0])) for stage in range(len(trace.stages) - 1))


def _boundaries(stage: int, rows: Sequence[Event], ranks_of: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """The boundary that each message of one micro-batch from ``stage`` crosses, in order of sending.

    If the previous and the next stage are on one rank, the first half of the messages carries activations.
    """
    both = [
        row.peer in ranks_of.get(stage + 1, ()) and row.peer in ranks_of.get(stage - 1, ()) for row in rows
    ]
    activations_left = sum(both) // 2
    for row, is_both in zip(rows, both, strict=True):
        forward = row.peer in ranks_of.get(stage + 1, ())
        if is_both:
            forward = activations_left > 0
            activations_left -= 1
        yield stage if forward else stage - 1


def _optimizers(trace: Trace) -> OptimizerUse:
    """The optimizers in use, and the median number of updates after a backward on one rank."""
    names = {row.name for events in trace.events.values() for row in events.of_kind(Kind.OPTIMIZER)}
    rows = trace.events[min(trace.events)].of_kind(Kind.BACKWARD_PASS, Kind.OPTIMIZER)
    most: Counter[int] = Counter()
    behind = 0
    for index in np.argsort(rows.start_ns, kind="stable").tolist():
        behind = behind + 1 if rows.kind[index] == Kind.OPTIMIZER else 0
        step = int(rows.step[index])
        most[step] = max(most[step], behind)
    return OptimizerUse(tuple(sorted(filter(None, names))), median(most.values() or [0]))


class Replayer:
    """Replays one trace any number of times; whatever does not change is computed once.

    Without ``cluster``, uses the one that the job measured, or fits the links from the trace. A trace without parameter
    names or without some ranks is replayed as far as possible; ``lacks`` says what is missing. Raises TraceError if the
    trace has no collectives to replay, or its ranks took different numbers of steps. The first replay raises TraceError
    if the recorded communication does not match the recorded strategy, or a plan needs missing parameter names.
    """

    def __init__(self, trace: Trace, cluster: Cluster | None = None) -> None:
        check_not_averaged(trace)
        check_pipeline(trace)
        check_same_steps(trace)
        self.trace = trace if trace.model.parameters else of_recorded_buckets(trace)
        self.lacks = lacks(trace, self.trace)
        self._recorded = trace
        self._simulator = Simulator()
        self._slower: WeakKeyDictionary[Job, Job] = WeakKeyDictionary()
        declared = cluster or trace.cluster
        self.cluster = _fitted(self.trace) if declared is None else _with_host_costs(declared, trace)
        if self.cluster.world_size != trace.world_size:
            raise UserError(
                "the cluster is for another world size",
                got=f"{self.cluster.world_size} workers",
                expected=f"{trace.world_size}, as in the trace",
                fix="To change the number of workers, use --what-if workers=N.",
            )
        if min(self.recorded_step_times_ms) <= 0:
            raise TraceError("a recorded step has no duration", fix="Record again.")
        self.job = recorded_job(self.trace, self.cluster, has_parameters=bool(trace.model.parameters))

    @cached_property
    def recorded_strategy(self) -> Strategy:
        """The strategy in force during the recording."""
        strategies = [
            files.validate(options, registry.policy_named(name), TraceError, f"the trace's strategy {name}")
            for name, options in self.trace.manifest.ranks[0].strategy.items()
            if name in registry.names()
        ]
        for name in self.trace.manifest.ranks[0].strategy:
            registry.check_usable(name)
        if self.job.mesh:
            return recorded_on_mesh(strategies)
        for strategy in strategies:
            return strategy
        raise TraceError("the trace does not say which strategy was in force", fix="Record it again.")

    @cached_property
    def recorded_step_times_ms(self) -> tuple[float, ...]:
        """The duration of each recorded step, averaged over ranks."""
        steps = [events.of_kind(Kind.STEP) for events in self.trace.events.values()]
        lengths = [step.duration_ns[np.isin(step.step, self.trace.steps)] / 1e6 for step in steps]
        return tuple(np.mean(lengths, axis=0).tolist())

    @property
    def recorded_step_ms(self) -> float:
        """The mean recorded step time over steps and ranks."""
        return float(np.mean(self.recorded_step_times_ms))

    @property
    def recorded_error_ms(self) -> float:
        """The standard error of ``recorded_step_ms``."""
        return _standard_error_ms(self.recorded_step_times_ms)

    @cached_property
    def base(self) -> Simulation:
        """The replay of the job as recorded."""
        return self.replay()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what the trace lacks, and on what makes predictions less reliable."""
        steps_ms = dict(zip(self.trace.steps, self.recorded_step_times_ms, strict=False))
        notes = (*self.lacks, *doubts(steps_ms, unfitted(self.base.graph)))
        # If communication continues after backward, a slow read of gradients shows up as a recorded wait already.
        if plugin_of(self.recorded_strategy).carries_over:
            return notes
        return (*notes, *gap_note(self.job.steps.timelines.values(), self.recorded_step_ms))

    def expect(self, result: Simulation) -> Expectation:
        """The expected step of the live job that ``result`` replays, relative to the recorded step."""
        recorded_ms = self.recorded_step_ms
        same = result.strategy.family == self.recorded_strategy.family
        step_ms = self._expected_ms(result.step_ms, same_strategy=same)
        graph = result.graph
        full = crowded(
            graph.world_size, step_ms, self.trace.world_size, recorded_ms, graph.cluster.shared_cores
        )
        share = share_of_replay(same_strategy=same, busy=graph.cluster.compute_slowdown > 0, crowded=full)
        uncertainty_ms = self._half_width_ms(step_ms, share, links_ms=unfitted(graph) * result.waiting_ms)
        if result.job.stages != self.job.stages:
            share = CUT_SHARE if len(self.job.stages) == 1 else SPLIT_SHARE
            slower = self._slower.get(result.job)
            more_ms = (
                0.0 if slower is None else self.simulate(slower, result.strategy).step_ms - result.step_ms
            )
            uncertainty_ms = math.hypot(uncertainty_ms, share * step_ms, max(0.0, more_ms))
        return Expectation(recorded_ms, step_ms, uncertainty_ms)

    def expect_outcome(self, outcome: Outcome) -> Expectation:
        """The expected mean iteration of a rank under an asynchronous strategy.

        The uncertainty is that of synchronous strategies; it was not measured for asynchronous ones.
        """
        step_ms = self._expected_ms(outcome.step_ms, same_strategy=False)
        share = share_of_replay(same_strategy=False, busy=self.cluster.compute_slowdown > 0, crowded=False)
        uncertainty_ms = self._half_width_ms(step_ms, share, outcome.cost_error * outcome.standing_ms)
        return Expectation(self.recorded_step_ms, step_ms, uncertainty_ms)

    def _expected_ms(self, step_ms: float, *, same_strategy: bool) -> float:
        return expected_ms(
            step_ms,
            recorded_ms=self.recorded_step_ms,
            reproduced_ms=self.base.step_ms,
            same_strategy=same_strategy,
        )

    def _half_width_ms(self, step_ms: float, model_share: float, links_ms: float) -> float:
        return half_width_ms(
            step_ms,
            recorded_error_ms=self.recorded_error_ms,
            reproduction_error=abs(self.base.step_ms / self.recorded_step_ms - 1),
            model_share=model_share,
            links_ms=links_ms,
        )

    def job_under(self, strategy: Strategy, mesh: Mapping[str, int] | None = None) -> Job:
        """The recorded job with the stages of ``strategy`` along ``mesh``, if they differ from the recorded ones.

        Raises PlanError if the recording cannot be split this way.
        """
        job, slower = job_under(self.trace, self._faithful_job, self.recorded_strategy, strategy, mesh)
        if slower is not None:
            self.may_be_slower(job, slower)
        return job

    def may_be_slower(self, job: Job, slower: Job) -> None:
        """Register ``slower`` as the worst case of ``job``, which widens its uncertainty."""
        self._slower[job] = slower

    def check(self, plan: Plan) -> None:
        """Raise PlanError unless ``plan`` fits the recorded job, or stages that it can be split into."""
        trace = self._recorded
        stages = trace.stages
        if plan.world_size == trace.world_size and names_stages(plan.strategy):
            check_takes_plans(trace)
            stages = self.job_under(plan.strategy, plan.mesh).stages
        plan.check_recorded(trace.model, stages, trace.world_size)

    def simulate(self, job: Job, strategy: Strategy) -> Simulation:
        """Simulate ``job``, which was derived from the recorded one."""
        return self._simulator.simulate(job, strategy)

    def replay(
        self,
        strategy: Strategy | None = None,
        what_if: WhatIf = WhatIf(),  # noqa: B008
        *,
        passes: Sequence[Pass] = (),
        fold: bool = True,
        mesh: Mapping[str, int] | None = None,
    ) -> Simulation:
        """Replay every recorded step under ``strategy`` (by default the recorded one), ``what_if`` and ``passes``.

        Identical ranks are simulated once, unless ``fold`` is False. The first step runs once more as a warm-up, so
        that communication carried over between steps is in flight. A pipeline with ``split_points`` is replayed with
        these stages, along ``mesh`` if that has several dimensions. Raises UnsupportedError if the recorded job does not
        permit the strategy, and PlanError if the recording does not show enough to form the stages.
        """
        with times_in_range():
            played = self._strategy_run(strategy)
            job = self._faithful_job if strategy is None else self.job_under(strategy, mesh)
            changed = _changed(job, what_if, passes)
            if (slower := self._slower.get(job)) is not None:
                self.may_be_slower(changed, _changed(slower, what_if, passes))
            return self._simulator.simulate(changed, played, fold=fold)

    def replay_horizon(
        self,
        strategy: Strategy,
        what_if: WhatIf = WhatIf(),  # noqa: B008
        *,
        passes: Sequence[Pass] = (),
    ) -> Outcome | None:
        """Simulate an asynchronous ``strategy`` over a time horizon; None for synchronous strategies.

        Raises as ``replay`` does.
        """
        with times_in_range():
            played = self._strategy_run(strategy)
            job = rewritten(what_if.rewrite(self._faithful_job), passes)
            check_lives_through(job, played)
            with asking("strategy", played):
                return plugin_of(played).over_a_horizon(job, played)

    def lay_out(
        self,
        strategy: Strategy | None = None,
        what_if: WhatIf = WhatIf(),  # noqa: B008
    ) -> tuple[GraphBuilder[Any], OperationGraph]:
        """The graph that ``replay`` simulates, with all ranks."""
        with times_in_range():
            played = self._strategy_run(strategy)
            job = self._faithful_job if strategy is None else self.job_under(strategy)
            return self._simulator.lay_out(what_if.rewrite(job), played)

    @cached_property
    def _faithful_job(self) -> Job:
        """The job, after the check that its replay communicates what was recorded."""
        check_fidelity(self.trace, self.recorded_strategy, self.job)
        return self.job

    def _strategy_run(self, strategy: Strategy | None) -> Strategy:
        if strategy is not None:
            check_takes_plans(self._recorded)
        if strategy is None or (strategy.name == self.recorded_strategy.name and self._is_recorded(strategy)):
            return self.recorded_strategy
        with asking("strategy", strategy):
            return plugin_of(strategy).as_run(strategy, self.job)

    def _is_recorded(self, strategy: Strategy) -> bool:
        return decided(strategy, self.job) == self._recorded_schedule

    @cached_property
    def _recorded_schedule(self) -> Schedule:
        return decided(self.recorded_strategy, self.job)


def _changed(job: Job, what_if: WhatIf, passes: Sequence[Pass]) -> Job:
    return rewritten(what_if.rewrite(job), passes)


def _standard_error_ms(times_ms: Sequence[float]) -> float:
    return float(np.std(times_ms, ddof=1) / math.sqrt(len(times_ms))) if len(times_ms) > 1 else 0.0


def _fitted(trace: Trace) -> Cluster:
    try:
        return cluster_from_trace(trace)
    except ValidationError as failure:
        complaint = failure.errors(include_url=False)[0]
        raise TraceError(
            f"cannot fit links from the trace: {complaint['loc'][0]}: {complaint['msg']}",
            got=repr(complaint["input"]), fix="Pass --cluster.",
        ) from None  # fmt: skip


def _with_host_costs(cluster: Cluster, trace: Trace) -> Cluster:
    """``cluster`` with the job's library and the recorded hosts' update costs, where it lacks them."""
    library = cluster.library if "library" in cluster.model_fields_set else library_of(trace)
    for name in trace.manifest.ranks[0].strategy:
        if name in registry.names():
            cluster = registry.plugin_named(name).without_own_costs(cluster)
    algorithms = {**host_costs(trace), **cluster.algorithms}
    return cluster.model_copy(update={"library": library, "algorithms": algorithms})
