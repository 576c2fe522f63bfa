"""Values that describe an observed pipeline step: when passes ran on every rank, and when messages were sent."""

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

    The program ran from ``begin_ns`` to ``end_ns``; before it, the rank spent ``outside_ns`` outside of steps.
    ``sent_ns`` is when each send began, ``received`` the span from posting a receive to the message's arrival.
    """

    begin_ns: int
    end_ns: int
    outside_ns: int
    passes: Mapping[Action, Span]
    sent_ns: Mapping[Message, int]
    received: Mapping[Message, Span]


@dataclass(frozen=True)
class ObservedStep:
    """A step of all ranks of one pipeline; ``candidate`` is the index of its order among the tuner's candidates."""

    number: int
    candidate: int
    ranks: tuple[RankStep, ...]


_HEADER = 5


class Columns:
    """Encodes one rank's step as a row of integers, for a collective."""

    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        program = program_of(schedule, rank)
        self._actions = schedule.ranks[rank]
        self._sent = [instruction.message for instruction in program if isinstance(instruction, Send)]
        self._received = [instruction.message for instruction in program if isinstance(instruction, Post)]

    @property
    def length(self) -> int:
        """The number of integers in a row."""
        return _HEADER + 2 * len(self._actions) + len(self._sent) + 2 * len(self._received)

    def row(self, number: int, candidate: int, step: RankStep) -> list[int]:
        """Encode ``step`` as a row."""
        spans = [
            *map(step.passes.__getitem__, self._actions),
            *map(step.received.__getitem__, self._received),
        ]
        return [
            number, candidate, step.begin_ns, step.end_ns, step.outside_ns,
            *(step.sent_ns[message] for message in self._sent), *(moment for span in spans for moment in span),
        ]  # fmt: skip

    def step(self, row: Sequence[int]) -> RankStep:
        """Decode the step at the start of ``row``."""
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
    """The step number and candidate of a row."""
    return row[0], row[1]
