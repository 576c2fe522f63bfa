"""What a step of a pipeline was like on every rank, as values: when its passes ran, and when its messages went."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

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


_Request = tuple[Sequence[dist.Work], "Future[int]"]


# What a rank sees of its own steps: when passes run, when messages are sent, and when they arrive.
#
# Receives are waited for on a thread of their own for each sender, so that an arrival is seen when it comes and not when
# the message is needed.


class StepWatch:
    """Notes one step after the other; ``offset_ns`` brings this rank's clock onto rank 0's."""

    def __init__(self) -> None:
        self.offset_ns = 0
        self._arrivals_from: dict[int, _Arrivals] = {}
        self._ended_ns = 0
        self._begin()

    def _begin(self) -> None:
        self._begin_ns = self._between_ns = 0
        self._passes: dict[Action, Span] = {}
        self._sent_ns: dict[Message, int] = {}
        self._posted_ns: dict[Message, int] = {}
        self._arrivals: dict[Message, Future[int]] = {}

    def called(self) -> None:
        """The script asks for a step: until now the rank did other things than the last one."""
        self._between_ns = time.monotonic_ns() - self._ended_ns if self._ended_ns else 0

    def begins(self) -> None:
        """The program of a step begins."""
        self._begin_ns = time.monotonic_ns()

    def computed(self, action: Action, compute: Callable[[], None]) -> None:
        """Have ``action`` computed."""
        begin_ns = time.monotonic_ns()
        compute()
        self._passes[action] = Span(begin_ns, time.monotonic_ns())

    def sending(self, message: Message) -> None:
        """A send is about to begin."""
        self._sent_ns[message] = time.monotonic_ns()

    def posted(self, message: Message, works: Sequence[dist.Work]) -> None:
        """A receive has been posted."""
        self._posted_ns[message] = time.monotonic_ns()
        if message.sender not in self._arrivals_from:
            self._arrivals_from[message.sender] = _Arrivals()
        self._arrivals[message] = self._arrivals_from[message.sender].of(works)

    def wait(self, message: Message) -> None:
        """Wait until a message has arrived. Raises what waiting for it raised."""
        self._arrivals[message].result()

    def ended(self) -> RankStep:
        """The step that has just ended."""
        self._ended_ns = time.monotonic_ns()
        offset_ns = self.offset_ns
        step = RankStep(
            self._begin_ns + offset_ns,
            self._ended_ns + offset_ns,
            self._between_ns,
            {
                action: Span(span.begin_ns + offset_ns, span.end_ns + offset_ns)
                for action, span in self._passes.items()
            },
            {message: sent_ns + offset_ns for message, sent_ns in self._sent_ns.items()},
            {
                message: Span(posted_ns + offset_ns, self._arrivals[message].result() + offset_ns)
                for message, posted_ns in self._posted_ns.items()
            },
        )
        self._begin()
        return step


class _Arrivals:
    """Waits for one sender's messages, in their order, on a thread that ends with this object."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        threading.Thread(target=_wait, args=(self._requests,), name="headway-arrivals", daemon=True).start()
        weakref.finalize(self, self._requests.put, None)

    def of(self, works: Sequence[dist.Work]) -> Future[int]:
        """When what ``works`` receive has arrived, or what waiting for it raises."""
        future: Future[int] = Future()
        self._requests.put((works, future))
        return future


def _wait(requests: queue.SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        works, future = request
        try:
            for work in works:
                work.wait()
            future.set_result(time.monotonic_ns())
        except Exception as failure:  # raised again where the message is needed
            future.set_exception(failure)
