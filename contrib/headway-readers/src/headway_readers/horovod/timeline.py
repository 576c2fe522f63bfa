"""A Horovod timeline as collectives: who asked for each tensor when, and what was done for which tensors at once.

Each tensor stands as a process. It is negotiated: a phase NEGOTIATE_ALLREDUCE with an empty event, named by the rank,
where rank 0 learns of each rank's request. Then it is reduced: a phase ALLREDUCE with phases inside. Tensors whose
outer phases begin directly after each other are fused: they are reduced as one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.ext import Document, damaged
from headway.trace.format import MAX_WORLD_SIZE
from headway_readers.chrome import Entry, arguments, nanoseconds, read_listing

NAMES = {
    "ALLREDUCE": "all_reduce", "ADASUM": "all_reduce", "ALLGATHER": "all_gather", "BROADCAST": "broadcast",
    "ALLTOALL": "all_to_all", "REDUCESCATTER": "reduce_scatter", "BARRIER": "barrier",
}  # fmt: skip
NEGOTIATION = "NEGOTIATE_"
START = "start_time_since_epoch_in_micros"
CYCLE = "CYCLE_START"
_WHOLE_OUTPUT = frozenset(
    {"ALLREDUCE", "ADASUM", "ALLGATHER", "BROADCAST"}
)  # of others the output is a share
_BACKEND = re.compile(r"(NCCL|GLOO|MPI|CCL|DDL)_[A-Z_]*(?:REDUCE|GATHER|BCAST|ALLTOALL|SCATTER)[A-Z]*")
_ITEM_BYTES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2,
    "float32": 4, "float64": 8, "bool": 1,
}  # fmt: skip
_PHASES = frozenset("BEXi")
_RANK = re.compile(r"[0-9]{1,6}")


@dataclass(slots=True)
class Request:
    """One tensor's way through one collective. ``arrival_ns`` is by rank, as far as it is told; -1 is no time."""

    tensor: str
    kind: str  # as Horovod calls it
    negotiated_ns: int = -1  # the first rank had asked for it
    complete_ns: int = -1  # all ranks had
    arrival_ns: dict[int, int] = field(default_factory=dict)
    start_ns: int = -1
    end_ns: int = -1
    size_bytes: int = -1
    backend: str = ""
    depth: int = 0  # phases that are open
    fused: int = -1  # the number of those that are done as one


@dataclass(slots=True)
class Collective:
    """Requests that were answered as one."""

    requests: list[Request]

    @property
    def kind(self) -> str:
        """What was done, as Horovod calls it."""
        return self.requests[0].kind

    @property
    def start_ns(self) -> int:
        """When it began on rank 0."""
        return min(one.start_ns for one in self.requests)

    @property
    def end_ns(self) -> int:
        """When it ended on rank 0."""
        return max(one.end_ns for one in self.requests)


@dataclass(frozen=True, eq=False)
class Timeline:
    """What one document holds, in order. ``begin_ns`` is since 1970, or -1; other times count from it."""

    collectives: list[Collective]
    cycles_ns: np.ndarray[tuple[int], np.dtype[np.int64]]
    begin_ns: int
    unfinished: int
    dropped: int
    notes: tuple[str, ...]


def read_timeline(document: Document) -> Timeline:
    """Decode a timeline. Raises TraceError where it is damaged, unless it is read leniently."""
    listing = read_listing(document)
    entries = [entry for entry in listing.entries if entry.ph in _PHASES]
    times_ns, fits = nanoseconds([entry.ts for entry in entries])
    wrong = int((~fits).sum())
    if wrong and not document.lenient:
        entry = entries[int(np.flatnonzero(~fits)[0])]
        raise damaged(
            document, f"the time {entry.ts!r} of {entry.name or 'an end'!r}", expected="microseconds"
        )
    notes = [*listing.notes, *([f"{wrong} events without a time were left out."] if wrong else [])]
    names, begin_ns = _described(listing.entries)
    reading = _Reading(names)
    for entry, time_ns, fit in zip(entries, times_ns.tolist(), fits.tolist(), strict=True):
        if fit:
            reading.take(entry, time_ns)
    return Timeline(
        collectives=reading.collectives(),
        cycles_ns=times_ns[fits & np.array([e.ph == "i" and e.name == CYCLE for e in entries], dtype=bool)],
        begin_ns=begin_ns,
        unfinished=reading.unfinished,
        dropped=listing.dropped + wrong,
        notes=tuple(notes),
    )


def _described(entries: Sequence[Entry]) -> tuple[dict[object, str], int]:
    """The tensors' names, and when the recording began."""
    names: dict[object, str] = {}
    begin_ns = -1
    for entry in entries:
        if entry.ph == "M" and entry.name == "process_name":
            own = arguments(entry)
            if isinstance(own.get("name"), str):
                names[entry.pid] = own["name"]
            elif isinstance(began_us := own.get(START), int | float):
                (time_ns,), (fits,) = nanoseconds([began_us])
                begin_ns = int(time_ns) if fits else begin_ns
    return names, begin_ns


class _Reading:
    """Follows every tensor through its phases."""

    def __init__(self, names: dict[object, str]) -> None:
        self._names = names
        self._open: dict[object, Request] = {}
        self._ordered: list[list[Request]] = []
        self._closed = True  # whether something was done yet for those that began last
        self.unfinished = 0

    def take(self, entry: Entry, time_ns: int) -> None:
        if entry.ph == "B":
            self._begin(entry, time_ns)
        elif (request := self._open.get(entry.pid)) is None:
            return  # the end of what began before the recording did; or a cycle
        elif entry.ph == "E":
            self._end(request, entry, time_ns)
        elif entry.ph == "X" and request.start_ns < 0 and (0 <= (rank := _rank(entry.name)) < MAX_WORLD_SIZE):
            request.arrival_ns.setdefault(rank, time_ns)

    def _begin(self, entry: Entry, time_ns: int) -> None:
        request = self._open.get(entry.pid)
        tensor = self._names.get(entry.pid, f"tensor {entry.pid}")
        if entry.name.startswith(NEGOTIATION):
            self._lose(request)
            kind = entry.name.removeprefix(NEGOTIATION)
            self._open[entry.pid] = Request(tensor, kind, negotiated_ns=time_ns, depth=1)
        elif request is None or request.start_ns < 0:
            if request is None or request.kind != entry.name:
                self._lose(request)
                request = self._open[entry.pid] = Request(tensor, entry.name)
            request.start_ns, request.depth = time_ns, 1
            self._fuse(request)
        else:
            request.depth += 1
            self._closed = True
            if found := _BACKEND.match(entry.name):
                request.backend = found[1].lower()

    def _fuse(self, request: Request) -> None:
        if self._closed or self._ordered[-1][0].kind != request.kind:
            self._ordered.append([])
            self._closed = False
        request.fused = len(self._ordered) - 1
        self._ordered[-1].append(request)

    def _end(self, request: Request, entry: Entry, time_ns: int) -> None:
        request.depth -= 1
        if request.depth > 0:
            return
        if request.start_ns < 0:
            request.complete_ns = time_ns
            if request.kind != "BARRIER":
                return
            request.start_ns = time_ns  # nothing follows
            self._ordered.append([request])
            self._closed = True
        request.end_ns = time_ns
        request.size_bytes = _size_bytes(request.kind, entry)
        self._closed |= request.fused == len(self._ordered) - 1
        self._open.pop(entry.pid)

    def _lose(self, request: Request | None) -> None:
        self.unfinished += request is not None

    def collectives(self) -> list[Collective]:
        """What was begun and ended and is a collective, by when it began."""
        self.unfinished += len(self._open)
        ended = [[one for one in fused if one.end_ns >= one.start_ns] for fused in self._ordered]
        found = [Collective(requests) for requests in ended if requests and requests[0].kind in NAMES]
        return sorted(found, key=lambda one: one.start_ns)


def _rank(name: str) -> int:
    return int(name) if _RANK.fullmatch(name) else -1


def _size_bytes(kind: str, entry: Entry) -> int:
    own = arguments(entry)
    dtype, shape = own.get("dtype"), own.get("shape")
    item_bytes = _ITEM_BYTES.get(dtype, -1) if isinstance(dtype, str) else -1
    if kind not in _WHOLE_OUTPUT or item_bytes < 0 or not isinstance(shape, str) or len(shape) > 400:
        return -1
    size_bytes = item_bytes
    for extent in re.findall(r"\d{1,18}", shape):
        size_bytes = min(size_bytes * int(extent), 2**62)
    return size_bytes if size_bytes < 2**62 else -1
