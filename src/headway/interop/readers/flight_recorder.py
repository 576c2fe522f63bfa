"""Reads JSON dumps of PyTorch's flight recorder: each rank's collectives with group, size and launch time.

Unlike the profiler it records group names and sequence numbers, for Gloo too. It lacks the run times of Gloo's
collectives, and all of Gloo's messages. Its default dump is a pickle, which is never opened.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headway.arrays import Ints, Texts
from headway.errors import TraceError
from headway.interop.readers.foreign import MAX_EVENTS, Companion, Document, Reading, damaged
from headway.interop.readers.ranks import rank_in_name
from headway.interop.readers.torch_json import (
    MESSAGES,
    UNREADABLE,
    bounded_int,
    ints,
    item_bytes,
    member,
    plain_name,
    ranks_of,
    salvaged,
)
from headway.trace.events import texts

LACKS = "A flight recorder lists launches, not run times: import it together with the Kineto trace of the same rank."

_OWN_KEYS = (b'"pg_status"', b'"nccl_comm_state"', b'"comm_lib_version"', b'"nccl_version"')
_PICKLED_KEYS = (b"pg_config", b"pg_status", b"nccl_comm_state", b"collective_seq_id", b"profiling_name")
_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_LAST_NUMBER = re.compile(r"(?<!\d)(\d{1,6})(?:\.json)?(?:\.gz)?$")
_ITEM = re.compile(r'\{\s*"(?:collective_seq_id|record_id|frames|pg_id|duration_ms)"\s*:')
_OPERATION = re.compile(r"^(?:[\w.]+:)?(\w+)(?:\s+(\d{1,7})\s*(?:->|<-)\s*(\d{1,7}))?$")


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedCommunication:
    """One rank's launches as columns: one row per collective or message, in launch order.

    ``size_bytes`` is the whole tensor's. "" and -1 mean unknown.
    """

    group: Texts
    description: Texts  # the group's description
    sequence: Ints  # its index in its group, equal on all members; messages are counted separately
    operation: Ints  # counts the group's launches, messages and parts of coalesced operations included
    name: Texts  # as torch.distributed calls it; Gloo records a reduce_scatter as an all_reduce
    dtype: Texts
    size_bytes: Ints
    created_ns: Ints  # launch time on the host's wall clock
    message: npt.NDArray[np.bool_]  # whether it is a send or receive
    peer: Ints  # a message's other end: its rank if the group's ranks are known, else its index in the group
    groups: dict[str, tuple[int, ...]]  # process groups' ranks, if known (not for Gloo)
    dropped: int = 0  # unreadable entries
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.created_ns)


class _Entry(msgspec.Struct, frozen=True, gc=False):
    process_group: Any = None
    collective_seq_id: Any = None
    p2p_seq_id: Any = None
    op_id: Any = None
    profiling_name: Any = None
    input_sizes: Any = None
    output_sizes: Any = None
    input_dtypes: Any = None
    output_dtypes: Any = None
    time_created_ns: Any = None
    is_p2p: Any = None


class _Document(msgspec.Struct, frozen=True):
    entries: list[msgspec.Raw] = []
    pg_config: Any = None
    pg_status: Any = None


class _Row(NamedTuple):
    """One entry. ``own_place`` and ``peer_place`` are the indices of a message's ends in the group."""

    group: str
    description: str
    sequence: int
    operation: int
    name: str
    dtype: str
    size_bytes: int
    created_ns: int
    message: bool
    own_place: int
    peer_place: int


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is a flight-recorder dump: JSON, or the pickle that :func:`read` refuses."""
    if head.startswith(_PICKLE):
        return any(key in head for key in _PICKLED_KEYS)
    if head.lstrip()[:1] != b"{" or b'"traceEvents"' in head:
        return False
    return b'"profiling_name"' in head or (b'"pg_config"' in head and any(key in head for key in _OWN_KEYS))


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read a rank's launches. Raises TraceError if the dump is a pickle or damaged."""
    if document.data.startswith(_PICKLE):
        raise TraceError(
            f"{document.name} is a pickle, which is never opened because it can execute code",
            expected="the flight recorder's dump as JSON",
            fix='Write JSON with open(path, "wb").write(torch._C._distributed_c10d._dump_fr_trace_json()), '
            "or _dump_nccl_trace_json() under NCCL.",
        )
    entries, groups, dropped = _entries(document)
    rows = []
    for entry in entries:
        row = _row(entry, groups)
        if row is not None:
            rows.append(row)
        elif document.lenient:
            dropped += 1
        else:
            raise damaged(document, f"an entry {_shown(entry)}", expected="a group, a name, and a time")
    notes = [f"{document.name} is damaged: {dropped} entries could not be read."] if dropped else []
    notes += [f"{document.name}: {document.ending}"] if document.ending else []
    content = _columns(rows, groups, dropped, tuple(notes))
    rank = rank_in_name(document.name)
    rank = _own_rank(rows, groups) if rank is None else rank
    if rank is None and (last := _LAST_NUMBER.search(document.name)):
        rank = int(last[1])
    return Reading(companions=[Companion(document.name, "flight_recorder", rank, content)])


def _entries(document: Document) -> tuple[list[_Entry], dict[str, tuple[int, ...]], int]:
    """The entries, the groups' ranks, and the number of unreadable entries."""
    if document.ending and not document.lenient:
        raise damaged(document, document.ending)
    try:
        whole_document = msgspec.json.decode(document.data, type=_Document)
    except UNREADABLE as failure:
        if not document.lenient:
            raise damaged(document, failure, expected="a complete dump of the flight recorder") from None
        entries, dropped = salvaged(document.data, b'"entries"', _ITEM, _entry_of)
        return entries, {}, dropped
    if len(whole_document.entries) > MAX_EVENTS:
        raise damaged(document, f"{len(whole_document.entries)} entries", expected=f"at most {MAX_EVENTS}")
    decoder = msgspec.json.Decoder(_Entry)
    entries, dropped = [], 0
    for raw in whole_document.entries:
        try:
            entries.append(decoder.decode(raw))
        except UNREADABLE as failure:
            if not document.lenient:
                raise damaged(document, failure, expected="entries of the flight recorder") from None
            dropped += 1
    return entries, _groups(whole_document.pg_config), dropped


def _entry_of(value: Any) -> _Entry | None:
    return msgspec.convert(value, _Entry) if isinstance(value, dict) and "profiling_name" in value else None


def _groups(stated: object) -> dict[str, tuple[int, ...]]:
    groups = {}
    for name, group in stated.items() if isinstance(stated, dict) else ():
        ranks = ranks_of(group.get("ranks")) if isinstance(group, dict) and isinstance(name, str) else ()
        if ranks:
            groups[name] = ranks
    return groups


def _shown(entry: _Entry) -> str:
    return (
        f"{entry.profiling_name!r:.60} of group {entry.process_group!r:.60} at {entry.time_created_ns!r:.40}"
    )


def _row(entry: _Entry, groups: dict[str, tuple[int, ...]]) -> _Row | None:
    """An entry's row, or None if it lacks a required field."""
    named = _OPERATION.match(entry.profiling_name) if isinstance(entry.profiling_name, str) else None
    group, created_ns = entry.process_group, bounded_int(entry.time_created_ns)
    if named is None or created_ns < 0 or not isinstance(group, list) or not group:
        return None
    name = plain_name(named[1])
    message = name in MESSAGES or entry.is_p2p is True
    sequence = bounded_int(entry.p2p_seq_id if message else entry.collective_seq_id)
    if sequence < 0 or not all(isinstance(text, str) for text in group[:2]):
        return None
    dtypes = [
        types for types in (entry.input_dtypes, entry.output_dtypes) if isinstance(types, list) and types
    ]
    return _Row(
        group=group[0],
        description=group[1] if len(group) > 1 else "",
        sequence=sequence,
        operation=bounded_int(entry.op_id),
        name=name,
        dtype=dtypes[0][0] if dtypes and isinstance(dtypes[0][0], str) else "",
        size_bytes=_size_bytes(name, entry, len(groups.get(group[0], ()))),
        created_ns=created_ns,
        message=message,
        own_place=int(named[2] or -1),
        peer_place=int(named[3] or -1),
    )


def _size_bytes(name: str, entry: _Entry, members: int) -> int:
    """The whole tensor's size. In a gather or scatter only the root records it; other ranks record their share."""
    if name == "barrier":
        return 0
    input_bytes = _bytes(entry.input_sizes, entry.input_dtypes)
    output_bytes = _bytes(entry.output_sizes, entry.output_dtypes or entry.input_dtypes)
    if name in ("gather", "scatter") and min(input_bytes, output_bytes) <= 0:
        return (
            max(input_bytes, output_bytes) * members if members and max(input_bytes, output_bytes) > 0 else -1
        )
    return max(input_bytes, output_bytes)


def _bytes(shapes: Any, dtypes: Any) -> int:
    """The total size of tensors of these shapes and types; -1 if any is missing or unreadable."""
    if not isinstance(shapes, list) or not isinstance(dtypes, list) or not shapes or not dtypes:
        return -1
    total = 0
    for index, shape in enumerate(shapes):
        element_bytes = item_bytes(dtypes[min(index, len(dtypes) - 1)])
        if (
            element_bytes < 0
            or not isinstance(shape, list)
            or any(bounded_int(dim, 2**40) < 0 for dim in shape[:16])
        ):
            return -1
        total += prod(shape[:16]) * element_bytes
    return total if total <= 2**62 else -1


def _own_rank(rows: Sequence[_Row], groups: dict[str, tuple[int, ...]]) -> int | None:
    """This rank as its messages name it ("send 1->2"); None if ambiguous or the groups' ranks are unknown."""
    claims = Counter(
        groups[row.group][row.own_place]
        for row in rows
        if 0 <= row.own_place < len(groups.get(row.group, ()))
    )
    return next(iter(claims)) if len(claims) == 1 else None


def _columns(
    rows: list[_Row], groups: dict[str, tuple[int, ...]], dropped: int, notes: tuple[str, ...]
) -> LaunchedCommunication:
    rows = sorted(rows, key=lambda row: row.created_ns)
    return LaunchedCommunication(
        group=texts([row.group for row in rows]),
        description=texts([row.description for row in rows]),
        sequence=ints([row.sequence for row in rows]),
        operation=ints([row.operation for row in rows]),
        name=texts([row.name for row in rows]),
        dtype=texts([row.dtype for row in rows]),
        size_bytes=ints([row.size_bytes for row in rows]),
        created_ns=ints([row.created_ns for row in rows]),
        message=np.array([row.message for row in rows], dtype=bool),
        peer=ints([member(groups.get(row.group, ()), row.peer_place) for row in rows]),
        groups=groups,
        dropped=dropped,
        notes=notes,
    )
