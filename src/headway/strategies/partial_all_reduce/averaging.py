"""Averages a worker's model with its group after each optimizer step, immediately or overlapped with the next step.

    staleness 0   x ← step(x); x ← the group's mean, while training waits
    staleness 1   x ← step(x); a copy s of x is averaged during the next step; after that step
                  x ← x + (mean - s), as in AD-PSGD: the mean is one step old

If the coordinator is lost between a worker's vote and the decision, mean - s is kept until the decision is known, then
applied once or dropped; meanwhile the worker trains alone.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

from headway.errors import HeadwayError, InternalError, one_line
from headway.strategies.live.averaged import Flat, Layout
from headway.strategies.partial_all_reduce.coordinator.messages import Coordinator, GroupStart
from headway.strategies.partial_all_reduce.generators.generator import Worker
from headway.strategies.partial_all_reduce.rounds import OUTCOME_S, Copies, Ending, Round, Rounds

RoundCallback = Callable[[Worker, Round], None]
"""Called with a worker of this process and its finished round, on the training thread. Must not raise."""

_watching: list[RoundCallback] = []


def watch(callback: RoundCallback) -> Callable[[], None]:
    """Call ``callback`` after each round; returns a function that stops this."""
    _watching.append(callback)

    def leave() -> None:
        if callback in _watching:
            _watching.remove(callback)

    return leave


_following: weakref.WeakSet[object] = weakref.WeakSet()


def follows(model: object) -> None:
    """Register ``model``, for which another rank of the host performs the rounds."""
    _following.add(model)


def is_following() -> bool:
    """Whether another rank averages for a model of this process."""
    return bool(_following)


def notify(worker: Worker, ended: Round) -> None:
    """Call all callbacks with a finished round."""
    for callback in _watching:
        callback(worker, ended)


Observer = Callable[[Round], None]
"""Called with each finished round, on the training thread. Its exceptions are not caught."""

WARN_AFTER = (3, 30, 300, 3000, 30000)
"""Log a warning after this many failed groups in a row."""
_log = logging.getLogger("headway")

UNKNOWN_LIMITS = 4
"""An unknown decision counts as an abort after this many time limits with a reachable coordinator."""


class Flight:
    """A round running on its own thread."""

    def __init__(self, rounds: Rounds, iteration: int, copies: Copies) -> None:
        self.copies = copies
        self._result: tuple[Round, GroupStart | None] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(rounds, iteration), name="headway-averaging", daemon=True
        )
        self._thread.start()

    def land(self) -> tuple[Round, GroupStart | None]:
        """Wait for the round and return its result. Raises its errors."""
        self._thread.join()
        if isinstance(self._error, HeadwayError):
            raise self._error
        if self._error is not None:
            raise InternalError(f"averaging failed: {one_line(str(self._error))}") from self._error
        assert self._result is not None
        return self._result

    def _run(self, rounds: Rounds, iteration: int) -> None:
        try:
            self._result = rounds.run(iteration, self.copies)
        except BaseException as error:
            self._error = error


@dataclass(slots=True)
class Undecided:
    """A group with an unknown decision. ``change`` is its mean minus this worker's values at the time."""

    round: Round
    layout: str
    change: Flat
    since_reachable: float | None = None


class Averaging:
    """Averages the tensors of one worker; ``layout`` returns their current layout.

    ``heard`` is called with each group's start; tensors change only inside ``writing``. Holds two extra copies of the
    averaged tensors, and a third while a decision is unknown.
    """

    def __init__(
        self, rounds: Rounds, coordinator: Coordinator, layout: Callable[[], Layout], *, staleness: int,
        time_limit_s: float, observer: Observer | None, heard: Callable[[GroupStart], None],
        writing: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._rounds, self._coordinator, self._layout = rounds, coordinator, layout
        self.staleness = staleness
        self._time_limit_s = time_limit_s
        self._observer = observer
        self._heard = heard
        self._writing = writing
        self._flats: tuple[Flat, Flat] | None = None
        self._flight: tuple[Flight, int] | None = None
        self.undecided: Undecided | None = None
        self.last: Round | None = None  # the last one with a group's mean
        self.committed = self.aborted = self.unresolved = 0
        self._in_vain = 0  # groups in a row that took no mean

    def after_step(self, iteration: int) -> None:
        """Average after step ``iteration``, counted from 1, or start to and apply the earlier mean."""
        self.flush(iteration)
        if self.undecided is not None:
            self._layout()  # records which parameters are averaged, as all ranks of a host do
            self._report(
                Round(iteration, Ending.ALONE, reason="the decision about an earlier group is unknown")
            )
            return
        copies = self._copies()
        if self.staleness:
            self._flight = Flight(self._rounds, iteration, copies), iteration
            return
        began_ns = time.monotonic_ns()
        ended, start = self._rounds.run(iteration, copies)
        self._conclude(ended, start, copies, began_ns, steps_since=0)

    def flush(self, iteration: int) -> None:
        """Apply the mean in flight, if any, and decisions about earlier groups that are known by now."""
        if self._flight is not None:
            (flight, of_iteration), self._flight = self._flight, None
            began_ns = time.monotonic_ns()
            ended, start = flight.land()
            self._conclude(ended, start, flight.copies, began_ns, steps_since=iteration - of_iteration)
        if self.undecided is not None:
            self._resolve(self.undecided, iteration)

    def drop(self) -> None:
        """Discard the round in flight after the tensors were replaced, without leaving its group waiting."""
        flight, self._flight, self.undecided = self._flight, None, None
        if flight is not None:
            self._flats = None
            with suppress(HeadwayError):
                flight[0].land()

    def _copies(self) -> Copies:
        layout = self._layout()
        if self._flats is None or not layout.fits(self._flats[0]):
            self._flats = layout.empty(), layout.empty()
        before, mean = self._flats
        layout.read(before)
        return Copies(layout, before, mean)

    def _conclude(
        self, ended: Round, start: GroupStart | None, copies: Copies, began_ns: int, steps_since: int
    ) -> None:
        if start is not None:
            self._heard(start)
        ended = replace(ended, staleness=steps_since)
        if ended.ending in (Ending.COMMITTED, Ending.UNCERTAIN):
            apart, size = copies.layout.distance(copies.before, copies.mean)
            ended = replace(ended, distance=apart, relative_distance=apart / size if size else 0.0)
        if ended.ending is Ending.COMMITTED and not steps_since:
            with self._writing():
                copies.layout.write(copies.mean)  # the same bits on all members
        elif ended.ending in (Ending.COMMITTED, Ending.UNCERTAIN):
            copies.mean.subtract_(copies.before)
            if ended.ending is Ending.COMMITTED:
                layout = self._layout()  # tensors may have moved since
                with self._writing():
                    (layout if layout.digest == copies.layout.digest else copies.layout).add(copies.mean)
            else:
                self.undecided = Undecided(ended, copies.layout.digest, copies.mean)
                self._flats = None
        elif ended.ending is Ending.ABORTED:
            self._flats = (
                None  # an all-reduce that ran out of time writes into its copy once its peers come back
            )
        self._report(replace(ended, blocked_ns=time.monotonic_ns() - began_ns))

    def _resolve(self, undecided: Undecided, iteration: int) -> None:
        # A worker that rejoins is not told decisions made meanwhile: it must ask.
        asked_s = OUTCOME_S if self._coordinator.is_reachable else 0.0
        outcome = self._coordinator.outcome(undecided.round.number, asked_s)
        if outcome is None:
            now = time.monotonic()
            if not self._coordinator.is_reachable:
                undecided.since_reachable = None
                return
            undecided.since_reachable = undecided.since_reachable or now
            if now < undecided.since_reachable + UNKNOWN_LIMITS * self._time_limit_s:
                return
            self.unresolved += 1
        self.undecided = None
        layout = self._layout()
        apply = bool(outcome) and layout.digest == undecided.layout
        reason = "the group discarded the mean" if outcome is False else "the decision is unknown"
        if apply:
            with self._writing():
                layout.add(undecided.change)
        ended = replace(
            undecided.round, ending=Ending.COMMITTED if apply else Ending.ABORTED,
            staleness=iteration - undecided.round.iteration,
            reason="" if apply else reason,
        )  # fmt: skip
        self._report(ended)

    def _report(self, ended: Round) -> None:
        self.committed += ended.ending is Ending.COMMITTED
        self.aborted += ended.ending is Ending.ABORTED
        self._warn_of(ended)
        if ended.ending is Ending.COMMITTED:
            self.last = ended
        self._coordinator.report(ended.metrics())
        notify(self._rounds.worker, ended)
        if self._observer is not None:
            self._observer(ended)

    def _warn_of(self, ended: Round) -> None:
        """Warn about consecutive failed groups: this worker trains alone then."""
        if ended.ending is not Ending.ABORTED:
            self._in_vain *= ended.ending is not Ending.COMMITTED
            return
        self._in_vain += 1
        if self._in_vain in WARN_AFTER:
            _log.warning(
                "worker %d: %d groups in a row failed to average, the last one with workers %s: %s. The time limit of a "
                "group is %g s (time_limit_s)", self._rounds.worker, self._in_vain,
                ", ".join(str(member) for member in ended.members if member != self._rounds.worker), ended.reason,
                self._time_limit_s,
            )  # fmt: skip
