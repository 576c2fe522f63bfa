"""An MXNet profile as columns: operators, calls of its interface, and what the user marked.

MXNet writes every operator twice, as a pair of B and E under its device and as an asynchronous pair of b and e under
"operator": the first is read. Pairs are written when an operator is done, the beginning directly before the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints, Texts
from headway.ext import Document, damaged, texts
from headway_readers.chrome import Entry, arguments, nanoseconds, read_listing

DEVICE = re.compile(r"(?:cpu|gpu|cpu pinned|cpu shared)/\d*")
CALLS = "MXNET_C_API"
OPERATORS = "operator"
_ENDS = {"B": "E", "b": "e", "(": ")"}  # operators and events; calls and tasks; frames
_MARKERS = frozenset("niI")
_LOOKED_AT = frozenset({*_ENDS, *_ENDS.values(), *_MARKERS})


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Spans as columns of one length, in the order in which they were written: that of their ends, on one thread."""

    category: Texts
    name: Texts
    start_ns: Ints
    end_ns: Ints

    def __len__(self) -> int:
        return len(self.start_ns)

    def where(self, picked: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Spans:
        """The spans that ``picked`` picks."""
        return Spans(**{field.name: getattr(self, field.name)[picked] for field in fields(self)})

    def named(self, *names: str) -> Spans:
        """The spans of these names."""
        return self.where(np.isin(self.name, names))


@dataclass(frozen=True, eq=False)
class Profile:
    """What one document holds. A marker's span is empty."""

    operators: Spans
    calls: Spans
    marks: Spans
    dropped: int
    notes: tuple[str, ...]


def read_profile(document: Document) -> Profile:
    """Decode a profile. Raises TraceError where it is damaged, unless it is read leniently."""
    listing = read_listing(document)
    notes = list(listing.notes)
    devices = {entry.pid for entry in listing.entries if entry.ph == "M" and _is_device(entry)}
    entries = [
        entry
        for entry in listing.entries
        if entry.ph in _LOOKED_AT and (entry.cat != OPERATORS or entry.ph in "BE")
    ]
    begins, ends, alone = _paired(entries)
    markers = [index for index, entry in enumerate(entries) if entry.ph in _MARKERS]
    first, last = np.array([*begins, *markers], dtype=np.intp), np.array([*ends, *markers], dtype=np.intp)
    time_ns, fits = nanoseconds([entry.ts for entry in entries])
    good = fits[first] & fits[last] & (time_ns[last] >= time_ns[first])
    wrong = int((~good).sum())
    if not document.lenient and (wrong or alone):
        raise damaged(document, _fault(entries, first[~good], alone), expected="whole operators")
    if wrong or alone:
        notes.append(f"{wrong + alone} events without a time or without an end were left out.")
    first, last = first[good], last[good]
    kept = [entries[index] for index in first.tolist()]
    spans = Spans(
        category=texts([OPERATORS if e.pid in devices and e.ph == "B" else e.cat for e in kept]),
        name=texts([e.name for e in kept]),
        start_ns=time_ns[first],
        end_ns=time_ns[last],
    )
    operators, calls = spans.category == OPERATORS, spans.category == CALLS
    return Profile(
        operators=spans.where(operators),
        calls=spans.where(calls),
        marks=spans.where(~operators & ~calls),
        dropped=listing.dropped + wrong + alone,
        notes=tuple(notes),
    )


def _is_device(entry: Entry) -> bool:
    return entry.name == "process_name" and bool(DEVICE.fullmatch(str(arguments(entry).get("name"))))


def _fault(entries: Sequence[Entry], wrong: npt.NDArray[np.intp], alone: int) -> str:
    if not len(wrong):
        return f"{alone} events of which only the beginning or the end is there"
    entry = entries[int(wrong[0])]
    return f"{entry.name!r} at {entry.ts} microseconds, which is no time or after its end"


def _paired(entries: Sequence[Entry]) -> tuple[list[int], list[int], int]:
    """Which entry ends what which one began; and how many have no counterpart.

    Neighbours belong together. Where they were parted, an end belongs to the last that began and has not ended.
    """
    begins, ends = [], []
    open_: dict[tuple[object, ...], list[int]] = {}
    alone = 0
    index, count = 0, len(entries)
    while index < count:
        entry = entries[index]
        end = _ENDS.get(entry.ph)
        if end is not None:
            after = entries[index + 1] if index + 1 < count else entry
            if (
                after.ph == end
                and after.name == entry.name
                and after.pid == entry.pid
                and after.tid == entry.tid
            ):
                begins.append(index)
                ends.append(index + 1)
                index += 1
            else:
                open_.setdefault((end, entry.name, entry.pid, entry.tid, entry.id), []).append(index)
        elif entry.ph not in _MARKERS:
            waiting = open_.get((entry.ph, entry.name, entry.pid, entry.tid, entry.id))
            if waiting:
                begins.append(waiting.pop())
                ends.append(index)
            else:
                alone += 1
        index += 1
    return begins, ends, alone + sum(map(len, open_.values()))
