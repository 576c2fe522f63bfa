"""A trace as MLCommons Chakra execution traces, one file a rank, as ASTRA-sim and Chakra's own tools read them.

Computation is given by its durations. Communication is given by its kind, size and group, so that a simulator can
time it again, and by its recorded duration as well. Times are microseconds from the beginning of the first step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway import files
from headway.errors import TraceError
from headway.interop.exporters.chakra_graph import Communicated, Computed, Piece, graph_of
from headway.interop.readers.chakra.schema import COLLECTIVES, VERSION, NodeType, metadata_class, node_class
from headway.trace.events import Event, Events, Kind
from headway.trace.format import RankInfo, Trace
from headway.version import __version__

_SERVED = (Kind.PUSH, Kind.PULL, Kind.SUM)
_SHARES = ("all_gather", "gather")  # of these Chakra states what each rank gives
_MOST_GROUPS = 1000
_TAGS = 2**20  # a group's messages between two ranks; with the group's number they fit into 31 bits
_ROUNDING_NS = 500


def write_chakra(trace: Trace, folder: Path) -> list[Path]:
    """Write ``trace`` to the new folder ``folder``, a file ``<name>.<rank>.et`` a rank; returns the files.

    Raises TraceError where something stands there already, nothing can be written, or servers hold the parameters:
    what they do has no form in Chakra. Raises UserError where the package protobuf is not installed.
    """
    served = any(np.isin(events.kind, _SERVED).any() for events in trace.events.values())
    if trace.servers or served:
        raise TraceError(
            "Chakra cannot represent parameter servers",
            got=f"{len(trace.servers)} servers",
            expected="a job whose ranks communicate with each other",
        )
    if not trace.steps:
        raise TraceError("the trace holds no complete step", got=trace.path, fix="Record more steps.")
    node_class()
    groups = _group_numbers(trace)
    origin_ns = min(int(_steps(events, trace.steps)[:, 1].min()) for events in trace.events.values())
    names = []
    with files.folder_written_whole(folder, TraceError) as unfinished:
        for info in trace.manifest.ranks:
            names.append(f"{_name(trace)}.{info.rank}.et")
            with files.file_written_whole(unfinished / names[-1], TraceError) as file:
                for message in _Rank(trace, info, groups, origin_ns).messages():
                    content: bytes = message.SerializeToString()
                    file.write(_varint(len(content)) + content)
    return [folder / name for name in names]


def _name(trace: Trace) -> str:
    return trace.path.name or "trace"


def _steps(events: Events, steps: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Number, start and end of each recorded step, in order of their start."""
    rows = events.of_kind(Kind.STEP)
    rows = rows.where(np.isin(rows.step, np.array(steps, dtype=np.int64)))
    return np.column_stack([rows.step, rows.start_ns, rows.end_ns])


def _group_numbers(trace: Trace) -> dict[str, int]:
    """Numbers for process groups, which ASTRA-sim wants in place of names; 0 is the group of all ranks.

    Raises TraceError where there are too many.
    """
    communicating = (
        events.of_kind(Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE) for events in trace.events.values()
    )
    names = sorted({str(name) for events in communicating for name in set(events.group.tolist())} - {""})
    whole = [name for name in names if len(trace.members(name)) == trace.world_size]
    if len(names) > _MOST_GROUPS:
        raise TraceError("too many process groups", got=len(names), expected=f"at most {_MOST_GROUPS}")
    kept = {str(number): number for number in range(0 if "0" in whole else 1, _MOST_GROUPS)}
    numbered = {name: kept[name] for name in names if name in kept}
    free = (number for number in range(1, 2 * _MOST_GROUPS + 1) if number not in numbered.values())
    return {name: numbered[name] if name in numbered else next(free) for name in names}


class _Rank:
    """One rank's messages."""

    def __init__(self, trace: Trace, info: RankInfo, groups: dict[str, int], origin_ns: int) -> None:
        self._trace = trace
        self._info = info
        self._groups = groups
        self._origin_ns = origin_ns
        self._tags: dict[tuple[int, int, int], int] = {}

    def messages(self) -> Iterator[Any]:
        """What the file says of itself, the process groups, and the nodes."""
        events = self._trace.events[self._info.rank]
        steps = _steps(events, self._trace.steps)
        windows = [(number, self._us(start), self._us(end)) for number, start, end in steps.tolist()]
        yield self._metadata([value for window in windows if window[1] < window[2] for value in window])
        if self._groups:
            yield self._process_groups()
        pieces = graph_of(events, int(steps[:, 1].min()), int(steps[:, 2].max()))
        numbers = {id(piece): number for number, piece in enumerate(pieces, 1)}
        for piece in pieces:
            yield self._node(piece, numbers)

    def _us(self, time_ns: int) -> int:
        return max(time_ns - self._origin_ns + _ROUNDING_NS, 0) // 1000

    def _metadata(self, windows: list[int]) -> Any:
        message = metadata_class()(version=VERSION)
        info, manifest = self._info, self._trace.manifest
        stated: dict[str, int | str] = {
            "headway": __version__, "rank": info.rank, "world_size": manifest.world_size, "host": info.host,
            "backend": info.backend, "framework": manifest.framework, "clock": f"headway {_name(self._trace)}",
        }  # fmt: skip
        for name, value in stated.items():
            _attribute(message, name, value)
        message.attr.add(name="headway_steps").int64_list.values.extend(windows)
        return message

    def _process_groups(self) -> Any:
        """The node in which PyTorch's traces describe process groups, in the same words."""
        known = self._trace.manifest.groups
        described = [
            {
                "pg_name": str(number), "pg_desc": name, "ranks": list(known.get(name, ())),
                "group_size": len(self._trace.members(name)), "group_count": len(self._groups),
            }
            for name, number in self._groups.items()
        ]  # fmt: skip
        node = node_class()(id=0, name="## process_group:init ##", type=NodeType.METADATA)
        node.inputs.values = f"['{json.dumps(described)}']"
        node.inputs.shapes, node.inputs.types = "[[]]", "['String']"
        return node

    def _node(self, piece: Piece, numbers: dict[int, int]) -> Any:
        start_us, end_us = self._us(piece.start_ns), self._us(piece.end_ns)
        node = node_class()(
            id=numbers[id(piece)], start_time_micros=start_us, duration_micros=end_us - start_us
        )
        node.data_deps.extend(sorted(numbers[id(need)] for need in piece.needs))
        _attribute(node, "is_cpu_op", False)
        if isinstance(piece, Computed):
            node.type = NodeType.COMP
            node.name = "_".join(word for word in ("COMP_NODE", piece.kind, piece.name) if word)
            _attribute(node, "headway_kind", piece.kind)
            self._extra(node, bucket=piece.bucket)
        else:
            self._communication(node, piece)
        return node

    def _communication(self, node: Any, piece: Communicated) -> None:
        event = piece.event
        if event.kind == Kind.COLLECTIVE:
            node.type, node.name = NodeType.COLLECTIVE, f"COMM_COLL_NODE_{event.name}"
            if event.name in COLLECTIVES:
                _attribute(node, "comm_type", COLLECTIVES.index(event.name))
        else:
            self._message(node, event)
        size_bytes = event.size_bytes
        if event.name in _SHARES and event.kind == Kind.COLLECTIVE and size_bytes >= 0:
            size_bytes = -(-size_bytes // len(self._trace.members(event.group)))
        if size_bytes >= 0:
            _attribute(node, "comm_size", size_bytes)
        if event.group:
            _attribute(node, "pg_name", str(self._groups[event.group]))
        self._extra(node, asked=self._us(piece.asked_ns), size=event.size_bytes, sequence=event.sequence)
        self._extra(node, bucket=event.bucket, algorithm=event.algorithm)

    def _message(self, node: Any, event: Event) -> None:
        """A send or receive. Both ends give the same tag to the same message: its index among those between them."""
        sends = event.kind == Kind.SEND
        node.type = NodeType.SEND if sends else NodeType.RECEIVE
        node.name = f"COMM_{'SEND' if sends else 'RECV'}_NODE_{event.name}"
        ends = (self._info.rank, event.peer) if sends else (event.peer, self._info.rank)
        group = self._groups.get(event.group, 0)
        count = self._tags[(group, *ends)] = self._tags.get((group, *ends), -1) + 1
        numbers = (("comm_src", ends[0]), ("comm_dst", ends[1]), ("comm_tag", group * _TAGS + count % _TAGS))
        for name, value in numbers:
            if value >= 0:
                node.attr.add(name=name).int32_val = value

    def _extra(self, node: Any, **stated: int | str) -> None:
        """What only Headway reads."""
        for name, value in stated.items():
            if value not in (-1, ""):
                _attribute(node, f"headway_{name}", value)


def _attribute(message: Any, name: str, value: bool | int | str) -> None:
    field = {bool: "bool_val", int: "int64_val", str: "string_val"}[type(value)]
    setattr(message.attr.add(name=name), field, value)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
