"""Steps: what a user marked as such, or else the calls of the function that takes most of the time."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from headway.arrays import Flags, Ints
from headway_readers.xplane.profile import Profile

LARGEST_NUMBER = 2**40
_NUMBERED = re.compile(r" \d+$")  # TensorBoard calls steps by their numbers as well
_RARE = 4.0  # times the usual: what lies between two steps is no part of them


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps in order, none overlapping another: their numbers, and from when to when they last."""

    number: Ints
    start_ns: Ints
    end_ns: Ints

    def __len__(self) -> int:
        return len(self.number)

    def of(self, moments: Ints, *, last_open: bool = False) -> Ints:
        """Which step (by its place) each moment lies in, -1 for none. ``last_open``: the last one has no end."""
        found = np.searchsorted(self.start_ns, moments, side="right") - 1
        inside = (found >= 0) & (moments < self.end_ns[np.maximum(found, 0)])
        if last_open:
            inside |= found == len(self) - 1
        return np.where(inside, found, -1)


@dataclass(frozen=True, eq=False)
class Marks:
    """Where the host asked for each step. ``stated``: the user said that these are steps. ``line`` is a thread."""

    steps: Steps
    line: int
    stated: bool
    notes: tuple[str, ...] = ()


def following(number: Ints, start_ns: Ints, end_ns: Ints) -> Steps:
    """Steps that end where the next one begins: what is done in between belongs to them.

    Not so where numbers are missing, or where what lies between is rare and long: that is something else.
    """
    ends = end_ns.copy()
    if len(number) > 1:
        periods = np.diff(start_ns)
        usual = float(np.median(periods))
        adjacent = (number[1:] == number[:-1] + 1) & (periods <= _RARE * usual)
        ends[:-1] = np.where(adjacent, start_ns[1:], np.minimum(end_ns[:-1], start_ns[1:]))
    return Steps(number, start_ns, ends)


def find_marks(profile: Profile) -> Marks | None:
    """The marks of steps: annotations with a ``step_num``, else calls of one compiled function, else none."""
    host = ~np.isin(
        profile.line, [i for i, line in enumerate(profile.lines) if line.plane.startswith("/device:")]
    )
    said, known = profile.value("step_num")
    stated = _most(profile, known & host, by_time=False)
    if len(stated):
        kept = stated[_apart(profile, stated)]
        number, notes = _numbered(said[kept])
        return _marks(profile, kept, number, True, notes)
    for calls in (
        profile.value("tf_function_call")[1],
        profile.named("PjitFunction("),
        profile.value("run_id")[1] & profile.value("num_partitions")[1],
    ):
        found = _most(profile, calls & host, by_time=True)
        if len(found):
            kept = found[_apart(profile, found)]
            what = profile.strings[int(profile.name[kept[0]])]
            note = f"Steps are not marked: each call of {what} is taken for one."
            return _marks(profile, kept, np.arange(len(kept)), False, (note,))
    return None


def _marks(profile: Profile, kept: Ints, number: Ints, stated: bool, notes: tuple[str, ...]) -> Marks:
    steps = following(number, profile.start_ns[kept], profile.end_ns[kept])
    return Marks(steps, int(profile.line[kept[0]]), stated, notes)


def _most(profile: Profile, mask: Flags, *, by_time: bool) -> Ints:
    """Those of one name, which is the one of the most events or of the most time, in order of their start."""
    found = np.flatnonzero(mask)
    if not len(found):
        return found
    names, inverse = np.unique(profile.name[found], return_inverse=True)
    called: dict[str, int] = {}
    same = [
        called.setdefault(_NUMBERED.sub("", profile.strings[name]), len(called)) for name in names.tolist()
    ]
    inverse = np.array(same)[inverse]
    weight = profile.duration_ns[found].astype(np.float64) if by_time else np.ones(len(found))
    chosen: Ints = found[inverse == int(np.argmax(np.bincount(inverse, weight, len(called))))]
    ordered: Ints = chosen[np.argsort(profile.start_ns[chosen], kind="stable")]
    return ordered


def _apart(profile: Profile, ordered: Ints) -> Flags:
    """Which of some spans begin no earlier than those before them end, nested ones left out."""
    reach = np.maximum.accumulate(profile.end_ns[ordered])
    starts = profile.start_ns[ordered]
    return np.concatenate([[True], starts[1:] >= reach[:-1]])


def _numbered(said: Ints) -> tuple[Ints, tuple[str, ...]]:
    """Steps' own numbers, where they can be; else they are counted."""
    fit = (said >= 0) & (said < LARGEST_NUMBER)
    if fit.all() and (np.diff(said) > 0).all():
        return said, ()
    return np.arange(len(said)), ("The numbers of steps repeat or are impossible: steps are counted from 0.",)
