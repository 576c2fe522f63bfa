"""What a step of a pipeline was like on every rank, as values: when its passes ran, and when its messages went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.scheduling.pipeline.program import Message, Post, Send, program_of
from headway.scheduling.pipeline.schedule import Action, PipelineSchedule


class Span(NamedTuple):
    """From ``begin_ns`` to ``end_ns`` of one clock."""

    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankStep:
    """One rank's step, in ns of rank 0's clock.

    ``begin_ns`` is when its program began, ``outside_ns`` how long the rank was busy with other things since its last
    program ended, ``end_ns`` when the program ended. ``sent_ns`` is when sends were begun; of what is received,
    ``received`` is from when the receive was posted to when the message had arrived.
    """

    begin_ns: int
    end_ns: int
    outside_ns: int
    passes: Mapping[Action, Span]
    sent_ns: Mapping[Message, int]
    received: Mapping[Message, Span]


@dataclass(frozen=True)
class ObservedStep:
    """A step of all ranks of one pipeline under the order number ``candidate`` of those that a tuner chooses among."""

    number: int
    candidate: int
    ranks: tuple[RankStep, ...]


_HEADER = 5


class Columns:
    """One rank's step as a row of integers, all of the same length, for a collective to carry."""

    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        program = program_of(schedule, rank)
        self._actions = schedule.ranks[rank]
        self._sent = [instruction.message for instruction in program if isinstance(instruction, Send)]
        self._received = [instruction.message for instruction in program if isinstance(instruction, Post)]

    @property
    def length(self) -> int:
        """How many integers it takes."""
        return _HEADER + 2 * len(self._actions) + len(self._sent) + 2 * len(self._received)

    def row(self, number: int, candidate: int, step: RankStep) -> list[int]:
        """``step`` as such a row."""
        spans = [
            *map(step.passes.__getitem__, self._actions),
            *map(step.received.__getitem__, self._received),
        ]
        return [
            number, candidate, step.begin_ns, step.end_ns, step.outside_ns,
            *(step.sent_ns[message] for message in self._sent), *(moment for span in spans for moment in span),
        ]  # fmt: skip

    def step(self, row: Sequence[int]) -> RankStep:
        """The step that ``row`` begins with."""
        sends = row[_HEADER : _HEADER + len(self._sent)]
        rest = row[_HEADER + len(self._sent) : self.length]
        spans = [Span(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
        passes = len(self._actions)
        return RankStep(
            row[2], row[3], row[4],
            dict(zip(self._actions, spans[:passes], strict=True)),
            dict(zip(self._sent, sends, strict=True)),
            dict(zip(self._received, spans[passes:], strict=True)),
        )  # fmt: skip


def number_and_candidate(row: Sequence[int]) -> tuple[int, int]:
    """Of which step a row is, and under which order."""
    return row[0], row[1]
