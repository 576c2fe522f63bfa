"""Replay of a pipeline's steps under any order, by the layout and the engine that every replay has.

It is what the tuner asks about candidates. It also drives the tuner itself: steps are played on a network one after the
other, and the tuner is told what ranks would have seen.
"""

from __future__ import annotations

import numpy as np

from headway.collectives.resources import ClusterResources
from headway.graph.build import GraphBuilder
from headway.graph.step_layout import lay_out_ranks
from headway.graph.timeline import Part
from headway.job import Job
from headway.scheduling.pipeline.program import Message
from headway.scheduling.pipeline.schedule import PipelineSchedule
from headway.simulation.engine import PlayedTimes, play
from headway.strategies.pipeline.layout import PipelineLayout
from headway.strategies.pipeline.tuning.observed import ObservedStep, RankStep, Span


class PlayedSteps:
    """The steps of a job in the order of ``schedule``, the first of them twice: it warms up."""

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
        """How long each step took, as the mean over ranks."""
        boundaries = self._graph.boundaries
        ends_ns = np.array([self._played.end_ns[boundaries[step]] for step in self._graph.common_steps])
        return tuple((np.diff(ends_ns, axis=0).mean(axis=1) / 1e6).tolist())

    def observed(self, number: int, candidate: int) -> ObservedStep:
        """What ranks see of the last step, called ``number`` and of the order ``candidate``."""
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
                own[0].begin_ns, own[-1].end_ns, outside_ns[rank],
                dict(zip(self._schedule.ranks[rank], own, strict=True)), sent[rank], received[rank],
            )
            for rank, own in enumerate(spans)
        )  # fmt: skip
        return ObservedStep(number, candidate, tuple(ranks))

    def _span(self, operation: int) -> Span:
        return Span(int(self._played.start_ns[operation]), int(self._played.end_ns[operation]))


def step_times_ms(job: Job, schedule: PipelineSchedule) -> tuple[float, ...]:
    """How long each step of ``job`` takes in the order of ``schedule``."""
    return PlayedSteps(job, schedule).times_ms
