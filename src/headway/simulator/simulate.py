"""Simulates one job under one strategy: decides its schedule, lays out the graph of all ranks, and plays it.

Recordings, predicted workloads and a live tuner's schedules are all jobs, and are all simulated here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.cluster import Cluster, Host
from headway.collectives.resources import ClusterResources
from headway.collectives.servers import EVENLY
from headway.errors import PlanError, UnsupportedError, UserError
from headway.graph.build import ComputeSpan, GraphBuilder
from headway.graph.computation import Item, Part, Point, Timeline
from headway.graph.disturbance import play_disturbed
from headway.graph.step_layout import lay_out_ranks
from headway.incidents import Incidents
from headway.job import Job
from headway.plugins import asking
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule
from headway.scheduling.schedule import Schedule
from headway.simulation.building import OperationGraph
from headway.simulation.engine import PlayedTimes
from headway.simulator.memory import peak_is_rough, rank_peaks_bytes
from headway.strategies.base import Strategy, decided, fits
from headway.strategies.chance import slowed
from headway.strategies.registry import carried_out_by, plugin_of
from headway.trace.events import Read

# Folding: ranks that do the same at the same time are simulated once. Most collectives are symmetric under shifting all
# ranks by the same number (``Algorithms.repeat``). If hosts and timelines also repeat after some number of ranks, ranks
# that far apart do the same at the same time, up to a byte per message for tensors that do not split evenly. The same
# holds for replicated pipelines that repeat in this way.


def period_of(cluster: Cluster, timelines: int) -> int:
    """The number of ranks after which hosts and ``timelines`` (which ranks use in turn) repeat.

    It is the world size if nothing repeats. The ranks of a single host are alike.
    """
    world_size = cluster.world_size
    if cluster.traffic or cluster.paths:
        return world_size
    hosts = [_like(host) for host in cluster.hosts]
    ends = [1] if len(hosts) == 1 else list(accumulate(workers for workers, _, _ in hosts))
    for count, ranks in enumerate(ends, 1):
        period = lcm(ranks, timelines)
        alike = len(hosts) == 1 or (
            len(hosts) % count == 0 and all(host == hosts[at % count] for at, host in enumerate(hosts))
        )
        if alike and world_size % period == 0:
            return period
    return world_size


def played_ranks(cluster: Cluster, schedule: Schedule, timelines: int) -> int:
    """The number of ranks to simulate, each standing for those that do the same; all if none do.

    ``timelines`` is the number of timelines that ranks use in turn. Replicated pipelines are simulated as a whole.
    """
    buckets: Sequence[BucketSchedule] = ()
    if isinstance(schedule, ReplicatedSchedule):
        buckets = schedule.buckets
    elif isinstance(schedule, BucketSchedule):
        buckets = (schedule,)
    # Servers' shares differ from rank to rank, and hosts without workers serve all ranks.
    if not buckets or any(
        bucket.serving.shares or bucket.serving.hosts is not None or not bucket.algorithms.repeat
        for bucket in buckets
    ):
        return cluster.world_size
    if not isinstance(schedule, ReplicatedSchedule):
        return period_of(cluster, timelines)
    pipelines, stages = schedule.pipelines, len(schedule.pipeline.ranks)
    if len(pipelines) == 1 or timelines == cluster.world_size:
        return cluster.world_size
    period = period_of(cluster, lcm(timelines, stages))
    count = period // stages
    shifted = all(
        pipeline == tuple(rank + period for rank in before)
        for before, pipeline in zip(pipelines, pipelines[count:], strict=False)
    )
    return period if shifted else cluster.world_size


def _like(host: Host) -> tuple[int, float, float]:
    return host.workers, host.up_gbps, host.down_gbps


MAX_OPERATIONS = 60_000_000
BYTES_AN_OPERATION = 80  # its line, and when it started and ended


def check_size(ranks: Sequence[Sequence[Timeline]], job: Job, strategy: Strategy, schedule: Schedule) -> None:
    """Raise UserError for a graph that is too large to play."""
    operations = operations_of(ranks, job, strategy, schedule)
    if operations > MAX_OPERATIONS:
        raise UserError(
            "the replay is too large",
            got=f"about {operations:.1e} operations, {operations * BYTES_AN_OPERATION / 1e9:.0f} GB",
            expected=f"at most {MAX_OPERATIONS:.0e}, {MAX_OPERATIONS * BYTES_AN_OPERATION / 1e9:.0f} GB",
            fix="Replay fewer workers, or record fewer steps.",
        )


def operations_of(
    ranks: Sequence[Sequence[Timeline]], job: Job, strategy: Strategy, schedule: Schedule
) -> int:
    """A rough estimate of the number of operations, from buckets and blocking collectives."""
    world_size = job.world_size
    items = collectives = 0
    pieces = plugin_of(strategy).messages(schedule, world_size, job.on.library)
    for timelines in ranks:
        launched = 0
        for item in (item for timeline in timelines for item in timeline.items):
            items += 1
            launched += pieces * (item.kind == Point.BACKWARD_END) + (
                item.kind in (Point.BLOCKING, Part.READ)
            )
        collectives = max(collectives, launched)
    steps = 4 * world_size + 4
    if isinstance(schedule, ReplicatedSchedule):  # NCCL's model times collectives of replicas as a whole
        steps = 3 if job.on.nccl is not None else 4 * len(schedule.pipelines) + 4
    return items + collectives * len(ranks) * steps


@contextmanager
def times_in_range() -> Iterator[None]:
    """Turn OverflowError into a UserError: times are out of range."""
    try:
        yield
    except OverflowError:
        raise UserError(
            "the replayed times are out of range",
            expected="steps of less than a century",
            fix="Check the rates and latencies of the cluster, and --what-if.",
        ) from None


MOST_OPERATIONS = 10_000_000  # that are worth playing for more different ranks
LAUNCHING = (Point.READY, Point.UNUSED, Point.BACKWARD_END, Point.BLOCKING, Point.STEP)

Recorded = Mapping[int, Sequence[Timeline]]


# Ranks that were not recorded repeat the steps of recorded ones, but start at another step. If all were in the same step,
# the slowest of many ranks would never be slower than the slowest recorded one.


def draws_of(job: Job, strategy: Strategy, schedule: Schedule) -> int:
    """How many times recorded ranks are repeated with another first step before ranks repeat exactly.

    As often as the job's workers need and there are recorded steps, within MOST_OPERATIONS.
    """
    recorded, cluster = job.steps.timelines, job.on
    rounds = -(-cluster.world_size // len(recorded))
    steps = len(recorded[min(recorded)])
    if rounds == 1 or steps == 1 or not _alike(recorded):
        return 1
    a_rank = operations_of([recorded[min(recorded)]], job, strategy, schedule)
    for draws in range(min(rounds, steps), 1, -1):
        if a_rank * period_of(cluster, draws * len(recorded)) <= MOST_OPERATIONS:
            return draws
    return 1


def ranks_of(
    recorded: Recorded,
    draws: int,
    factors: Iterable[float],
    warm_up_steps: int = 1,
    incidents: Incidents = Incidents(),  # noqa: B008
) -> list[list[Timeline]]:
    """The timelines of every rank, with computation times multiplied by ``factors``.

    ``incidents`` slow down random steps. The first step is repeated ``warm_up_steps`` times.
    """
    names = sorted(recorded)
    ranks = []
    for rank, factor in enumerate(factors):
        timelines = recorded.get(rank) or recorded[names[rank % len(names)]]
        first = 0 if rank in recorded else rank // len(names) % draws
        steps = [*timelines[first:], *timelines[:first]]
        if factor != 1.0:
            steps = [timeline.scaled(factor) for timeline in steps]
        if incidents.slow_share:
            share, slow = incidents.slow_share, incidents.slow_factor
            steps = [
                timeline.scaled(slowed(share, slow, 0, rank, step)) for step, timeline in enumerate(steps)
            ]
        ranks.append([steps[0]] * warm_up_steps + steps)
    return ranks


def may_fold(recorded: Recorded) -> bool:
    """Whether rank ``r`` repeats the steps of recorded rank ``r % recorded ranks``."""
    if any(item.members for steps in recorded.values() for timeline in steps for item in timeline.items):
        return False
    return len(recorded) == 1 or sorted(recorded) == list(range(len(recorded)))


def _launches(item: Item) -> bool:
    """Whether communication may start at ``item``; reading gradients may need gathers."""
    return item.kind in LAUNCHING or (item.kind == Part.READ and item.name != Read.VALUES)


def _alike(recorded: Recorded) -> bool:
    """Whether all steps launch the same communication, so that ranks may be in different steps."""
    launches = {
        tuple(sorted((item.kind, item.name, item.size_bytes) for item in timeline.items if _launches(item)))
        for timelines in recorded.values()
        for timeline in timelines
    }
    return len(launches) == 1


@dataclass(frozen=True, eq=False)
class Simulation:
    """The simulation of a job: the graph, and the times of its operations.

    ``operations`` is their number; building and playing the graph took ``elapsed_s``.
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
        """The time of each counted step that all ranks finish, averaged over ranks."""
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
        """The mean step time over counted steps and ranks."""
        return float(np.mean(self.step_times_ms))

    def duration_ns(self, span: ComputeSpan) -> int:
        """How long a span of computation took."""
        return int(self.played.end_ns[span.operation] - self.played.start_ns[span.operation])

    @cached_property
    def waiting_ms(self) -> float:
        """The time per step in which ranks wait instead of computing, averaged over steps and ranks."""
        common, boundaries = self.graph.common_steps, self.graph.boundaries
        spans = (span for span in self.graph.spans if self.first_step <= span.step <= common[-1])
        computed_ns = sum(map(self.duration_ns, spans))
        first, last = (np.array(boundaries[step]) for step in (self.first_step - 1, common[-1]))
        steps = len(common) - self.first_step
        took_ns = float((self.played.end_ns[last] - self.played.end_ns[first]).mean())
        return max(0.0, (took_ns - computed_ns / self.graph.ranks) / steps / 1e6)

    @cached_property
    def peak_bytes(self) -> int | None:
        """The highest peak memory of any rank; None if the job's parameters are unknown."""
        peaks_bytes = self.peaks_bytes
        return None if peaks_bytes is None else max(peaks_bytes)

    @cached_property
    def peaks_bytes(self) -> tuple[int, ...] | None:
        """The peak memory of each stage, or of each rank if ranks have several stages."""
        if not self.job.has_parameters:
            return None
        return rank_peaks_bytes(self.job, self.strategy, self.graph.schedule)

    @cached_property
    def peak_is_rough(self) -> bool:
        """Whether the peaks are rough because memory was not measured."""
        return peak_is_rough(self.job, self.strategy, self.graph.schedule)

    def rank_peak_bytes(self, rank: int) -> int | None:
        """The peak memory of ``rank``, from its own stages in a pipeline."""
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
    """Simulates jobs; reuses the cluster's resources of the last one, because most plans are tried on one cluster."""

    def __init__(self) -> None:
        self._resources: ClusterResources | None = None

    def simulate(self, job: Job, strategy: Strategy, *, fold: bool = True) -> Simulation:
        """Simulate all steps of ``job`` under ``strategy``, after a warm-up.

        Ranks that do the same at the same time are simulated once, unless ``fold`` is False.

        Raises PlanError if the strategy does not fit the model, UserError if the graph is too large or times are out of
        range.
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
        recorded = computation.timelines
        draws = draws_of(job, strategy, schedule)
        alike = fold and not computation.rank_factors and not job.incidents.slow_share and may_fold(recorded)
        period = played_ranks(cluster, schedule, draws * len(recorded)) if alike else cluster.world_size
        factors = (computation.factor_of(rank) for rank in range(period))
        ranks = ranks_of(recorded, draws, factors, computation.warm_up_steps, job.incidents)
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
    """``job`` with steps repeated to fill whole periods of ``strategy``; most have a period of one step."""
    if strategy.repeats_after == 1:
        return job
    return replace(job, computation=job.steps.in_periods_of(strategy.repeats_after))


def check_dimension(job: Job, strategy: Strategy) -> None:
    """Raise PlanError if ``strategy`` needs whole models and the model of ``job`` is split into stages."""
    if len(job.stages) > 1 and not fits(job, type(strategy)):
        raise PlanError(
            "this strategy needs the whole model on every rank",
            got=f"{strategy.describe()}, and a model split into {len(job.stages)} stages",
            expected="a pipeline",
        )


def check_members_stay(job: Job, strategy: Strategy) -> None:
    """Raise UnsupportedError if ranks of ``job`` die or join under a synchronous strategy."""
    if job.incidents.change_members:
        raise UnsupportedError(
            "this strategy cannot lose or gain ranks: all ranks finish each step together",
            got=f"{strategy.describe()}, and {', '.join(job.incidents.describe())}",
            expected="a strategy that tolerates missing ranks, such as partial-all-reduce",
            fix="Remove dies: and joins:, or replay a plan with such a strategy.",
        )


def check_lives_through(job: Job, strategy: Strategy) -> None:
    """Raise UnsupportedError if the job has incidents that an asynchronous strategy's simulation does not support."""
    plugin = plugin_of(strategy)
    if job.incidents.are_there and plugin.has_horizon and not plugin.simulates_incidents:
        raise UnsupportedError(
            "cannot simulate random slowdowns, deaths or joins under this strategy",
            got=f"{strategy.describe()}, and {', '.join(job.incidents.describe())}",
            expected="partial-all-reduce; for slowdowns also a synchronous strategy",
        )


def simulate(job: Job, strategy: Strategy, *, fold: bool = True) -> Simulation:
    """Simulate ``job`` under ``strategy`` once. Raises as ``Simulator.simulate`` does."""
    return Simulator().simulate(job, strategy, fold=fold)
