"""What a profile of TensorFlow or JAX holds, as columns: what its binary form and its JSON form are both read into."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from headway.arrays import Flags, Ints
from headway.ext import MAX_EVENTS, Document, TraceError, damaged
from headway_readers.xplane.programs import LONGEST_PATH, Programs

LONGEST_TEXT = LONGEST_PATH  # characters of a name that are kept
FARTHEST_NS = 2**61
LONGEST_NS = 30 * 86_400 * 1_000_000_000  # of one event, and of a recording
DEVICE = re.compile(r"^/device:(?:GPU|TPU|ROCM|XPU)\D*(\d{1,6})")
INT64 = 2**63

# What is looked at of what a profile says of its events.
NUMBERS = frozenset(
    {
        "step_num", "run_id", "device_ordinal", "global_device_id", "replica", "partition", "num_replicas",
        "num_partitions", "instance_key", "group_key", "group_size", "step_id", "id", "correlation_id", "program_id",
    }
)  # fmt: skip
TEXTS = frozenset(
    {
        "hlo_op", "hlo_module", "name", "tf_op", "annotation", "kernel_type", "device", "shape", "tf_function_call",
        "eager_op",
    }
)  # fmt: skip

# Events of these names are many and say nothing that is looked at: Python's stack, allocations, hand-overs.
UNUSED = (
    "$", "ThreadpoolListener::", "MemoryAllocation", "MemoryDeallocation", "end: ", "Wait for ", "PythonRefManager::",
    "ExecutorPropagateOutputs", "Iterator::", "PrefetchProduce", "PrefetchConsume", "Rendezvous", "InvokeRendezvous",
    "ParallelFor", "ThunkExecutor::", "TFE_DeleteTensorHandle",
)  # fmt: skip


class Line(NamedTuple):
    """A row of a profile: a thread of the host, or a queue of a device."""

    plane: str  # "/host:CPU", "/device:GPU:0"
    name: str


@dataclass(frozen=True, eq=False)
class Profile:
    """The events that take time, ordered by line, start and length. Names and texts are numbers into ``strings``.

    Times are nanoseconds: since 1970 where ``absolute``, else since the recording began.
    """

    source: str
    lines: Sequence[Line]
    strings: Sequence[str]
    line: Ints
    name: Ints
    start_ns: Ints
    duration_ns: Ints
    sparse: dict[str, tuple[Ints, Ints]]  # of each of NUMBERS and TEXTS: events, and their values
    programs: Programs = field(default_factory=Programs)
    devices: int = 0  # planes of devices, whether or not these did anything
    host: str = ""
    version: str = ""  # of JAX
    absolute: bool = False
    dropped: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Ints:
        """When each event ended."""
        ends: Ints = self.start_ns + self.duration_ns
        return ends

    def value(self, key: str) -> tuple[Ints, Flags]:
        """What is said under ``key`` of each event (a text's place in ``strings``), and of which it is said."""
        if key not in self._values:
            values = np.zeros(len(self), dtype=np.int64)
            known = np.zeros(len(self), dtype=bool)
            if key in self.sparse:
                events, said = self.sparse[key]
                values[events], known[events] = said, True
            self._values[key] = values, known
        return self._values[key]

    @cached_property
    def _values(self) -> dict[str, tuple[Ints, Flags]]:
        return {}

    def named(self, *prefixes: str) -> Flags:
        """Which events have a name that begins with one of ``prefixes``."""
        fits = np.array([text.startswith(prefixes) for text in self.strings], dtype=bool)
        return fits[self.name] if len(fits) else np.zeros(len(self), dtype=bool)

    def on(self, lines: Sequence[int]) -> Flags:
        """Which events lie on ``lines``."""
        return np.isin(self.line, np.array(lines, dtype=np.int64))

    def of_lines(self, lines: Sequence[int]) -> Ints:
        """The places of the events on ``lines``, in order."""
        wanted = np.array(sorted(lines), dtype=np.int64)
        begin, end = (np.searchsorted(self.line, wanted, side=side) for side in ("left", "right"))
        parts = [np.arange(*each) for each in zip(begin.tolist(), end.tolist(), strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class Builder:
    """Gathers a document's events. What cannot be is refused, or counted where the document is lenient."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._lines: dict[Line, int] = {}
        self._strings: dict[str, int] = {}
        self.line: list[int] = []
        self.name: list[int] = []
        self.start_ns: list[int] = []
        self.duration_ns: list[int] = []
        self.sparse: dict[str, tuple[list[int], list[int]]] = {key: ([], []) for key in NUMBERS | TEXTS}
        self.devices: set[str] = set()
        self.dropped = 0
        self.notes: list[str] = []

    def line_of(self, plane: str, name: str) -> int:
        """The number of a line."""
        line = Line(plane[:LONGEST_TEXT], name[:LONGEST_TEXT])
        return self._lines.setdefault(line, len(self._lines))

    def string(self, text: str) -> int:
        """The number of a text."""
        place = self._strings.get(text)
        if place is None:
            kept = text[:LONGEST_TEXT].encode("utf-8", "replace").decode()
            place = self._strings.setdefault(kept, len(self._strings))
        return place

    def say(self, key: str, value: object) -> None:
        """Note what is said of the event that is added next. What is no number where one is due is not noted."""
        known = whole(value) if key in NUMBERS else self.string(value) if isinstance(value, str) else None
        if known is not None:
            events, values = self.sparse[key]
            events.append(len(self.start_ns))
            values.append(known)

    def add(self, line: int, name: int, start_ns: int, end_ns: int) -> None:
        """Add an event."""
        self.line.append(line)
        self.name.append(name)
        self.start_ns.append(start_ns)
        self.duration_ns.append(end_ns - start_ns)

    def refuse(self, what: object, expected: str = "") -> None:
        """Something of the document cannot be: raise TraceError, or count it where the document is lenient."""
        if not self._document.lenient:
            raise damaged(self._document, what, expected=expected)
        self.dropped += 1

    def build(self, **others: object) -> Profile:
        """The profile of what was added. Raises TraceError where that is nothing, or too much."""
        count = len(self.start_ns)
        if count > MAX_EVENTS:
            raise TraceError(
                f"{self._document.name} is too large", got=f"{count} events", expected=f"at most {MAX_EVENTS}"
            )
        if not count:
            raise TraceError(
                f"{self._document.name} holds no events",
                got=f"{self.dropped} that cannot be read" if self.dropped else "nothing that takes time",
                expected="a recording of TensorFlow's or JAX's profiler",
                fix="Record again.",
            )
        line, name, start, duration = (
            np.array(column, dtype=np.int64)
            for column in (self.line, self.name, self.start_ns, self.duration_ns)
        )
        order = np.lexsort((-duration, start, line))
        place = np.empty(count, dtype=np.int64)
        place[order] = np.arange(count)
        if self.dropped:
            self.notes.append(f"{self.dropped} events or parts could not be read and were left out.")
        return Profile(
            source=self._document.name,
            lines=list(self._lines),
            strings=list(self._strings),
            line=line[order],
            name=name[order],
            start_ns=start[order],
            duration_ns=duration[order],
            sparse={
                key: (place[np.array(events, dtype=np.int64)], np.array(values, dtype=np.int64))
                for key, (events, values) in self.sparse.items()
                if events
            },
            devices=len(self.devices),
            dropped=self.dropped,
            notes=tuple(self.notes),
            **others,  # type: ignore[arg-type]
        )


def whole(value: object) -> int | None:
    """A whole number of 64 bits, which may be written as a text; None of everything else."""
    if isinstance(value, str) and len(value) <= 20:
        try:
            value = int(value)
        except ValueError:
            return None
    return (
        value if isinstance(value, int) and not isinstance(value, bool) and -INT64 <= value < INT64 else None
    )
