"""Decodes a Kineto document into columns, skipping what Headway does not use: most of it is call stacks and shapes."""

from __future__ import annotations

import gc
import json
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
from headway.trace.events import texts

LONGEST_NS = 2**61  # half of what fits, so that a base time can be added
_NOT_JSON = re.compile(rb"([:\[,]\s*)-?(?:NaN|Infinity)(?=\s*[,\]}])")


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """The used fields of an event's ``args``; untyped, because Kineto's types vary."""

    correlation: Any = None
    stream: Any = None
    record_function: Any = msgspec.field(name="Record function id", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_numel: Any = msgspec.field(name="In msg nelems", default=None)
    out_numel: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = None
    group: Any = msgspec.field(name="Process Group Name", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    sequence: Any = msgspec.field(name="Seq", default=None)
    source: Any = msgspec.field(name="Src Rank", default=None)
    target: Any = msgspec.field(name="Dst Rank", default=None)
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    concrete: Any = msgspec.field(name="Concrete Inputs", default=None)


class Correlation(msgspec.Struct, frozen=True, gc=False):
    """The id that joins a runtime call and the kernel that it launched."""

    correlation: Any = None


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One of ``traceEvents``."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class ProcessGroup(msgspec.Struct, frozen=True):
    """One of ``pg_config``."""

    name: Any = msgspec.field(name="pg_name", default=None)
    description: Any = msgspec.field(name="pg_desc", default=None)
    ranks: Any = None


class Distributed(msgspec.Struct, frozen=True):
    """``distributedInfo``."""

    backend: Any = None
    rank: Any = None
    world_size: Any = None
    pg_config: list[ProcessGroup] = []


class Head(msgspec.Struct, frozen=True):
    """The fields next to ``traceEvents``."""

    raw_distributed: msgspec.Raw = msgspec.field(name="distributedInfo", default=msgspec.Raw(b"null"))
    base: Any = msgspec.field(name="baseTimeNanoseconds", default=0)
    host: Any = msgspec.field(name="host_name", default="")
    raw_devices: msgspec.Raw = msgspec.field(name="deviceProperties", default=msgspec.Raw(b"null"))

    @property
    def base_ns(self) -> int:
        """The origin of the events' times, in nanoseconds since 1970; 0 if not stated."""
        return self.base if isinstance(self.base, int) and abs(self.base) < LONGEST_NS else 0

    @property
    def device(self) -> str:
        """The name of the first device, or ""."""
        try:
            devices = msgspec.json.decode(self.raw_devices)
        except (ValueError, RecursionError):
            return ""
        first = devices[0] if isinstance(devices, list) and devices else None
        name = first.get("name") if isinstance(first, dict) else None
        return name if isinstance(name, str) else ""

    @property
    def distributed(self) -> Distributed:
        """``distributedInfo``, as far as it is readable."""
        try:
            return msgspec.json.decode(self.raw_distributed, type=Distributed | None) or Distributed()
        except (ValueError, RecursionError):
            return Distributed()


class _Document(Head, frozen=True):
    events: list[Entry] = msgspec.field(name="traceEvents", default=[])


def decode(data: bytes) -> tuple[Head, Sequence[Entry]]:
    """Decode a document: an object with its events, or a bare list. Also accepts NaN, which Kineto writes."""
    try:
        return _decode_json(data)
    except msgspec.DecodeError:
        finite, count = _NOT_JSON.subn(rb"\1null", data)
        if not count:
            raise
        return _decode_json(finite)


def _decode_json(data: bytes) -> tuple[Head, Sequence[Entry]]:
    if data[:64].lstrip()[:1] == b"[":
        return Head(), msgspec.json.decode(data, type=list[Entry])
    decoded = msgspec.json.decode(data, type=_Document)
    return decoded, decoded.events


_START = b'"traceEvents"'
_ENTRY = msgspec.json.Decoder(Entry)
# The budget for salvaging a damaged document, in scanned characters: a multiple of its length, or this minimum.
_RESCANS, _LEAST_BUDGET = 8, 20_000_000
_DEEP_COST = 100_000  # charged for endless nesting or numbers
_PLACE_SHARE = (
    64  # on failure the decoder counts lines from the beginning, this many times as fast as it scans
)


def salvage(data: bytes) -> tuple[Head, list[Entry], int]:
    """Decode the events of a damaged document one by one; also counts the unreadable stretches."""
    begin = data.find(_START)
    if begin < 0:
        return Head(), [], 0
    text = data[begin + len(_START) :].decode(errors="replace")
    decoder = json.JSONDecoder()
    entries: list[Entry] = []
    budget = _RESCANS * len(text) + _LEAST_BUDGET
    broken, position = 0, text.find("{")
    while position >= 0 and len(entries) <= MAX_EVENTS and budget > 0:
        try:
            value, end = decoder.raw_decode(text, position)
            entries.append(_ENTRY.decode(msgspec.json.encode(value)))  # turns NaN into null
        except json.JSONDecodeError as failure:
            broken += 1
            end = position + 1
            budget -= failure.pos - position + failure.pos // _PLACE_SHARE
        except (ValueError, RecursionError):  # thousands of digits or of nested brackets
            broken += 1
            end = position + 1
            budget -= _DEEP_COST
        position = text.find("{", end)
    return _head(data[:begin]), entries, broken


def _head(before: bytes) -> Head:
    """The fields before the events, if they are intact."""
    try:
        return msgspec.json.decode(before.rstrip().rstrip(b",") + b"}", type=Head)
    except (ValueError, RecursionError):
        return Head()


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
    """The used events of a document as columns, ordered by start; times in nanoseconds.

    Python functions, the profiler's own overhead and flow arrows are left out.
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
        """The name of each event."""
        return self.names[self.name_number]

    def __len__(self) -> int:
        return len(self.start_ns)

    def threads(self, indices: npt.NDArray[np.intp]) -> Ints:
        """A number for the process and thread of each given event; the same in every call."""
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
        """The events of each process of a merged document, by its label.

        Tools that merge ranks label each process, as in "[TP00-DP00] 1". Unlabelled events form one process, "".
        """
        labels: dict[str, list[int]] = {}
        for index, entry in enumerate(self.entries.tolist()):
            match = _LABEL.match(entry.pid) if isinstance(entry.pid, str) else None
            labels.setdefault(match[1] if match else "", []).append(index)
        return {label: np.array(rows, dtype=np.intp) for label, rows in sorted(labels.items())}

    def where(self, indices: npt.NDArray[np.intp]) -> KinetoDocument:
        """The events at ``indices``."""
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
        """The indices of the events of these categories, ordered by start."""
        matches = np.zeros(len(self), dtype=bool)
        for category in categories:
            matches |= self.category == _CODES[category]
        return np.flatnonzero(matches)

    def called(self, indices: npt.NDArray[np.intp], wanted: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
        """A mask of the events whose name is ``wanted``, which is called once per distinct name."""
        is_wanted = np.fromiter(map(wanted, self.names.tolist()), np.bool_, len(self.names))
        picked: npt.NDArray[np.bool_] = is_wanted[self.name_number[indices]]
        return picked

    def of_device(self, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """A mask of the events that ran on a device."""
        on_device: npt.NDArray[np.bool_] = self.category[indices] < len(DEVICE)
        return on_device

    def arguments(self, indices: npt.NDArray[np.intp]) -> list[Arguments]:
        """The arguments of the given events; empty if unreadable."""
        return self._decoded(Arguments, indices)

    def correlations(self, indices: npt.NDArray[np.intp]) -> list[int]:
        """The correlation ids of the given events; -1 if missing."""
        values = [arguments.correlation for arguments in self._decoded(Correlation, indices)]
        return [value if value.__class__ is int else -1 for value in values]

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

    Raises TraceError if it is damaged; a lenient document is salvaged instead.
    """
    notes = []
    dropped = 0
    if document.ending and not document.lenient:
        raise damaged(document, document.ending)
    try:
        head, entries = decode(document.data)
    except (ValueError, RecursionError) as failure:
        if not document.lenient:
            raise damaged(document, failure, expected="a complete Kineto document") from None
        head, entries, dropped = salvage(document.data)
        notes.append("The document is damaged: only its readable events were kept.")
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
    """Disable garbage collection in the block: it would scan millions of new objects again and again."""
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
                expected="times in microseconds, and dur of at least 0",
            )
        dropped += int((~fits).sum())
        notes.append(f"{int((~fits).sum())} events with impossible times were left out.")
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
    """Convert to integer nanoseconds without losing digits; also a mask of valid times."""
    try:
        values = np.array(microseconds, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        values = np.array([_number(value) for value in microseconds], dtype=np.float64)
    fits = np.isfinite(values) & (np.abs(values) < LONGEST_NS / 1000)
    values = np.where(fits, values, 0.0)
    whole_us = np.floor(values)
    return whole_us.astype(np.int64) * 1000 + np.rint((values - whole_us) * 1000).astype(np.int64), fits


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _numbered(names: list[Any]) -> tuple[Texts, npt.NDArray[np.intp]]:
    """The distinct names, and for each event the index of its name."""
    try:
        distinct = dict.fromkeys(names)
    except TypeError:  # a name that is a list
        distinct = {None: None}
    if any(kind is not str for kind in set(map(type, distinct))):
        names = [name if isinstance(name, str) else str(name)[:200] for name in names]
        distinct = dict.fromkeys(names)
    number = {name: index for index, name in enumerate(distinct)}
    return texts(list(number)), np.fromiter(map(number.__getitem__, names), np.intp, len(names))
