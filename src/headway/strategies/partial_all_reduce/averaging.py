"""Averaging: what one worker does after each of its optimizer's steps, at once or while it computes the next one.

    staleness 0   x ← step(x); x ← the group's mean, training stands still meanwhile
    staleness 1   x ← step(x); a copy s of x is averaged while the next step is computed; after that step
                  x ← x + (mean - s), as in AD-PSGD: the mean is one step old

Where the coordinator was lost between a worker's vote and the decision, mean - s is kept until the decision is known,
and then applied once or dropped; meanwhile the worker trains alone.
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
"""Takes a worker of this process and a round of it, at its end, on the thread that trains. It must not raise."""

_watching: list[RoundCallback] = []


def watch(callback: RoundCallback) -> Callable[[], None]:
    """Have ``callback`` called from now on, until what is returned is called."""
    _watching.append(callback)

    def leave() -> None:
        if callback in _watching:
            _watching.remove(callback)

    return leave


_following: weakref.WeakSet[object] = weakref.WeakSet()


def follows(model: object) -> None:
    """This process trains ``model``, whose rounds another rank of its host goes through."""
    _following.add(model)


def is_following() -> bool:
    """Whether a model of this process takes over what another rank averages."""
    return bool(_following)


def notify(worker: Worker, ended: Round) -> None:
    """A round has ended."""
    for callback in _watching:
        callback(worker, ended)


Observer = Callable[[Round], None]
"""Told of each round at its end, on the thread that trains. What it raises is not caught."""

WARN_AFTER = (3, 30, 300, 3000, 30000)
"""After so many groups in a row that took no mean a warning is logged."""
_log = logging.getLogger("headway")

UNKNOWN_LIMITS = 4
"""After how many time limits with a reachable coordinator a decision that nobody knows counts as an abort."""


class Flight:
    """A round on a thread of its own."""

    def __init__(self, rounds: Rounds, iteration: int, copies: Copies) -> None:
        self.copies = copies
        self._result: tuple[Round, GroupStart | None] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(rounds, iteration), name="headway-averaging", daemon=True
        )
        self._thread.start()

    def land(self) -> tuple[Round, GroupStart | None]:
        """Wait for its end. Raises what it raised."""
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
    """A group whose decision this worker does not know. ``change`` is its mean minus what the worker had then."""

    round: Round
    layout: str
    change: Flat
    since_reachable: float | None = None


class Averaging:
    """The averaging of one worker's tensors, which ``layout`` describes as they are at the moment of the call.

    ``heard`` is told of each group's start; tensors are changed inside ``writing``. Two more copies of what is averaged
    are held, and a third while a decision is not known.
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
        """The optimizer has made step ``iteration``, counted from 1: average, or begin to and take an earlier mean."""
        self.flush(iteration)
        if self.undecided is not None:
            self._layout()  # notes what is averaged from now on, as all ranks of a host do after each step
            self._report(Round(iteration, Ending.ALONE, reason="an earlier group's decision is not known"))
            return
        copies = self._copies()
        if self.staleness:
            self._flight = Flight(self._rounds, iteration, copies), iteration
            return
        began_ns = time.monotonic_ns()
        ended, start = self._rounds.run(iteration, copies)
        self._conclude(ended, start, copies, began_ns, steps_since=0)

    def flush(self, iteration: int) -> None:
        """Take the mean that is in flight, if there is one, and what is known by now about undecided groups."""
        if self._flight is not None:
            (flight, of_iteration), self._flight = self._flight, None
            began_ns = time.monotonic_ns()
            ended, start = flight.land()
            self._conclude(ended, start, flight.copies, began_ns, steps_since=iteration - of_iteration)
        if self.undecided is not None:
            self._resolve(self.undecided, iteration)

    def drop(self) -> None:
        """The tensors were replaced: what was begun with those before is of no use. Its group has its share of them."""
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
        # It has to be asked: nobody tells a worker that joins again what was decided meanwhile.
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
        reason = "the group did not take the mean" if outcome is False else "nobody knows the decision"
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
        """Say that groups take no mean, one after the other: this worker trains alone then."""
        if ended.ending is not Ending.ABORTED:
            self._in_vain *= ended.ending is not Ending.COMMITTED
            return
        self._in_vain += 1
        if self._in_vain in WARN_AFTER:
            _log.warning(
                "worker %d: %d groups in a row took no mean, the last one with workers %s: %s. A group may take %g s "
                "(time_limit_s)", self._rounds.worker, self._in_vain,
                ", ".join(str(member) for member in ended.members if member != self._rounds.worker), ended.reason,
                self._time_limit_s,
            )  # fmt: skip
