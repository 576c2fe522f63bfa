"""Records the averaging rounds of partial all-reduce, as events and as the ``RankRounds`` of a trace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headway.clocks.aligning import aligned_ns
from headway.collectives.algorithms import ALL_REDUCE
from headway.errors import one_line
from headway.recording.patching import Now, guarded
from headway.recording.watch import Watch
from headway.strategies.partial_all_reduce import averaging
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.strategies.partial_all_reduce.rounds import Round
from headway.trace.events import GROUP, Event, Kind, Stream
from headway.trace.format import MOST_MEMBERS, MOST_ROUNDS, AveragingRound, ClockFit, RankRounds


@dataclass(frozen=True, slots=True)
class _Seen:
    step: int
    told_ns: int
    round: Round

    @property
    def begun_ns(self) -> int:
        return self.round.asked_ns + self.round.waiting_ns

    @property
    def ended_ns(self) -> int:
        return self.begun_ns + self.round.reducing_ns + self.round.voting_ns


class RoundWatch(Watch):
    """Records this process's averaging rounds. Rounds of several models are kept together, under one worker."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._seen: list[_Seen] = []
        self._worker: int | None = None
        self._dropped = 0
        self._leave: Callable[[], None] | None = None

    @property
    def averages(self) -> bool:
        """Whether this process averages a model in groups, directly or through another rank of its host."""
        return self._worker is not None or averaging.is_following()

    def attach(self) -> None:
        """Start listening to the runtime."""
        if self._leave is None:
            self._leave = averaging.watch(guarded(self._take_in))

    def detach(self) -> None:
        """Stop listening; the rounds seen so far are kept."""
        if self._leave is not None:
            self._leave()
            self._leave = None

    def _take_in(self, worker: int, round_: Round) -> None:
        self._worker = worker
        if not self._now.recording:
            return
        if len(self._seen) >= MOST_ROUNDS or len(round_.members) > MOST_MEMBERS:
            self._dropped += 1
            return
        self._seen.append(_Seen(self._now.step, time.monotonic_ns(), round_))

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Add the events of ``rows``."""
        return [*rows, *self.rows()]

    def rows(self) -> Iterator[Event]:
        """Yield training's waits for its groups, and the groups' all-reduces as collective events."""
        for seen in self._seen:
            told_ns, ended = seen.told_ns, seen.round
            if ended.blocked_ns:
                start_ns = told_ns - ended.blocked_ns
                yield Event(Kind.WAIT, GROUP, Stream.COMPUTE, seen.step, start_ns, ended.blocked_ns)
            if len(ended.members) > 1 and ended.asked_ns:
                yield Event(
                    Kind.COLLECTIVE, ALL_REDUCE, Stream.COMMUNICATION, seen.step, seen.begun_ns,
                    seen.ended_ns - seen.begun_ns, enqueue_ns=ended.asked_ns,
                    group=f"{PartialAllReduceStrategy.name} of {min(ended.members)}", sequence=ended.number,
                    size_bytes=ended.size_bytes, algorithm="gloo",
                )  # fmt: skip

    def described(self, fit: ClockFit) -> RankRounds | None:
        """The rounds with times aligned by ``fit``; None if no model was averaged."""
        if self._worker is None:
            return None
        rounds = tuple(_described(seen, fit) for seen in self._seen)
        return RankRounds(worker=self._worker, rounds=rounds, dropped=self._dropped)


def _described(seen: _Seen, fit: ClockFit) -> AveragingRound:
    ended = seen.round
    times_ns = (ended.asked_ns or seen.told_ns, seen.begun_ns, seen.ended_ns, seen.told_ns)
    asked_ns, begun_ns, ended_ns, told_ns = _moved(times_ns, fit)
    distances = (ended.distance, ended.relative_distance)
    distance, relative = (norm if math.isfinite(norm) else 0.0 for norm in distances)
    return AveragingRound(
        step=seen.step, iteration=ended.iteration, ending=ended.ending.value, number=ended.number,
        members=ended.members, iterations=ended.iterations, asked_ns=asked_ns, begun_ns=max(asked_ns, begun_ns),
        ended_ns=max(asked_ns, ended_ns), told_ns=told_ns, blocked_ns=ended.blocked_ns, staleness=ended.staleness,
        size_bytes=ended.size_bytes, distance=distance, relative_distance=relative,
        reason=one_line(ended.reason, 200),
    )  # fmt: skip


def realigned(rank_rounds: RankRounds, fit: ClockFit) -> RankRounds:
    """Return the rounds with their times aligned by ``fit``."""
    names = ("asked_ns", "begun_ns", "ended_ns", "told_ns")
    rounds = [
        round_.model_copy(
            update=dict(zip(names, _moved([getattr(round_, name) for name in names], fit), strict=True))
        )
        for round_ in rank_rounds.rounds
    ]
    return rank_rounds.model_copy(update={"rounds": tuple(rounds)})


def _moved(times_ns: Sequence[int], fit: ClockFit) -> list[int]:
    moved: list[int] = aligned_ns(np.array(times_ns, dtype=np.int64), fit).tolist()
    return moved
