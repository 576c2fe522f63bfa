"""The adapter: told of steps as ranks see them, it says when the schedule is to be tuned again, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, Self


class RankWindow(NamedTuple):
    """Some steps of one rank, each value as that of one step.

    ``step_ms`` lies within ``uncertainty_ms`` in nineteen of twenty cases, if steps are like each other. ``waited_ms``
    is how long training stood still for communication, NaN where nobody sees that, as under stock DDP; ``byte_ns`` what
    a byte took in its collectives: NaN where there were none.
    """

    step_ms: float
    uncertainty_ms: float
    waited_ms: float
    byte_ns: float

    @property
    def computed_ms(self) -> float:
        """What is left of a step without waiting."""
        return max(0.0, self.step_ms - self.waited_ms)


class Window(NamedTuple):
    """The steps before ``step``, as every rank saw them."""

    step: int
    ranks: tuple[RankWindow, ...]

    @classmethod
    def of(cls, step: int, ranks: Sequence[Sequence[float]]) -> Self:
        """From the numbers of each rank."""
        return cls(step, tuple(RankWindow(*numbers) for numbers in ranks))

    @property
    def step_ms(self) -> float:
        """A step of the job: ranks wait for each other, so that the slowest has it."""
        return max(rank.step_ms for rank in self.ranks)

    @property
    def uncertainty_ms(self) -> float:
        """By how much that may be off."""
        return max(rank.uncertainty_ms for rank in self.ranks)

    @property
    def waits_are_known(self) -> bool:
        """Whether it is known of every rank how long it stood still."""
        return not any(math.isnan(rank.waited_ms) for rank in self.ranks)

    @property
    def byte_ns(self) -> float:
        """What a byte took on the rank that waited least within its collectives; NaN where no rank had any.

        Whoever is there first waits for the last, so that on most ranks a straggler looks like a slow network.
        """
        return min((rank.byte_ns for rank in self.ranks if not math.isnan(rank.byte_ns)), default=math.nan)


def joined(windows: Sequence[Window]) -> Window:
    """Several windows as one, rank by rank: the means of what they saw."""
    ranks = zip(*(window.ranks for window in windows), strict=True)
    count = len(windows)
    return Window(
        windows[-1].step,
        tuple(
            RankWindow(
                fmean(window.step_ms for window in rank_windows),
                math.hypot(*(window.uncertainty_ms for window in rank_windows)) / count,
                fmean(window.waited_ms for window in rank_windows),
                fmean(window.byte_ns for window in rank_windows),
            )
            for rank_windows in ranks
        ),
    )


REFERENCE_WINDOWS = 3
"""So many windows make up what later ones are compared with."""
UNLIKE_WINDOWS = 2
"""So many in a row must be unlike it: one may be so by chance."""
LEAST_CHANGE = 0.05
OTHER_RATE = 0.2
"""By so much a byte takes longer, or less long, where the network is said to have changed."""
RESTS_PER_STEP = 10
"""For so many times the steps that tuning took there is no other: what it costs stays below 2 % of them."""
MOST_RESTS_PER_STEP = 160
LEAST_GAIN = 0.02


class Decision(NamedTuple):
    """What was decided after ``step``: whether to tune again, and why. ``step_ms`` is a step of the window before."""

    step: int
    tunes: bool
    reason: str
    step_ms: float


@dataclass(frozen=True)
class Adapter:
    """Compares windows with ``reference``, those that came first. ``latest`` is what was decided after the last."""

    reference: tuple[Window, ...] = ()
    unlike: tuple[Window, ...] = ()
    rests_until: int = 0
    rests_per_step: int = RESTS_PER_STEP
    latest: Decision | None = None

    def after(self, window: Window) -> Adapter:
        """The adapter that has seen one more window."""
        if not self.reference:
            return replace(self, reference=(window,))._decided(window, "later steps are compared with these")
        before = joined(self.reference)
        change = window.step_ms / before.step_ms - 1
        if abs(change) <= max(LEAST_CHANGE, _noise(before, window)):
            reference = (*self.reference, window)[:REFERENCE_WINDOWS]
            return replace(self, reference=reference, unlike=())._decided(window, "steps are as they were")
        alike = self.unlike if self.unlike and _grew(self.unlike[-1], before) == (change > 0) else ()
        unlike = (*alike, window)[-UNLIKE_WINDOWS:]
        seen = replace(self, unlike=unlike)
        reason = f"steps take {_times(window.step_ms, before.step_ms)}"
        if len(unlike) < UNLIKE_WINDOWS:
            return seen._decided(window, f"{reason}; once, which may be chance")
        return seen._changed(window, before, reason)

    def tuned(self, step: int, steps: int, gain: float) -> Adapter:
        """The adapter after a tuning that ended at ``step``, took ``steps`` and made steps shorter by ``gain``."""
        per_step = RESTS_PER_STEP
        if gain < LEAST_GAIN:
            per_step = min(MOST_RESTS_PER_STEP, 2 * self.rests_per_step)
        return Adapter(rests_until=step + per_step * steps, rests_per_step=per_step)

    def _changed(self, window: Window, before: Window, reason: str) -> Adapter:
        seen = joined(self.unlike)
        rate = seen.byte_ns / before.byte_ns
        waits_known = seen.waits_are_known and before.waits_are_known
        slower = [
            f"rank {number} computes {_times(now.computed_ms, then.computed_ms)}"
            for number, (now, then) in enumerate(zip(seen.ranks, before.ranks, strict=True))
            if waits_known and _computes_otherwise(now, then)
        ]
        of_network = rate > 1 + OTHER_RATE or rate < 1 / (1 + OTHER_RATE)
        if of_network:
            reason += f": a byte of gradients takes {_times(seen.byte_ns, before.byte_ns)}"
        elif slower:
            reason += f": {slower[0]}" + (f", and {len(slower) - 1} more" if len(slower) > 1 else "")
        if slower and not of_network and len(slower) < len(seen.ranks):
            reason += "; no schedule helps where some ranks are waited for, partial all-reduce would"
            return replace(self, reference=self.unlike, unlike=())._decided(window, reason)
        if window.step < self.rests_until:
            return self._decided(window, f"{reason}; tuned again from step {self.rests_until} on")
        return self._decided(window, reason, tunes=True)

    def _decided(self, window: Window, reason: str, *, tunes: bool = False) -> Adapter:
        return replace(self, latest=Decision(window.step, tunes, reason, window.step_ms))


def _noise(before: Window, now: Window) -> float:
    return float((before.uncertainty_ms**2 + now.uncertainty_ms**2) ** 0.5 / before.step_ms)


def _grew(window: Window, before: Window) -> bool:
    return window.step_ms > before.step_ms


def _computes_otherwise(now: RankWindow, then: RankWindow) -> bool:
    """Whether a rank takes longer to compute, or less long; not where that is next to nothing of a step."""
    longer_ms = max(now.computed_ms, then.computed_ms)
    change_ms = abs(now.computed_ms - then.computed_ms)
    return longer_ms > LEAST_CHANGE * then.step_ms and change_ms > LEAST_CHANGE * then.computed_ms


def _times(now: float, before: float) -> str:
    return f"{now / max(before, 1e-6):.2f} times as long"
