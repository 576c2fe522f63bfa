"""The tuner of a pipeline's order: told of every step, it says under which order the next ones are to be carried out.

Each candidate is replayed on the network as recent messages saw it, with the passes of the same steps (Ada-Grouper,
arXiv 2303.01675, adapts k in a like way; its code does not say by what rule). The tuner is an immutable value that
depends on nothing but what it is told: the live service and a replay drive the same one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.cluster import Cluster
from headway.graph.computation import Computation
from headway.graph.timeline import Item, Part, Timeline
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.pipeline.schedule import Pass
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.tuning.flights import Way, flights_of
from headway.strategies.pipeline.tuning.links import LinkEstimate, cluster_of, estimate
from headway.strategies.pipeline.tuning.observed import ObservedStep, RankStep
from headway.strategies.pipeline.tuning.replaying import step_times_ms

WINDOW_STEPS = 4
CHANGED_BY = 0.25  # of a link's rate: what was seen before says nothing about the network of now
LEAST_GAIN = 0.01
BACK_AND_FORTH_STEPS = 10  # in which undoing the last switch must gain twice as much, on the same network


@dataclass(frozen=True)
class Decision:
    """What the tuner said after ``step``: steps go on under ``candidate``, for ``reason``.

    ``predicted_ms`` is what each candidate's step takes on the network as it is seen, ``measured_ms`` what the last one
    took, and ``links_gbps`` what links carried.
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
        """Whether another order is to be carried out."""
        return self.candidate != self.before


@dataclass(frozen=True)
class Tuner:
    """Chooses among ``candidates`` for a pipeline whose boundaries have ``boundary_bytes``. ``latest`` is what it said.

    Candidates are orders for the same number of micro-batches.
    """

    candidates: tuple[PipelineStrategy, ...]
    boundary_bytes: tuple[int, ...]
    latency_us: float = 100.0
    window: tuple[ObservedStep, ...] = ()
    links: Mapping[Way, LinkEstimate] = field(default_factory=dict)
    latest: Decision | None = None
    switched: tuple[int, int] | None = None  # in which step, and from which candidate

    def after(self, step: ObservedStep) -> Tuner:
        """The tuner that has seen one more step, whose ``latest`` is its decision."""
        seen = replace(self, window=(*self.window, step)[-WINDOW_STEPS:])
        own = seen._links_of([step])
        changed = [way for way, found in own.items() if way in self.links and self._has_changed(way, found)]
        if changed:
            seen = replace(seen, window=(step,), switched=None)
        seen = replace(seen, links={**self.links, **seen._links_of(seen.window)})
        return seen._decided(step, {way: own[way] for way in changed})

    def _has_changed(self, way: Way, found: LinkEstimate) -> bool:
        return found.messages > 1 and found.differs_from(self.links[way], CHANGED_BY)

    def _links_of(self, steps: Sequence[ObservedStep]) -> dict[Way, LinkEstimate]:
        flights = (flight for step in steps for flight in flights_of(step, self.boundary_bytes))
        return estimate(flights, self.latency_us * 1e3, steps[-1].number)

    def _decided(self, step: ObservedStep, changed: Mapping[Way, LinkEstimate]) -> Tuner:
        job = self._job()
        played = [step_times_ms(job, each.schedule_of(len(job.stages))) for each in self.candidates]
        first = step.ranks[0]  # whose program ends last, as gradients come to it last
        measured_ms = (first.end_ns - first.begin_ns + self._outside_ns(0)) / 1e6
        now, best = (
            played[step.candidate],
            min(range(len(played)), key=lambda which: statistics.mean(played[which])),
        )
        gain, noise = _gain(now, played[best])
        needed = max(self._least_gain(step, best), noise)
        predicted_ms = tuple(map(statistics.mean, played))
        said = f"{self.candidates[best].describe()} is expected to take {predicted_ms[best]:.0f} ms a step"
        reason = "the order in force is the fastest on the network as it is seen"
        chosen = step.candidate
        if best != step.candidate and gain <= needed:
            reason = f"{said}, {gain:.1%} less: not more than {needed:.1%}, which a switch is worth"
        elif best != step.candidate:
            chosen = best
            reason = (
                f"{said}, and {self.candidates[step.candidate].describe()} {predicted_ms[step.candidate]:.0f}"
            )
        if changed:
            reason += f"; {_slowest(changed)}"
        rates = {way: found.gbps for way, found in self.links.items()}
        decision = Decision(step.number, step.candidate, chosen, reason, predicted_ms, measured_ms, rates)
        switched = (step.number, step.candidate) if decision.switches else self.switched
        return replace(self, latest=decision, switched=switched)

    def _least_gain(self, step: ObservedStep, best: int) -> float:
        if self.switched is None or self.switched[1] != best:
            return LEAST_GAIN
        return LEAST_GAIN * (2 if step.number - self.switched[0] < BACK_AND_FORTH_STEPS else 1)

    def _job(self) -> Job:
        """The steps of the window as a recording of them would have them, on the network as it is seen."""
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
        """What a rank does between steps. Of recent ones the least: evaluations are no part of steps."""
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
    """How much shorter other steps are, as a share, and by how much the mean of this varies with the step."""
    gains = [1 - other / now for now, other in zip(now_ms, other_ms, strict=True)]
    noise = 2 * statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else LEAST_GAIN
    return statistics.mean(gains), noise


def _slowest(changed: Mapping[Way, LinkEstimate]) -> str:
    (sender, receiver), found = min(changed.items(), key=lambda item: item[1].gbps)
    return (
        f"the network has changed: {sender} to {receiver} carried {found.gbps * 1e3:.0f} Mbit/s in this step"
    )


def candidates_of(strategy: PipelineStrategy) -> tuple[PipelineStrategy, ...]:
    """What a strategy lets its tuner choose among: its own order first, its groups of other sizes, other orders."""
    own = strategy.model_copy(update={"group_sizes": (), "other_orders": ()})
    sizes = [size for size in strategy.group_sizes if size != strategy.group_size]
    alone = own.model_copy(update={"group_size": 1, "receive_buffers": None})
    return (
        own,
        *(own.model_copy(update={"group_size": size}) for size in sizes),
        *(alone.model_copy(update={"order": order}) for order in strategy.other_orders),
    )
