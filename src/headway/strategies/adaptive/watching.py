"""The live driver of adapting: counts steps, tells ranks what each saw, and tunes when the adapter says so."""

from __future__ import annotations

import logging
import math
import statistics
import threading
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch.distributed as dist

from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.adapter import Adapter, RankWindow, Window
from headway.strategies.adaptive.counting import Interval, StepCount, Study, Tunable, agreement_of
from headway.strategies.adaptive.proposals import Tuned
from headway.strategies.adaptive.proposer import LEAST_PREDICTED_GAIN, CautiousProposer
from headway.strategies.adaptive.tuner import MEASURED_STEPS, Tuner
from headway.strategies.decisions import Entry, Journal
from headway.strategies.live.channels.observer import Collective
from headway.strategies.live.notice import WaitObserver


class Sums(NamedTuple):
    """Since the beginning: time that training waited, time in collectives, and their bytes."""

    waited_ns: int = 0
    carried_ns: int = 0
    carried_bytes: int = 0


class Traffic:
    """Sums up what an observer is told. Collectives are told on the threads of channels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = Sums()
        self._observer: WaitObserver | None = None

    @property
    def sums(self) -> Sums:
        """What it has seen so far."""
        with self._lock:
            return self._sums

    def attach(self) -> None:
        """Observe, unless it does already."""
        if self._observer is None or not self._observer.is_told:
            self._observer = WaitObserver.over(self)

    def detach(self) -> None:
        """Observe no more."""
        if self._observer is not None:
            self._observer.withdraw()

    def carried(self, done: Collective) -> None:
        """Count it."""
        with self._lock:
            waited, carried, size = self._sums
            self._sums = Sums(waited, carried + done.end_ns - done.start_ns, size + done.size_bytes)

    def waited(self, start_ns: int, end_ns: int) -> None:
        """Count it."""
        with self._lock:
            self._sums = self._sums._replace(waited_ns=self._sums.waited_ns + end_ns - start_ns)

    def updated(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Updates are computation."""

    def updated_in_background(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Updates are computation."""


SETTLING_STEPS = 5
FEWEST_STEPS, MOST_STEPS = 10, 500
WINDOW_MS = 2000.0
"""Of a window, about: ranks tell each other of it during the step that follows."""

_log = logging.getLogger("headway")


class Adapting(StepCount):
    """Watches one wrapped model for as long as it trains, and has it tuned again when its world has changed."""

    def __init__(self, wrapped: Tunable, first: Entry | None = None) -> None:
        """``first`` is the decision that ended a tuning before."""
        super().__init__(wrapped)
        self._adapter = Adapter()
        self._traffic = Traffic()
        weakref.finalize(wrapped, self._traffic.detach).atexit = False
        self._is_first = agreement_of(wrapped).rank == 0  # who writes decisions down: all come to the same
        self._journal = Journal.wanted() if self._is_first else None
        if first is not None and self._journal is not None:
            self._journal.add(first)
        self._named: tuple[BucketSchedule, int, str] | None = None
        self._begin(wrapped)
        if first is not None:
            self._steps = first.step  # of the job, as decisions say them

    def _made_study(self) -> Study:
        for _ in range(SETTLING_STEPS):
            yield
        count = FEWEST_STEPS
        while True:
            self._traffic.attach()
            intervals: list[Interval] = []
            sums = [self._traffic.sums]
            for _ in range(count):
                intervals.append((yield))
                sums.append(self._traffic.sums)
            seen = rank_window(intervals, sums, sees_waits=not self._model().is_stock)
            answers = agreement_of(self._model()).tell_each(seen)
            # What ranks say is on its way behind parameters that are being gathered: nobody waits for it.
            yield
            window = Window.of(self._steps, answers())
            count = min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(WINDOW_MS / window.step_ms)))
            if self._is_to_be_tuned(window):
                return

    def _is_to_be_tuned(self, window: Window) -> bool:
        # No model may stay in a variable of the study: it would never be let go of.
        self._adapter = self._adapter.after(window)
        assert self._adapter.latest is not None
        self._note(self._adapter.latest.reason, window.step_ms, self._described(self._model()))
        return self._adapter.latest.tunes

    def _finish(self, reason: str) -> None:
        """The adapter wants the model to be tuned."""
        wrapped = self._model()
        if reason:
            self._end(wrapped, reason)
        else:
            before = self._described(wrapped)
            wrapped.tuner = Tuner(
                wrapped, CautiousProposer(), MEASURED_STEPS,
                lambda tuned, came: self._was_tuned(tuned, came, before),
            )  # fmt: skip

    def _was_tuned(self, wrapped: Tunable, tuned: Tuned, before: str) -> None:
        self._steps += tuned.all_steps
        gain = gained(tuned)
        self._adapter = self._adapter.tuned(self._steps, tuned.steps, gain)
        took_ms = 0.0 if tuned.chosen is None else tuned.measured_ms[tuned.chosen]
        predicted = {
            candidate.strategy.describe(): candidate.predicted_ms
            for candidate in tuned.candidates
            if candidate.predicted_ms is not None
        }
        self._note(f"tuned in {tuned.steps} steps: {came_of(tuned)}", took_ms, before, predicted)
        wrapped.tuner = self
        self._begin(wrapped)

    def _trained_otherwise(self, wrapped: Tunable) -> None:
        self._adapter = Adapter()
        self._begin(wrapped)

    def _scheduled_otherwise(self, wrapped: Tunable) -> None:
        self._end(wrapped, "the script put another schedule in force")

    def _end(self, wrapped: Tunable, reason: str) -> None:
        self._traffic.detach()
        self._note(f"no longer watched: {reason}", 0.0, self._described(wrapped))
        wrapped.tuner = None

    def _note(
        self, reason: str, took_ms: float, before: str, predicted_ms: dict[str, float] | None = None
    ) -> None:
        wrapped = self._model()
        now = self._described(wrapped)
        if self._journal is not None:
            self._journal.add(
                Entry(
                    step=self._steps, before=before, order=now, reason=reason, measured_ms=took_ms,
                    predicted_ms=predicted_ms or {},
                )
            )  # fmt: skip
        if self._is_first:
            level = logging.INFO if now != before else logging.DEBUG
            _log.log(level, "step %d: %s: %s", self._steps, now, reason)

    def _described(self, wrapped: Tunable) -> str:
        """The schedule in force, in words, on the rank that writes it down: told anew only when it has changed."""
        if not self._is_first:
            return ""
        named = self._named
        if named is None or named[0] is not wrapped.schedule or named[1] != wrapped.handovers:
            named = self._named = wrapped.schedule, wrapped.handovers, wrapped.strategy.describe()
        return named[2]


def rank_window(
    intervals: Sequence[Interval], sums: Sequence[Sums], *, sees_waits: bool = True
) -> RankWindow:
    """What one rank saw of some steps; ``sums`` are those of its traffic before the first step and after each.

    ``sees_waits`` says whether these tell of waits.

    Each value is the median over steps that nothing else has disturbed, here or on a rank that others waited for.
    """
    seen = [
        (interval, Sums(*(now - before for now, before in zip(after, earlier, strict=True))))
        for interval, (earlier, after) in zip(intervals, pairwise(sums), strict=True)
    ]
    calm = [(interval.ms, traffic) for interval, traffic in seen if not interval.disturbed] or [
        (interval.ms, traffic) for interval, traffic in seen
    ]
    steps_ms = [ms for ms, _ in calm]
    spread = statistics.stdev(steps_ms) if len(calm) > 1 else 0.0
    byte_ns = [traffic.carried_ns / traffic.carried_bytes for _, traffic in calm if traffic.carried_bytes]
    return RankWindow(
        step_ms=statistics.median(steps_ms),
        uncertainty_ms=2.5 * spread / math.sqrt(len(calm)),  # of a median, at 95 %
        waited_ms=statistics.median(traffic.waited_ns for _, traffic in calm) / 1e6
        if sees_waits
        else math.nan,
        byte_ns=statistics.median(byte_ns) if byte_ns else math.nan,
    )


def came_of(tuned: Tuned) -> str:
    """In words, what came of a tuning."""
    if tuned.chosen is not None:
        verdict = f"; {tuned.verdict}" if tuned.verdict else ""
        return f"steps are {gained(tuned):.1%} shorter than before{verdict}"
    return tuned.ended_early or f"no schedule is predicted to be faster by {LEAST_PREDICTED_GAIN:.0%}"


def gained(tuned: Tuned) -> float:
    """How much shorter a step became by a tuning, as a share of the one in force before; 0 where nothing was chosen."""
    if tuned.chosen is None or not tuned.measured_ms:
        return 0.0
    return 1 - tuned.measured_ms[tuned.chosen] / tuned.measured_ms[0]


def adapt(wrapped: Tunable, first: Entry | None = None) -> None:
    """Watch ``wrapped`` from its next step on, on every rank, and tune it when its world has changed.

    A single worker has nothing to adapt. ``first`` is the decision that ended a tuning before.
    """
    if dist.get_world_size(wrapped.process_group) > 1:
        wrapped.tuner = Adapting(wrapped, first)
