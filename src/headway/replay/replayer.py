"""Replay: the recorded steps again, on a given cluster, under a given strategy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headway import files
from headway.cluster import Cluster
from headway.collectives.algorithms import ALL_GATHER
from headway.errors import TraceError, UserError
from headway.graph.build import GraphBuilder, walk_timelines
from headway.graph.dataflow import Dataflow
from headway.graph.timeline import Point, Timeline, timelines_of
from headway.network.fit import cluster_from_trace, host_costs
from headway.replay.disturbance import play_disturbed
from headway.replay.engine import Schedule
from headway.replay.fidelity import check_fidelity
from headway.replay.folding import period_of
from headway.replay.memory import peak_bytes
from headway.replay.permitted import as_run, deferrable_forms
from headway.replay.what_if import WhatIf
from headway.scheduling.buckets import BucketSchedule, Gather
from headway.strategies.base import Strategy
from headway.strategies.loading import driver
from headway.strategies.registry import STRATEGIES
from headway.trace.events import Kind
from headway.trace.format import Trace

MAX_OPERATIONS = 60_000_000
BYTES_AN_OPERATION = 80  # its line, and when it started and ended


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """One replay: the graph as built, when its operations ran, and the step time that follows.

    ``step_ms`` is the mean over the replayed steps and ranks; ``step_times_ms`` holds each step's mean.
    """

    step_ms: float
    step_times_ms: tuple[float, ...]
    operations: int
    elapsed_s: float
    peak_bytes: int
    graph: GraphBuilder
    schedule: Schedule


class Replayer:
    """Replays one trace, many times if asked: what does not change is computed once.

    ``cluster`` of None fits the links from the trace itself. Raises TraceError where the trace lacks the
    parameter map or the collectives that a replay needs, and on the first replay where the recorded communication
    is not that of the recorded strategy.
    """

    def __init__(self, trace: Trace, cluster: Cluster | None = None) -> None:
        if not trace.model.parameters:
            raise TraceError(
                "the trace names no parameters, so no plan can be laid over it",
                fix="Record a job that constructs DistributedDataParallel.",
            )
        if trace.missing_ranks:
            raise TraceError(
                "the trace lacks ranks, and a replay needs all of them",
                got=f"{len(trace.events)} of {trace.world_size}",
                fix="Import or record every rank.",
            )
        self.trace = trace
        self._checked = False
        self.cluster = cluster_from_trace(trace) if cluster is None else _with_host_costs(cluster, trace)
        if self.cluster.world_size != trace.world_size:
            raise UserError(
                "the cluster is for another world size",
                got=f"{self.cluster.world_size} workers",
                expected=f"the trace's {trace.world_size}",
                fix="To change the number of workers, use --what-if workers=N.",
            )
        self.timelines = {
            rank: tuple(timeline.undisturbed(self.cluster.compute_slowdown) for timeline in timelines)
            for rank, timelines in timelines_of(trace).items()
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
        """What decoupled strategies may gather under the recorded optimizers, and why not everything."""
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
        Raises UnsupportedError for a strategy that the recorded optimizers do not permit.
        """
        with times_in_range():
            return self._replay(strategy, what_if, fold=fold)

    def _replay(self, strategy: Strategy | None, what_if: WhatIf, *, fold: bool) -> ReplayResult:
        begun = time.perf_counter()
        graph, dataflow = self._laid_out(strategy, what_if, fold=fold)
        played = play_disturbed(graph, dataflow, graph.cluster.compute_slowdown)
        times_ms = _step_times_ms(graph, played)
        return ReplayResult(
            step_ms=float(np.mean(times_ms)),
            step_times_ms=tuple(times_ms),
            operations=len(dataflow),
            elapsed_s=time.perf_counter() - begun,
            peak_bytes=peak_bytes(graph.model, graph.schedule, graph.world_size),
            graph=graph,
            schedule=played,
        )

    def lay_out(
        self,
        strategy: Strategy | None = None,
        what_if: WhatIf = WhatIf(),  # noqa: B008
    ) -> tuple[GraphBuilder, Dataflow]:
        """The graph that ``replay`` would play, with all ranks."""
        with times_in_range():
            return self._laid_out(strategy, what_if, fold=False)

    def _laid_out(
        self, strategy: Strategy | None, what_if: WhatIf, *, fold: bool
    ) -> tuple[GraphBuilder, Dataflow]:
        strategy = self._strategy_run(strategy)
        if not self._checked:
            check_fidelity(self.trace, self.recorded_strategy, self.timelines[0], self.cluster)
            self._checked = True
        cluster = what_if.apply(self.cluster)
        schedule = strategy.decide(self.trace.model)
        ranks = self._ranks(cluster.world_size, what_if)
        alike = fold and not what_if.of_ranks
        period = period_of(cluster, len(self.timelines)) if alike else cluster.world_size
        del ranks[period:]
        check_size(ranks, cluster.world_size, schedule)
        folded = period if period < cluster.world_size else 0
        graph = GraphBuilder(cluster, self.trace.model, schedule, folded)
        walk_timelines(graph, driver(strategy, "dataflow").Dataflow(graph), ranks)
        return graph, graph.close()

    def _strategy_run(self, asked: Strategy | None) -> Strategy:
        if asked is None or (asked.name == self.recorded_strategy.name and self._is_recorded(asked)):
            return self.recorded_strategy
        return as_run(asked, *self.permitted)

    def _is_recorded(self, asked: Strategy) -> bool:
        return asked.decide(self.trace.model) == self._recorded_schedule

    @cached_property
    def _recorded_schedule(self) -> BucketSchedule:
        return self.recorded_strategy.decide(self.trace.model)

    def _ranks(self, world_size: int, what_if: WhatIf) -> list[list[Timeline]]:
        """One list of timelines a rank; ranks that were not recorded repeat the recorded ones in turn."""
        recorded = sorted(self.timelines)
        ranks = []
        for rank in range(world_size):
            timelines = self.timelines[recorded[rank % len(recorded)]]
            compute = what_if.compute * what_if.of_ranks.get(rank, 1.0)
            if compute != 1.0:
                timelines = tuple(timeline.scaled(compute) for timeline in timelines)
            ranks.append([timelines[0], *timelines])
        return ranks


def _step_times_ms(graph: GraphBuilder, schedule: Schedule) -> list[float]:
    ends = np.array([schedule.end_ns[graph.boundaries[step]] for step in sorted(graph.boundaries)])
    lengths: list[float] = (np.diff(ends, axis=0).mean(axis=1) / 1e6).tolist()
    return lengths


def check_size(ranks: list[list[Timeline]], world_size: int, schedule: BucketSchedule) -> None:
    """Refuse what would take too long, by what is launched: a bucket's collectives a pass, and blocking ones."""
    items = collectives = 0
    pieces = sum(
        schedule.algorithms.select(ALL_GATHER, bucket.size_bytes, world_size).pieces
        for bucket in schedule.buckets
    )
    for timelines in ranks:
        launched = 0
        for item in (item for timeline in timelines for item in timeline.items):
            items += 1
            launched += pieces * (item.kind == Point.BACKWARD_END) + (item.kind == Point.BLOCKING)
        collectives = max(collectives, launched)
    operations = items + collectives * len(ranks) * (4 * world_size + 4)
    if operations > MAX_OPERATIONS:
        raise UserError(
            "the replay would be too large",
            got=f"about {operations:.1e} operations, {operations * BYTES_AN_OPERATION / 1e9:.0f} GB",
            expected=f"at most {MAX_OPERATIONS:.0e}, {MAX_OPERATIONS * BYTES_AN_OPERATION / 1e9:.0f} GB",
            fix="Replay fewer workers, or record fewer steps.",
        )


@contextmanager
def times_in_range() -> Iterator[None]:
    """Say in words that times are more than replay can count."""
    try:
        yield
    except OverflowError:
        raise UserError(
            "the replayed times are out of range",
            expected="steps of less than a century",
            fix="Check the rates and latencies of the cluster, and --what-if.",
        ) from None


def _with_host_costs(cluster: Cluster, trace: Trace) -> Cluster:
    """``cluster`` with what the recorded hosts spend on updates beside training, unless it says so itself."""
    return cluster.model_copy(update={"algorithms": {**host_costs(trace), **cluster.algorithms}})
