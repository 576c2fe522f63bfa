"""A Kineto document as columns. Only what is used is decoded: most of a document is call stacks and shapes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headway.arrays import Ints, Texts
from headway.errors import TraceError
from headway.interop.readers.foreign import MAX_EVENTS, Document, damaged
from headway.interop.readers.kineto.entries import (
    LONGEST_NS,
    Arguments,
    Correlation,
    Entry,
    Head,
    decode,
    salvage,
)
from headway.trace.events import texts

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = (
    "cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "xpu_driver", "mtia_runtime", "privateuse1_runtime",
    "privateuse1_driver",
)  # fmt: skip
OPERATIONS = ("cpu_op", "user_annotation", "Operator", "operator")
_CODES = {category: code for code, category in enumerate((*DEVICE, *LAUNCHES, *OPERATIONS))}
_CODES |= {  # as Kineto called them in 2021
    "Kernel": _CODES["kernel"], "Memcpy": _CODES["gpu_memcpy"], "Memset": _CODES["gpu_memset"],
    "Runtime": _CODES["cuda_runtime"],
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class KinetoDocument:
    """The events of a document that are used, as columns ordered by start; times in nanoseconds.

    What Python functions did, what the profiler did itself and what merely joins two others with an arrow is left out.
    """

    head: Head
    category: npt.NDArray[np.uint8]  # see ``of_category``
    names: Texts  # the distinct ones
    name_number: npt.NDArray[np.intp]  # which of ``names``
    start_ns: Ints
    duration_ns: Ints
    entries: npt.NDArray[np.object_]
    dropped: int
    notes: tuple[str, ...]
    _numbers: dict[Any, int] = field(default_factory=dict)

    @cached_property
    def end_ns(self) -> Ints:
        """When each event ended."""
        ends: Ints = self.start_ns + self.duration_ns
        return ends

    @cached_property
    def name(self) -> Texts:
        """What each event is called."""
        return self.names[self.name_number]

    def __len__(self) -> int:
        return len(self.start_ns)

    def threads(self, indices: npt.NDArray[np.intp]) -> Ints:
        """A number for the process and thread of each of some events, the same whenever it is asked."""
        places: list[Any] = list(map(_PLACE, self.entries[indices]))
        numbers = self._numbers
        try:
            for place in dict.fromkeys(places):
                numbers.setdefault(place, len(numbers))
        except TypeError:  # a thread that is a list
            places = [str(place) for place in places]
            for place in dict.fromkeys(places):
                numbers.setdefault(place, len(numbers))
        return np.fromiter(map(numbers.__getitem__, places), np.int64, len(places))

    def processes(self) -> dict[str, npt.NDArray[np.intp]]:
        """The events of each process that took part in a merged document, by its label.

        Tools that merge ranks put a label before the process: "[TP00-DP00] 1". Where there is none all are of one.
        """
        labels: dict[str, list[int]] = {}
        for index, entry in enumerate(self.entries.tolist()):
            found = _LABEL.match(entry.pid) if isinstance(entry.pid, str) else None
            labels.setdefault(found[1] if found else "", []).append(index)
        return {label: np.array(rows, dtype=np.intp) for label, rows in sorted(labels.items())}

    def where(self, indices: npt.NDArray[np.intp]) -> KinetoDocument:
        """The events at ``indices``, in their order."""
        return replace(
            self,
            category=self.category[indices],
            name_number=self.name_number[indices],
            start_ns=self.start_ns[indices],
            duration_ns=self.duration_ns[indices],
            entries=self.entries[indices],
            _numbers={},
        )

    def of_category(self, *categories: str) -> npt.NDArray[np.intp]:
        """The indices of the events of these categories, in order of their start."""
        found = np.zeros(len(self), dtype=bool)
        for category in categories:
            found |= self.category == _CODES[category]
        return np.flatnonzero(found)

    def called(self, indices: npt.NDArray[np.intp], wanted: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
        """Which of some events have a name that is ``wanted``; each distinct one is asked about once."""
        known = np.fromiter(map(wanted, self.names.tolist()), np.bool_, len(self.names))
        picked: npt.NDArray[np.bool_] = known[self.name_number[indices]]
        return picked

    def of_device(self, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of some events a device spent its time on."""
        on_device: npt.NDArray[np.bool_] = self.category[indices] < len(DEVICE)
        return on_device

    def arguments(self, indices: npt.NDArray[np.intp]) -> list[Arguments]:
        """The arguments of some events; those that cannot be read are empty."""
        return self._decoded(Arguments, indices)

    def correlations(self, indices: npt.NDArray[np.intp]) -> list[int]:
        """What joins calls and kernels, of some events; -1 where it is missing."""
        found = [own.correlation for own in self._decoded(Correlation, indices)]
        return [one if one.__class__ is int else -1 for one in found]

    def _decoded(self, kind: type[_Struct], indices: npt.NDArray[np.intp]) -> list[_Struct]:
        entries, decode = self.entries[indices], msgspec.json.Decoder(kind).decode
        try:
            return list(map(decode, map(_ARGS, entries)))
        except (ValueError, RecursionError):
            return [_one_decoded(kind, entry.args) for entry in entries]


_LABEL = re.compile(r"^\[([^\[\]]{1,100})\]\s*\d+$")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_PLACE, _ARGS = attrgetter("pid", "tid"), attrgetter("args")


def _one_decoded(kind: type[_Struct], raw: msgspec.Raw) -> _Struct:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError):
        return kind()


def parse(document: Document) -> KinetoDocument:
    """Decode a Kineto document.

    Raises TraceError for what is damaged, unless it is read leniently: then what can be kept is.
    """
    notes = []
    dropped = 0
    if document.ending and not document.lenient:
        raise damaged(document, document.ending)
    try:
        head, entries = decode(document.data)
    except (ValueError, RecursionError) as failure:
        if not document.lenient:
            raise damaged(document, failure, expected="a whole Kineto document") from None
        head, entries, dropped = salvage(document.data)
        notes.append("The document is damaged: what could be read of it was kept.")
    if len(entries) > MAX_EVENTS:
        raise TraceError(
            f"{document.name} is too large",
            got=f"{len(entries)} events",
            expected=f"at most {MAX_EVENTS}",
        )
    return _columns(document, head, _used(entries), dropped, notes)


def _used(entries: Sequence[Entry]) -> list[Entry]:
    try:
        return [entry for entry in entries if entry.cat in _CODES and entry.ph == "X"]
    except TypeError:  # a category that is a list
        return [
            entry
            for entry in entries
            if isinstance(entry.cat, str) and entry.cat in _CODES and entry.ph == "X"
        ]


@contextmanager
def no_collections() -> Iterator[None]:
    """A context without collections: of a million new objects the collector would look through all again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _columns(
    document: Document, head: Head, entries: list[Entry], dropped: int, notes: list[str]
) -> KinetoDocument:
    start_ns, start_fits = nanoseconds(list(map(attrgetter("ts"), entries)))
    duration_ns, duration_fits = nanoseconds(list(map(attrgetter("dur"), entries)))
    fits = start_fits & duration_fits & (duration_ns >= 0)
    if not fits.all():
        if not document.lenient:
            wrong = entries[int(np.flatnonzero(~fits)[0])]
            raise damaged(
                document,
                f"an event with ts {wrong.ts!r:.40} and dur {wrong.dur!r:.40}",
                expected="microseconds, dur not negative",
            )
        dropped += int((~fits).sum())
        notes.append(f"{int((~fits).sum())} events without a possible time were left out.")
    order = np.flatnonzero(fits)
    order = order[np.argsort(start_ns[order], kind="stable")]
    count = len(entries)
    category = np.fromiter(map(_CODES.__getitem__, map(attrgetter("cat"), entries)), np.uint8, count)
    names, name_number = _numbered(list(map(attrgetter("name"), entries)))
    return KinetoDocument(
        head=head,
        category=category[order],
        names=names,
        name_number=name_number[order],
        start_ns=start_ns[order] + head.base_ns,
        duration_ns=duration_ns[order],
        entries=texts(entries)[order],
        dropped=dropped,
        notes=tuple(notes),
    )


def nanoseconds(microseconds: list[Any]) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Times in nanoseconds, to the last digit that is given; and which of them are times at all."""
    try:
        values = np.array(microseconds, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        values = np.array([_number(value) for value in microseconds], dtype=np.float64)
    fits = np.isfinite(values) & (np.abs(values) < LONGEST_NS / 1000)
    values = np.where(fits, values, 0.0)
    whole = np.floor(values)
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64), fits


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _numbered(names: list[Any]) -> tuple[Texts, npt.NDArray[np.intp]]:
    """The distinct names, as texts, and the number of each."""
    try:
        distinct = dict.fromkeys(names)
    except TypeError:  # a name that is a list
        distinct = {None: None}
    if any(kind is not str for kind in set(map(type, distinct))):
        names = [name if isinstance(name, str) else str(name)[:200] for name in names]
        distinct = dict.fromkeys(names)
    number = {name: index for index, name in enumerate(distinct)}
    return texts(list(number)), np.fromiter(map(number.__getitem__, names), np.intp, len(names))
