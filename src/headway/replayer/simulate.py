"""One job under one strategy, simulated: decided, laid out as a graph of all ranks, and played in time.

Recordings, workloads that were never run and schedules of a live tuner are all jobs, and are all simulated here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.cluster import Cluster
from headway.collectives.resources import ClusterResources
from headway.collectives.servers import EVENLY
from headway.errors import PlanError, UnsupportedError
from headway.graph.build import ComputeSpan, GraphBuilder
from headway.graph.disturbance import play_disturbed
from headway.graph.step_layout import lay_out_ranks
from headway.job import Job
from headway.plugins import asking
from headway.replayer.folding import played_ranks
from headway.replayer.memory import peak_is_rough, rank_peaks_bytes
from headway.replayer.ranks import draws_of, may_fold, ranks_of
from headway.replayer.size import check_size, times_in_range
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule
from headway.simulation.building import OperationGraph
from headway.simulation.engine import PlayedTimes
from headway.strategies.base import Strategy, decided, fits
from headway.strategies.registry import carried_out_by, plugin_of


@dataclass(frozen=True, eq=False)
class Simulation:
    """The simulation of a job: the graph as built, and when its operations ran.

    ``played`` says when they ran; ``operations`` is their number, and laying them out and simulating them took
    ``elapsed_s``.
    """

    job: Job
    strategy: Strategy
    graph: GraphBuilder[Any]
    played: PlayedTimes
    operations: int
    elapsed_s: float

    @property
    def first_step(self) -> int:
        """The position of the first step that counts."""
        return self.job.steps.warm_up_steps

    @cached_property
    def step_times_ns(self) -> npt.NDArray[np.float64]:
        """For each step that counts and that all ranks come to the end of, its mean length over ranks."""
        steps = self.graph.common_steps[self.first_step - 1 :]
        ends_ns = np.array([self.played.end_ns[self.graph.boundaries[step]] for step in steps])
        lengths: npt.NDArray[np.float64] = np.diff(ends_ns, axis=0).mean(axis=1)
        return lengths

    @cached_property
    def step_times_ms(self) -> tuple[float, ...]:
        """The same in ms."""
        return tuple((self.step_times_ns / 1e6).tolist())

    @cached_property
    def step_ms(self) -> float:
        """The mean over the steps that count, and over ranks."""
        return float(np.mean(self.step_times_ms))

    def duration_ns(self, span: ComputeSpan) -> int:
        """How long a span of computation took."""
        return int(self.played.end_ns[span.operation] - self.played.start_ns[span.operation])

    @cached_property
    def waiting_ms(self) -> float:
        """The time in which ranks did not compute, as they waited, averaged over steps and ranks."""
        common, boundaries = self.graph.common_steps, self.graph.boundaries
        spans = (each for each in self.graph.spans if self.first_step <= each.step <= common[-1])
        computed_ns = sum(map(self.duration_ns, spans))
        first, last = (np.array(boundaries[step]) for step in (self.first_step - 1, common[-1]))
        steps = len(common) - self.first_step
        took_ns = float((self.played.end_ns[last] - self.played.end_ns[first]).mean())
        return max(0.0, (took_ns - computed_ns / self.graph.ranks) / steps / 1e6)

    @cached_property
    def peak_bytes(self) -> int | None:
        """The most that one rank holds at once; None where nothing is known of parameters."""
        peaks_bytes = self.peaks_bytes
        return None if peaks_bytes is None else max(peaks_bytes)

    @cached_property
    def peaks_bytes(self) -> tuple[int, ...] | None:
        """The same of a rank of each stage, or of each rank that has several."""
        if not self.job.has_parameters:
            return None
        return rank_peaks_bytes(self.job, self.strategy, self.graph.schedule)

    @cached_property
    def peak_is_rough(self) -> bool:
        """Whether these peaks are of a job whose memory was not watched."""
        return peak_is_rough(self.job, self.strategy, self.graph.schedule)

    def rank_peak_bytes(self, rank: int) -> int | None:
        """The most that ``rank`` holds at once: that of its stages, where it has some of its own."""
        peaks_bytes, schedule = self.peaks_bytes, self.graph.schedule
        if (
            peaks_bytes is None
            or not isinstance(schedule, PipelineSchedule)
            or rank not in schedule.rank_of_stage
        ):
            return self.peak_bytes
        several = len(schedule.ranks) < schedule.stages
        return peaks_bytes[rank if several else schedule.rank_of_stage.index(rank)]


class Simulator:
    """Simulates jobs, and keeps the resources of the last: most plans are tried on one cluster."""

    def __init__(self) -> None:
        self._resources: ClusterResources | None = None

    def simulate(self, job: Job, strategy: Strategy, *, fold: bool = True) -> Simulation:
        """Play ``job`` under ``strategy``: every step that it knows of, after a warm-up.

        Ranks that do the same at the same moment are played once, unless ``fold`` is False.

        Raises PlanError where the strategy does not fit the model, UserError where the graph would be too large or
        times are out of range.
        """
        begun = time.perf_counter()
        job = in_whole_periods(job, strategy)
        with times_in_range():
            graph, dataflow = self._laid_out(job, strategy, fold=fold)
            played = play_disturbed(graph, dataflow, job.on.compute_slowdown)
        return Simulation(job, strategy, graph, played, len(dataflow), time.perf_counter() - begun)

    def lay_out(
        self, job: Job, strategy: Strategy, *, fold: bool = False
    ) -> tuple[GraphBuilder[Any], OperationGraph]:
        """The graph that ``simulate`` would play. Raises as it does."""
        with times_in_range():
            return self._laid_out(in_whole_periods(job, strategy), strategy, fold=fold)

    def _laid_out(
        self, job: Job, strategy: Strategy, *, fold: bool
    ) -> tuple[GraphBuilder[Any], OperationGraph]:
        cluster, computation = job.on, job.steps
        check_dimension(job, strategy)
        check_members_stay(job, strategy)
        with asking("strategy", strategy):
            strategy, _ = carried_out_by(strategy, cluster.library)
        schedule = decided(strategy, job)
        serving = schedule.serving if isinstance(schedule, BucketSchedule) else EVENLY
        cluster = cluster.with_server_hosts(serving.hosts or 0)
        known = computation.timelines
        draws = draws_of(job, strategy, schedule)
        alike = fold and not computation.rank_factors and not job.incidents.slow_share and may_fold(known)
        period = played_ranks(cluster, schedule, draws * len(known)) if alike else cluster.world_size
        factors = (computation.factor_of(rank) for rank in range(period))
        ranks = ranks_of(known, draws, factors, computation.warm_up_steps, job.incidents)
        check_size(ranks, job, strategy, schedule)
        folded = period if period < cluster.world_size else 0
        graph = GraphBuilder(cluster, schedule, folded, self._resources_of(cluster, folded))
        with asking("strategy", strategy):
            lay_out_ranks(graph, plugin_of(strategy).reactions(graph, job, strategy), ranks)
            return graph, graph.close()

    def _resources_of(self, cluster: Cluster, folded: int) -> ClusterResources:
        before = self._resources
        if before is None or before.folded != folded or before.cluster != cluster:
            self._resources = before = ClusterResources(cluster, folded)
        return before


def in_whole_periods(job: Job, strategy: Strategy) -> Job:
    """``job`` with as many steps as make up whole periods of ``strategy``, which most repeat in every step."""
    if strategy.repeats_after == 1:
        return job
    return replace(job, computation=job.steps.in_periods_of(strategy.repeats_after))


def check_dimension(job: Job, strategy: Strategy) -> None:
    """Raise PlanError where ``strategy`` trains whole models and the model of ``job`` is cut into stages."""
    if len(job.stages) > 1 and not fits(job, type(strategy)):
        raise PlanError(
            "this strategy trains a whole model on every rank",
            got=f"{strategy.describe()}, and a model that is cut into {len(job.stages)} stages",
            expected="a pipeline",
        )


def check_members_stay(job: Job, strategy: Strategy) -> None:
    """Raise UnsupportedError where ranks of ``job`` die or join, and ``strategy`` has all finish steps together."""
    if job.incidents.change_members:
        raise UnsupportedError(
            "ranks finish their steps together under this strategy: a death would stop the job, and nobody can join it",
            got=f"{strategy.describe()}, and {', '.join(job.incidents.describe())}",
            expected="a strategy whose ranks go on without each other, such as partial-all-reduce",
            fix="Leave dies: and joins: out, or replay such a plan.",
        )


def check_lives_through(job: Job, strategy: Strategy) -> None:
    """Raise UnsupportedError where the simulation of ``strategy`` over a time, if it has one, knows no incidents."""
    plugin = plugin_of(strategy)
    if job.incidents.are_there and plugin.has_horizon and not plugin.simulates_incidents:
        raise UnsupportedError(
            "no random slowdowns, deaths or joins are simulated under this strategy",
            got=f"{strategy.describe()}, and {', '.join(job.incidents.describe())}",
            expected="partial-all-reduce, or for slowdowns a strategy whose ranks finish steps together",
        )


def simulate(job: Job, strategy: Strategy, *, fold: bool = True) -> Simulation:
    """Play ``job`` under ``strategy`` once. Raises as ``Simulator.simulate`` does."""
    return Simulator().simulate(job, strategy, fold=fold)
