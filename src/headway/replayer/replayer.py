"""Replay: the recorded steps again, on a given cluster, under a given strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import ValidationError

from headway import files
from headway.cluster import RUNTIME_COSTS, UPDATE_BESIDE, Cluster
from headway.collectives.links import Links
from headway.errors import TraceError, UserError
from headway.graph.build import GraphBuilder, walk_timelines
from headway.graph.recorded import timelines_of
from headway.graph.timeline import Timeline
from headway.network.fit import cluster_from_trace, host_costs, library_of
from headway.replayer.disturbance import play_disturbed
from headway.replayer.expectation import (
    Expectation,
    crowded,
    expected_ms,
    half_width_ms,
    share_of_replay,
)
from headway.replayer.fidelity import check_fidelity
from headway.replayer.folding import period_of
from headway.replayer.gaps import gap_note
from headway.replayer.incomplete import check_takes_plans, lacks, of_recorded_buckets
from headway.replayer.memory import peak_bytes
from headway.replayer.permitted import as_run, deferrable_forms
from headway.replayer.ranks import draws_of, may_fold, ranks_of
from headway.replayer.size import check_size, times_in_range
from headway.replayer.uncertainty import doubts, unfitted
from headway.replayer.what_if import WhatIf
from headway.scheduling.buckets import BucketSchedule, Gather
from headway.simulation.engine import Schedule
from headway.simulation.operations import Dataflow
from headway.strategies.base import Strategy
from headway.strategies.loading import driver
from headway.strategies.registry import STRATEGIES
from headway.trace.events import Kind
from headway.trace.format import Trace


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """One replay: the graph as built, when its operations ran, and the step time that follows.

    ``step_ms`` is the mean over the replayed steps and ranks; ``step_times_ms`` holds each step's mean. Of it,
    ``waiting_ms`` is what ranks did not compute in: they waited for communication, or for each other.
    ``peak_bytes`` is None where the trace names no parameters. ``strategy`` is the one that was played.
    """

    step_ms: float
    step_times_ms: tuple[float, ...]
    waiting_ms: float
    operations: int
    elapsed_s: float
    peak_bytes: int | None
    strategy: Strategy
    graph: GraphBuilder
    schedule: Schedule


class Replayer:
    """Replays one trace, many times if asked: what does not change is computed once.

    ``cluster`` of None takes what the job measured of itself, or fits the links from the trace. A trace without a
    parameter map, or without some of its ranks, is replayed as far as that goes; ``lacks`` says how far. Raises
    TraceError where the trace lacks the collectives that a replay needs, and on the first replay where the recorded
    communication is not that of the recorded strategy, or where a plan is to be laid over a trace without parameters.
    """

    def __init__(self, trace: Trace, cluster: Cluster | None = None) -> None:
        self.trace = trace if trace.model.parameters else of_recorded_buckets(trace)
        self.lacks = lacks(trace, self.trace)
        self._recorded = trace
        self._checked = False
        self._links: Links | None = None
        known = cluster or trace.cluster
        self.cluster = _fitted(self.trace) if known is None else _with_host_costs(known, trace)
        if self.cluster.world_size != trace.world_size:
            raise UserError(
                "the cluster is for another world size",
                got=f"{self.cluster.world_size} workers",
                expected=f"the trace's {trace.world_size}",
                fix="To change the number of workers, use --what-if workers=N.",
            )
        if min(self.recorded_step_times_ms) <= 0:
            raise TraceError(
                "a recorded step takes no time, so there is nothing to replay", fix="Record again."
            )
        self.timelines = self._timelines({})

    def _timelines(self, factors: Mapping[str, float]) -> dict[int, tuple[Timeline, ...]]:
        """The recorded steps, where what matches patterns takes so many times as long."""
        return {
            rank: tuple(timeline.undisturbed(self.cluster.compute_slowdown) for timeline in timelines)
            for rank, timelines in timelines_of(self.trace, factors).items()
        }

    @cached_property
    def recorded_strategy(self) -> Strategy:
        """The strategy that was in force when the trace was recorded."""
        for name, options in self.trace.manifest.ranks[0].strategy.items():
            if name in STRATEGIES:
                what = f"the trace's strategy {name}"
                return files.validate(options, STRATEGIES[name], TraceError, what)
        raise TraceError("the trace does not say which strategy was in force", fix="Record it again.")

    @cached_property
    def permitted(self) -> tuple[Sequence[Gather], str]:
        """What decoupled strategies may gather for the recorded job, and why not everything."""
        return deferrable_forms(self.trace)

    @cached_property
    def recorded_step_times_ms(self) -> tuple[float, ...]:
        """For each recorded step, its mean length over ranks."""
        lengths = [events.of_kind(Kind.STEP).duration_ns / 1e6 for events in self.trace.events.values()]
        count = min(len(each) for each in lengths)
        return tuple(np.mean([each[:count] for each in lengths], axis=0).tolist())

    @property
    def recorded_step_ms(self) -> float:
        """The mean recorded step, over steps and ranks."""
        return float(np.mean(self.recorded_step_times_ms))

    @property
    def recorded_error_ms(self) -> float:
        """The standard error of that mean."""
        return _standard_error_ms(self.recorded_step_times_ms)

    @cached_property
    def base(self) -> ReplayResult:
        """The recorded job replayed as it was."""
        return self.replay()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trace lacks, and what makes answers from it worth little."""
        steps_ms = dict(zip(self.trace.steps, self.recorded_step_times_ms, strict=False))
        said = (*self.lacks, *doubts(steps_ms, unfitted(self.base.graph)))
        # Under a decoupled strategy a look that takes long waits, and waits are recorded.
        decoupled = bool(self._recorded_schedule.gather_order)
        return said if decoupled else (*said, *gap_note(self.timelines.values(), self.recorded_step_ms))

    def expect(self, result: ReplayResult) -> Expectation:
        """What a live job is expected to take of which ``result`` is the replay, held against the recorded one."""
        recorded_ms, reproduced_ms = self.recorded_step_ms, self.base.step_ms
        same = result.strategy.name == self.recorded_strategy.name
        step_ms = expected_ms(
            result.step_ms, recorded_ms=recorded_ms, reproduced_ms=reproduced_ms, same_strategy=same
        )
        graph = result.graph
        full = crowded(
            graph.world_size, step_ms, self.trace.world_size, recorded_ms, graph.cluster.shared_cores
        )
        uncertainty_ms = half_width_ms(
            step_ms,
            recorded_error_ms=self.recorded_error_ms,
            reproduction_error=abs(reproduced_ms / recorded_ms - 1),
            model_share=share_of_replay(
                same_strategy=same, busy=graph.cluster.compute_slowdown > 0, crowded=full
            ),
            links_ms=unfitted(graph) * result.waiting_ms,
        )
        return Expectation(recorded_ms, step_ms, uncertainty_ms)

    def replay(
        self,
        strategy: Strategy | None = None,
        what_if: WhatIf = WhatIf(),  # noqa: B008
        *,
        fold: bool = True,
    ) -> ReplayResult:
        """Replay every recorded step under ``strategy`` (the recorded one by default) and ``what_if``.

        Ranks that do the same at the same moment are played once, unless ``fold`` is False.

        The first step is played once before, so that what a strategy carries over from step to step is under way.
        Raises UnsupportedError for a strategy that the recorded job does not permit.
        """
        with times_in_range():
            return self._replay(strategy, what_if, fold=fold)

    def _replay(self, strategy: Strategy | None, what_if: WhatIf, *, fold: bool) -> ReplayResult:
        begun = time.perf_counter()
        strategy = self._strategy_run(strategy)
        graph, dataflow = self._laid_out(strategy, what_if, fold=fold)
        played = play_disturbed(graph, dataflow, graph.cluster.compute_slowdown)
        times_ms = _step_times_ms(graph, played)
        return ReplayResult(
            step_ms=float(np.mean(times_ms)),
            step_times_ms=tuple(times_ms),
            waiting_ms=_waiting_ms(graph, played),
            operations=len(dataflow),
            elapsed_s=time.perf_counter() - begun,
            peak_bytes=self._peak_bytes(graph, strategy),
            strategy=strategy,
            graph=graph,
            schedule=played,
        )

    def _peak_bytes(self, graph: GraphBuilder, strategy: Strategy) -> int | None:
        if not self._recorded.model.parameters:
            return None
        return peak_bytes(graph.model, strategy, graph.schedule, graph.world_size)

    def lay_out(
        self,
        strategy: Strategy | None = None,
        what_if: WhatIf = WhatIf(),  # noqa: B008
    ) -> tuple[GraphBuilder, Dataflow]:
        """The graph that ``replay`` would play, with all ranks."""
        with times_in_range():
            return self._laid_out(self._strategy_run(strategy), what_if, fold=False)

    def _laid_out(self, strategy: Strategy, what_if: WhatIf, *, fold: bool) -> tuple[GraphBuilder, Dataflow]:
        if not self._checked:
            check_fidelity(self.trace, self.recorded_strategy, self.timelines, self.cluster)
            self._checked = True
        cluster = what_if.apply(self.cluster)
        schedule = strategy.decide(self.trace.model)
        own = self._timelines(what_if.of_kernels) if what_if.of_kernels else self.timelines
        draws = draws_of(own, cluster, schedule)
        alike = fold and not what_if.of_ranks and may_fold(own)
        period = period_of(cluster, draws * len(own)) if alike else cluster.world_size
        computes = (what_if.compute * what_if.of_ranks.get(rank, 1.0) for rank in range(period))
        ranks = ranks_of(own, draws, computes)
        check_size(ranks, cluster, schedule)
        folded = period if period < cluster.world_size else 0
        links = self._links_of(cluster, folded)
        graph = GraphBuilder(cluster, self.trace.model, schedule, folded, links)
        walk_timelines(graph, driver(strategy, "dataflow").Dataflow(graph), ranks)
        return graph, graph.close()

    def _links_of(self, cluster: Cluster, folded: int) -> Links:
        """The links of the replay before, where they are the same: most plans are tried on one cluster."""
        before = self._links
        if before is None or before.folded != folded or before.cluster != cluster:
            self._links = before = Links(cluster, folded)
        return before

    def _strategy_run(self, asked: Strategy | None) -> Strategy:
        if asked is not None:
            check_takes_plans(self._recorded)
        if asked is None or (asked.name == self.recorded_strategy.name and self._is_recorded(asked)):
            return self.recorded_strategy
        return as_run(asked, *self.permitted)

    def _is_recorded(self, asked: Strategy) -> bool:
        return asked.decide(self.trace.model) == self._recorded_schedule

    @cached_property
    def _recorded_schedule(self) -> BucketSchedule:
        return self.recorded_strategy.decide(self.trace.model)


def _step_times_ms(graph: GraphBuilder, schedule: Schedule) -> list[float]:
    ends = np.array([schedule.end_ns[graph.boundaries[step]] for step in sorted(graph.boundaries)])
    lengths: list[float] = (np.diff(ends, axis=0).mean(axis=1) / 1e6).tolist()
    return lengths


def _waiting_ms(graph: GraphBuilder, schedule: Schedule) -> float:
    """The mean over steps and ranks of what main threads stood still for, the step before the first one left out."""
    computed_ns = sum(
        int(schedule.end_ns[each.operation] - schedule.start_ns[each.operation])
        for each in graph.stretches
        if each.step > 0
    )
    first, last = (np.array(graph.boundaries[step]) for step in (0, max(graph.boundaries)))
    steps = len(graph.boundaries) - 1
    took_ns = float((schedule.end_ns[last] - schedule.end_ns[first]).mean())
    return max(0.0, (took_ns - computed_ns / graph.ranks) / steps / 1e6)


def _standard_error_ms(times_ms: Sequence[float]) -> float:
    return float(np.std(times_ms, ddof=1) / math.sqrt(len(times_ms))) if len(times_ms) > 1 else 0.0


def _fitted(trace: Trace) -> Cluster:
    try:
        return cluster_from_trace(trace)
    except ValidationError as failure:
        complaint = failure.errors(include_url=False)[0]
        raise TraceError(
            f"links cannot be fitted from the trace: {complaint['loc'][0]}: {complaint['msg']}",
            got=repr(complaint["input"]), fix="Pass --cluster.",
        ) from None  # fmt: skip


def _with_host_costs(cluster: Cluster, trace: Trace) -> Cluster:
    """``cluster`` with what the recorded hosts spend on updates beside training, unless it says so itself.

    And with the library that the job used.
    """
    library = cluster.library if "library" in cluster.model_fields_set else library_of(trace)
    measured, changed = cluster.algorithms, dict[str, Any](library=library)
    if "decoupled" in trace.manifest.ranks[0].strategy:  # what was recorded holds them, or shows them
        held = (*RUNTIME_COSTS, UPDATE_BESIDE)
        measured = {name: cost for name, cost in measured.items() if name not in held}
        changed["decoupled_slowdown"] = None
    changed["algorithms"] = {**host_costs(trace), **measured}
    return cluster.model_copy(update=changed)
