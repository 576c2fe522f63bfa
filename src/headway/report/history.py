"""The history of a job, step by step: how long each step took, what it consisted of, and which stand out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Floats
from headway.diagnosis.breakdown import NS_A_MS, PARTS
from headway.diagnosis.communication import Communications
from headway.diagnosis.timeline import RankTime, rank_time
from headway.trace.format import Trace

MAX_BARS = 400
MAX_OUTLIERS = 12
MANY_STEPS = 4  # with fewer there is nothing that a step could stand out from
STANDS_OUT = 0.10  # of the median step
SPREADS = 4.0  # times the usual spread of steps


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: the longest of ``of_steps`` neighbouring steps. ``parts_ms`` is the mean over ranks."""

    step: int
    of_steps: tuple[int, int]
    max_ms: float
    median_ms: float
    parts_ms: tuple[float, ...]
    stands_out: bool


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that took much longer than most; ``part`` grew most, by ``grew_ms`` averaged over ranks."""

    step: int
    max_ms: float
    part: str
    grew_ms: float


@dataclass(frozen=True, slots=True)
class History:
    """All recorded steps as at most MAX_BARS bars. ``parts`` names the numbers of each bar's ``parts_ms``.

    A step's length is that on its slowest rank; ``median_ms`` is the median over steps of these. ``outliers`` are
    the longest first, ``outlying`` is how many there are before they are cut to MAX_OUTLIERS.
    """

    steps: int
    steps_a_bar: int
    parts: tuple[str, ...]
    bars: tuple[Bar, ...]
    median_ms: float
    outliers: tuple[Outlier, ...]
    outlying: int


def rank_times(trace: Trace, steps: tuple[int, ...], rows: Communications) -> dict[int, RankTime]:
    """Each rank's time over the recorded steps, as the diagnosis saw it."""
    return {
        rank: rank_time(rank, events, steps, rows.of_rank(rank))
        for rank, events in sorted(trace.events.items())
    }


def history(times: dict[int, RankTime], steps: tuple[int, ...], max_bars: int = MAX_BARS) -> History:
    """Summarise ``times`` step by step; ``steps`` are the numbers of the recorded steps, at least one."""
    lengths = np.stack([(time.step_end_ns - time.step_start_ns) / NS_A_MS for time in times.values()])
    longest, median = lengths.max(axis=0), np.median(lengths, axis=0)
    parts = sum((_parts(time) for time in times.values()), np.zeros((len(PARTS), len(steps)))) / len(times)
    outlying = _outlying(longest)
    a_bar = -(-len(steps) // max_bars)
    bars = []
    for first in range(0, len(steps), a_bar):
        last = min(first + a_bar, len(steps)) - 1
        at = first + int(np.argmax(longest[first : last + 1]))
        bars.append(
            Bar(
                steps[at],
                (steps[first], steps[last]),
                float(longest[at]),
                float(median[at]),
                tuple(parts[:, at].tolist()),
                at in outlying,
            )
        )
    return History(
        steps=len(steps),
        steps_a_bar=a_bar,
        parts=PARTS,
        bars=tuple(bars),
        median_ms=float(np.median(longest)),
        outliers=tuple(_outlier(int(at), steps, longest, parts) for at in outlying[:MAX_OUTLIERS]),
        outlying=len(outlying),
    )


def _parts(time: RankTime) -> Floats:
    """One rank's parts of each step in milliseconds, in the order of PARTS; they add up to the step."""
    own = {
        "computation": time.per_step(time.forward) + time.per_step(time.backward),
        "exposed_communication": time.per_step(time.exposed),
        "straggler_wait": time.per_step(time.straggling),
        "input": time.per_step(time.input),
        "optimizer": time.per_step(time.optimizer),
    }
    whole = time.step_end_ns - time.step_start_ns
    own["rest"] = whole - np.sum(list(own.values()), axis=0)
    return np.stack([own.get(part, np.zeros_like(whole)) for part in PARTS]) / NS_A_MS


def _outlying(longest: Floats) -> npt.NDArray[np.int64]:
    """The indices of the steps that are far longer than most, the longest first."""
    if len(longest) < MANY_STEPS:
        return np.zeros(0, dtype=np.int64)
    middle = np.median(longest)
    spread = 1.4826 * np.median(np.abs(longest - middle))
    found = np.flatnonzero(longest > middle + max(SPREADS * spread, STANDS_OUT * middle))
    return found[np.argsort(-longest[found], kind="stable")]


def _outlier(at: int, steps: tuple[int, ...], longest: Floats, parts: Floats) -> Outlier:
    grew = parts[:, at] - np.median(parts, axis=1)
    most = int(np.argmax(grew))
    return Outlier(steps[at], float(longest[at]), PARTS[most], float(grew[most]))
