"""Where steps begin and end: as a trace marks them, or else where its computation repeats itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints, Texts
from headway.interop.readers.torch_json import ints, whole
from headway.trace.events import Events, Kind, Stream, texts

_MARK = re.compile(r"^ProfilerStep\s?#\s?(\d{1,15})$")
LEAST_PERIOD = 2  # computations that make a step, where nothing marks steps


@dataclass(frozen=True, eq=False)
class Steps:
    """Windows of time in order, one a step. ``notes`` say where they come from, if nothing marks them.

    A device lags behind its host: ``begun_ns`` is when the host began the steps, where that is another moment.
    """

    number: Ints
    start_ns: Ints
    end_ns: Ints
    notes: tuple[str, ...] = ()
    begun_ns: Ints | None = None

    def of(self, moments: Ints) -> npt.NDArray[np.intp]:
        """The index of the step in which each moment lies, or of the one before; -1 before all of them."""
        found: npt.NDArray[np.intp] = np.searchsorted(self.start_ns, moments, side="right") - 1
        return found

    def of_causes(self, ends: Ints) -> npt.NDArray[np.intp]:
        """The index of the step that caused what was asked for at each of ``ends``: the end of a step is part of it."""
        begun_ns = self.start_ns if self.begun_ns is None else self.begun_ns
        before, until = (np.searchsorted(begun_ns, ends, side=side) - 1 for side in ("left", "right"))
        found: npt.NDArray[np.intp] = np.maximum(before, np.minimum(until, 0))
        return found

    def events(self) -> Events:
        """STEP events."""
        return Events.from_columns(
            kind=Kind.STEP, stream=Stream.COMPUTE, name=texts([f"step {number}" for number in self.number.tolist()]),
            step=self.number, start_ns=self.start_ns, duration_ns=self.end_ns - self.start_ns,
        )  # fmt: skip


def stated(windows: object) -> Steps | None:
    """Steps from the number, start and end in microseconds of each, one after the other, as Headway writes them."""
    if not isinstance(windows, list) or not windows or len(windows) % 3:
        return None
    rows = [
        tuple(whole(value, 2**62 // 1000) for value in windows[at : at + 3])
        for at in range(0, len(windows), 3)
    ]
    ordered = all(before[2] <= after[1] and before[0] < after[0] for before, after in pairwise(rows))
    if not ordered or any(min(row) < 0 or row[1] >= row[2] for row in rows):
        return None
    number, start_us, end_us = (ints(column) for column in zip(*rows, strict=True))
    return Steps(number, start_us * 1000, end_us * 1000)


def marked(name: Texts, start_ns: Ints, end_ns: int) -> Steps | None:
    """The steps that ``profiler.step()`` marked: each lasts until the next begins. ``end_ns`` ends the last."""
    marks = {
        int(match[1]): int(start_ns[index])
        for index, text in reversed(list(enumerate(name.tolist())))
        if text.startswith("ProfilerStep") and (match := _MARK.match(text))
    }
    rows = sorted((start, number) for number, start in marks.items())
    starts = [start for start, _ in rows]
    if not starts or len(set(starts)) < len(starts) or starts[-1] >= end_ns:
        return None
    return Steps(ints([number for _, number in rows]), ints(starts), ints([*starts[1:], end_ns]))


def repeated(name: Sequence[str], start_ns: Ints, first_ns: int, end_ns: int) -> Steps:
    """Steps where the computations ``name``, in order of their start, repeat; one step where they do not."""
    known: dict[str, int] = {}
    codes = ints([known.setdefault(one, len(known)) for one in name])
    count = len(codes)
    period = next(
        (p for p in _divisors(count) if p >= LEAST_PERIOD and np.array_equal(codes[p:], codes[: count - p])),
        count,
    )
    starts = start_ns[::period].copy() if count else ints([first_ns])
    starts[0] = first_ns
    if period == count or (np.diff(starts) <= 0).any() or starts[-1] >= end_ns:
        note = "Nothing marks steps, and nothing repeats: everything is taken for one step."
        return Steps(ints([0]), ints([first_ns]), ints([end_ns]), (note,))
    note = (
        f"Nothing marks steps: computation repeats {len(starts)} times, and each time is taken for one step."
    )
    return Steps(np.arange(len(starts), dtype=np.int64), starts, np.append(starts[1:], end_ns), (note,))


def _divisors(count: int) -> list[int]:
    small = [one for one in range(1, int(count**0.5) + 1) if count % one == 0]
    return sorted({*small, *(count // one for one in small)})
