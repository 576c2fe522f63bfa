"""Tunes the order of a pipeline: after every observed step it decides the order of the next ones.

Every candidate is replayed with the passes of recent steps on the network rates that their messages showed
(Ada-Grouper, arXiv 2303.01675, adapts k similarly). The tuner is an immutable value that depends only on its inputs: the
live service and a replay (``followed``) drive the same one.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headway.cluster import Cluster, Host, SlowPath
from headway.collectives.resources import ClusterResources
from headway.graph.build import GraphBuilder
from headway.graph.computation import Computation, Item, Part, Timeline
from headway.graph.step_layout import lay_out_ranks
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.pipeline.program import Message
from headway.scheduling.pipeline.schedule import Pass, PipelineSchedule
from headway.simulation.engine import PlayedTimes, play
from headway.strategies.pipeline.layout import PipelineLayout
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.tuning.observed import ObservedStep, RankStep, Span

Way = tuple[int, int]
"""(sender, receiver): one direction between two ranks."""


class Flight(NamedTuple):
    """The transmission of one message.

    ``alone_ns`` is the time that it would have taken without the pipeline's concurrent messages, if links are shared
    evenly.
    """

    way: Way
    begin_ns: int
    end_ns: int
    size_bytes: int
    alone_ns: float


def flights_of(step: ObservedStep, boundary_bytes: Sequence[int]) -> list[Flight]:
    """All messages of a step; a message across boundary ``b`` has ``boundary_bytes[b]``."""
    flights = sorted(_unshared(step, boundary_bytes), key=lambda flight: flight.begin_ns)
    moments = sorted({moment for flight in flights for moment in (flight.begin_ns, flight.end_ns)})
    alone_ns = [0.0] * len(flights)
    in_flight: set[int] = set()
    coming = iter(range(len(flights)))
    upcoming = next(coming, None)
    for begin_ns, end_ns in pairwise(moments):
        while upcoming is not None and flights[upcoming].begin_ns <= begin_ns:
            in_flight.add(upcoming)
            upcoming = next(coming, None)
        in_flight = {number for number in in_flight if flights[number].end_ns > begin_ns}
        sends, receives = defaultdict[int, int](int), defaultdict[int, int](int)
        for number in in_flight:
            sender, receiver = flights[number].way
            sends[sender] += 1
            receives[receiver] += 1
        for number in in_flight:
            sender, receiver = flights[number].way
            alone_ns[number] += (end_ns - begin_ns) / max(sends[sender], receives[receiver])
    return [flight._replace(alone_ns=took) for flight, took in zip(flights, alone_ns, strict=True)]


def _unshared(step: ObservedStep, boundary_bytes: Sequence[int]) -> Iterator[Flight]:
    """Messages from when both ends were ready and the connection was free: in one direction they follow each other.

    With Gloo, a receiver's ready message queues behind what it was sending when it posted the receive.
    """
    by_way: dict[Way, list[tuple[int, int, int, Message]]] = defaultdict(list)
    for receiver in step.ranks:
        for message, span in receiver.received.items():
            sent_ns = step.ranks[message.sender].sent_ns[message]
            by_way[message.sender, message.receiver].append((sent_ns, span.begin_ns, span.end_ns, message))
    for way, messages in by_way.items():
        messages.sort()
        back = sorted((sent_ns, end_ns) for sent_ns, _, end_ns, _ in by_way.get((way[1], way[0]), ()))
        free_ns = 0
        for sent_ns, posted_ns, end_ns, message in messages:
            ready_ns = max([posted_ns, *(ended for began, ended in back if began < posted_ns < ended)])
            begin_ns = max(sent_ns, min(ready_ns, end_ns), free_ns)
            free_ns = end_ns
            if end_ns > begin_ns:
                yield Flight(way, begin_ns, end_ns, boundary_bytes[message.boundary], 0.0)


SHORTEST_NS = 1e3
LEAST_GBPS, MOST_GBPS = 1e-6, 1e6


class LinkEstimate(NamedTuple):
    """The measured rate of one direction between two ranks; ``seen`` is the last step with a message.

    ``uncertainty`` is the half-width of the 95% confidence interval of the mean, as a fraction of it.
    """

    gbps: float
    uncertainty: float
    messages: int
    seen: int

    def differs_from(self, reference: LinkEstimate, share: float) -> bool:
        """Whether the two differ by more than the fraction ``share`` and more than both uncertainties."""
        apart = abs(math.log(self.gbps / reference.gbps))
        return apart > max(math.log1p(share), math.hypot(self.uncertainty, reference.uncertainty))


def estimate(flights: Iterable[Flight], latency_ns: float, seen: int) -> dict[Way, LinkEstimate]:
    """The average rate of each direction: all bytes divided by all transfer time without latencies."""
    by_way: dict[Way, list[Flight]] = defaultdict(list)
    for flight in flights:
        by_way[flight.way].append(flight)
    return {way: _estimate(way_flights, latency_ns, seen) for way, way_flights in by_way.items()}


def _estimate(flights: Sequence[Flight], latency_ns: float, seen: int) -> LinkEstimate:
    took_ns = [max(SHORTEST_NS, flight.alone_ns - latency_ns) for flight in flights]
    ns_per_byte = [ns / flight.size_bytes for ns, flight in zip(took_ns, flights, strict=True)]
    mean = sum(took_ns) / sum(flight.size_bytes for flight in flights)
    count = len(flights)
    spread = math.sqrt(sum((value - mean) ** 2 for value in ns_per_byte) / max(1, count - 1)) / mean
    uncertainty = 2 * spread / math.sqrt(count) if count > 1 else 1.0
    return LinkEstimate(min(MOST_GBPS, max(LEAST_GBPS, 8 / mean)), uncertainty, count, seen)


def cluster_of(estimates: dict[Way, LinkEstimate], ranks: int, latency_ns: float) -> Cluster:
    """The measured network as a cluster: one host per rank, its link as fast as its fastest direction, and slower paths.

    Sharing between ranks of one host is already contained in their messages' times.
    """
    up, down = ([0.0] * ranks for _ in range(2))
    for (sender, receiver), link in estimates.items():
        up[sender] = max(up[sender], link.gbps)
        down[receiver] = max(down[receiver], link.gbps)
    fastest = max((link.gbps for link in estimates.values()), default=1.0)
    hosts = tuple(
        Host(name=f"rank{rank}", workers=1, up_gbps=up[rank] or fastest, down_gbps=down[rank] or fastest)
        for rank in range(ranks)
    )
    paths = tuple(
        SlowPath(source=f"rank{sender}", target=f"rank{receiver}", gbps=link.gbps)
        for (sender, receiver), link in sorted(estimates.items())
        if link.gbps < min(up[sender], down[receiver])
    )
    return Cluster(
        hosts=hosts, latency_us=latency_ns / 1e3, paths=paths, source="seen from a pipeline's messages"
    )


class PlayedSteps:
    """Simulates the steps of a job in the order of ``schedule``, the first twice as a warm-up.

    The tuner evaluates candidates with it; ``followed`` derives from it what ranks would have observed.
    """

    def __init__(self, job: Job, schedule: PipelineSchedule) -> None:
        timelines = job.steps.timelines
        self._schedule = schedule
        self._graph = GraphBuilder(job.on, schedule, 0, ClusterResources(job.on))
        self._layout = PipelineLayout(self._graph, schedule, job.boundary_bytes)
        ranks = [[timelines[rank][0], *timelines[rank]] for rank in sorted(timelines)]
        lay_out_ranks(self._graph, self._layout, ranks)
        self._played: PlayedTimes = play(self._graph.close())

    @property
    def times_ms(self) -> tuple[float, ...]:
        """The time of each step, averaged over ranks."""
        boundaries = self._graph.boundaries
        ends_ns = np.array([self._played.end_ns[boundaries[step]] for step in self._graph.common_steps])
        return tuple((np.diff(ends_ns, axis=0).mean(axis=1) / 1e6).tolist())

    def observed(self, number: int, candidate: int) -> ObservedStep:
        """What ranks would observe of the last step, as step ``number`` under ``candidate``."""
        last = self._graph.common_steps[-1]
        spans: list[list[Span]] = [[] for _ in self._schedule.ranks]
        outside_ns = [0 for _ in self._schedule.ranks]
        for span in self._graph.spans:
            if span.step == last:
                seen = self._span(span.operation)
                if span.part in (Part.FORWARD, Part.BACKWARD):
                    spans[span.rank].append(seen)
                else:
                    outside_ns[span.rank] += seen.end_ns - seen.begin_ns
        sent: list[dict[Message, int]] = [{} for _ in spans]
        received: list[dict[Message, Span]] = [{} for _ in spans]
        for message_number, message in self._layout.messages.items():
            placed = self._graph.communications[message_number]
            if placed.step == last:
                begins = dict(zip(placed.members, placed.begins, strict=True))
                sent[message.sender][message] = int(self._played.end_ns[begins[message.sender]])
                posted_ns = int(self._played.end_ns[begins[message.receiver]])
                arrived_ns = int(self._played.end_ns[placed.end_of(message.receiver)])
                received[message.receiver][message] = Span(posted_ns, arrived_ns)
        ranks = (
            RankStep(
                rank_spans[0].begin_ns, rank_spans[-1].end_ns, outside_ns[rank],
                dict(zip(self._schedule.ranks[rank], rank_spans, strict=True)), sent[rank], received[rank],
            )
            for rank, rank_spans in enumerate(spans)
        )  # fmt: skip
        return ObservedStep(number, candidate, tuple(ranks))

    def _span(self, operation: int) -> Span:
        return Span(int(self._played.start_ns[operation]), int(self._played.end_ns[operation]))


def step_times_ms(job: Job, schedule: PipelineSchedule) -> tuple[float, ...]:
    """The simulated time of each step of ``job`` in the order of ``schedule``."""
    return PlayedSteps(job, schedule).times_ms


WINDOW_STEPS = 4
CHANGED_BY = 0.25  # relative change of a link's rate that makes earlier measurements worthless
LEAST_GAIN = 0.01
BACK_AND_FORTH_STEPS = (
    10  # steps within which undoing a switch must gain twice as much on an unchanged network
)


@dataclass(frozen=True)
class Decision:
    """The tuner's decision after ``step``: continue under ``candidate``, for ``reason``.

    ``predicted_ms`` is the predicted step time of each candidate, ``measured_ms`` that of the last step, and
    ``links_gbps`` the measured rates.
    """

    step: int
    before: int
    candidate: int
    reason: str
    predicted_ms: tuple[float, ...] = ()
    measured_ms: float = 0.0
    links_gbps: Mapping[Way, float] = field(default_factory=dict)

    @property
    def switches(self) -> bool:
        """Whether the order changes."""
        return self.candidate != self.before


@dataclass(frozen=True)
class Tuner:
    """Chooses among ``candidates``: orders for the same number of micro-batches. ``latest`` is its last decision.

    ``boundary_bytes`` are the sizes of messages between stages.
    """

    candidates: tuple[PipelineStrategy, ...]
    boundary_bytes: tuple[int, ...]
    latency_us: float = 100.0
    window: tuple[ObservedStep, ...] = ()
    links: Mapping[Way, LinkEstimate] = field(default_factory=dict)
    latest: Decision | None = None
    switched: tuple[int, int] | None = None  # in which step, and from which candidate

    def after(self, step: ObservedStep) -> Tuner:
        """The tuner after one more step; its ``latest`` is the decision."""
        seen = replace(self, window=(*self.window, step)[-WINDOW_STEPS:])
        latest_links = seen._links_of([step])
        changed = [
            way for way, link in latest_links.items() if way in self.links and self._has_changed(way, link)
        ]
        if changed:
            seen = replace(seen, window=(step,), switched=None)
        seen = replace(seen, links={**self.links, **seen._links_of(seen.window)})
        return seen._decided(step, {way: latest_links[way] for way in changed})

    def _has_changed(self, way: Way, link: LinkEstimate) -> bool:
        return link.messages > 1 and link.differs_from(self.links[way], CHANGED_BY)

    def _links_of(self, steps: Sequence[ObservedStep]) -> dict[Way, LinkEstimate]:
        flights = (flight for step in steps for flight in flights_of(step, self.boundary_bytes))
        return estimate(flights, self.latency_us * 1e3, steps[-1].number)

    def _decided(self, step: ObservedStep, changed: Mapping[Way, LinkEstimate]) -> Tuner:
        job = self._job()
        played = [step_times_ms(job, candidate.schedule_of(len(job.stages))) for candidate in self.candidates]
        first = step.ranks[0]  # whose program ends last, as gradients come to it last
        measured_ms = (first.end_ns - first.begin_ns + self._outside_ns(0)) / 1e6
        now, best = (
            played[step.candidate],
            min(range(len(played)), key=lambda which: statistics.mean(played[which])),
        )
        gain, noise = _gain(now, played[best])
        needed = max(self._least_gain(step, best), noise)
        predicted_ms = tuple(map(statistics.mean, played))
        forecast = (
            f"{self.candidates[best].describe()} is expected to take {predicted_ms[best]:.0f} ms a step"
        )
        reason = "the current order is the fastest on the measured network"
        chosen = step.candidate
        if best != step.candidate and gain <= needed:
            reason = f"{forecast}, {gain:.1%} less: below the {needed:.1%} that justifies a switch"
        elif best != step.candidate:
            chosen = best
            reason = f"{forecast}, and {self.candidates[step.candidate].describe()} {predicted_ms[step.candidate]:.0f}"
        if changed:
            reason += f"; {_slowest(changed)}"
        rates = {way: link.gbps for way, link in self.links.items()}
        decision = Decision(step.number, step.candidate, chosen, reason, predicted_ms, measured_ms, rates)
        switched = (step.number, step.candidate) if decision.switches else self.switched
        return replace(self, latest=decision, switched=switched)

    def _least_gain(self, step: ObservedStep, best: int) -> float:
        if self.switched is None or self.switched[1] != best:
            return LEAST_GAIN
        return LEAST_GAIN * (2 if step.number - self.switched[0] < BACK_AND_FORTH_STEPS else 1)

    def _job(self) -> Job:
        """The steps of the window as a job on the measured network."""
        ranks = len(self.window[0].ranks)
        timelines = {
            rank: tuple(
                _timeline(rank, number, step.ranks[rank], self._outside_ns(rank))
                for number, step in enumerate(self.window)
            )
            for rank in range(ranks)
        }
        return Job(
            stages=(ModelSpec(parameters=()),) * (len(self.boundary_bytes) + 1),
            world_size=ranks,
            cluster=self._cluster(ranks),
            computation=Computation(timelines),
            boundary_bytes=self.boundary_bytes,
        )

    def _outside_ns(self, rank: int) -> int:
        """The time between steps: the minimum over the window, because evaluations do not count."""
        return min(step.ranks[rank].outside_ns for step in self.window)

    def _cluster(self, ranks: int) -> Cluster:
        return cluster_of(dict(self.links), ranks, self.latency_us * 1e3)


def _timeline(rank: int, number: int, step: RankStep, outside_ns: int) -> Timeline:
    passes = (
        Item(
            Part.FORWARD if action.kind is Pass.FORWARD else Part.BACKWARD,
            duration_ns=span.end_ns - span.begin_ns, stage=action.stage, micro_batch=action.micro_batch,
        )
        for action, span in step.passes.items()
    )  # fmt: skip
    return Timeline(rank, number, (Item(Part.REST, duration_ns=outside_ns), *passes))


def _gain(now_ms: Sequence[float], other_ms: Sequence[float]) -> tuple[float, float]:
    """The mean relative gain of the alternative steps, and the uncertainty of that mean."""
    gains = [1 - alternative / now for now, alternative in zip(now_ms, other_ms, strict=True)]
    noise = 2 * statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else LEAST_GAIN
    return statistics.mean(gains), noise


def _slowest(changed: Mapping[Way, LinkEstimate]) -> str:
    (sender, receiver), link = min(changed.items(), key=lambda item: item[1].gbps)
    return f"the network changed: {sender} to {receiver} carried {link.gbps * 1e3:.0f} Mbit/s in this step"


def candidates_of(strategy: PipelineStrategy) -> tuple[PipelineStrategy, ...]:
    """The tuner's candidates: the strategy's own order, then its other group sizes, then its other orders."""
    base = strategy.model_copy(update={"group_sizes": (), "other_orders": ()})
    sizes = [size for size in strategy.group_sizes if size != strategy.group_size]
    alone = base.model_copy(update={"group_size": 1, "receive_buffers": None})
    return (
        base,
        *(base.model_copy(update={"group_size": size}) for size in sizes),
        *(alone.model_copy(update={"order": order}) for order in strategy.other_orders),
    )
