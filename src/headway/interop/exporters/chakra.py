"""Exports a trace as MLCommons Chakra execution traces for ASTRA-sim and Chakra's tools, one file per rank.

Computation is written with its durations; communication with its kind, size and group, so that a simulator can time
it again, and with its recorded duration. Times are microseconds from the beginning of the first step.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway import files
from headway.diagnosis.breakdown import REST, Segment, segments
from headway.errors import TraceError
from headway.interop.readers.chakra.schema import COLLECTIVES, VERSION, NodeType, metadata_class, node_class
from headway.trace.events import Event, Events, Kind, inner_messages
from headway.trace.format import RankInfo, Trace
from headway.version import __version__

TOLERANCE_NS = 200_000  # a wait may end this much before the recorded end of the communication it waited for
_PLAIN = {Kind.FORWARD_PASS: Kind.FORWARD, Kind.BACKWARD_PASS: Kind.BACKWARD}


@dataclass(eq=False)
class ComputationPiece:
    """A stretch of computation."""

    start_ns: int
    end_ns: int
    kind: str  # of an event, or REST
    name: str
    bucket: int
    needs: list[ComputationPiece | CommunicationPiece] = field(default_factory=list)


@dataclass(eq=False)
class CommunicationPiece:
    """A collective or message, launched once everything it needs had ended."""

    event: Event
    needs: list[ComputationPiece | CommunicationPiece] = field(default_factory=list)

    @property
    def asked_ns(self) -> int:
        """When this rank launched it."""
        return min(self.event.enqueue_ns, self.start_ns) if self.event.enqueue_ns >= 0 else self.start_ns

    @property
    def start_ns(self) -> int:
        """When it started on this rank."""
        return self.event.start_ns

    @property
    def end_ns(self) -> int:
        """When it ended on this rank."""
        return self.event.end_ns


Piece = ComputationPiece | CommunicationPiece


def graph_of(events: Events, start_ns: int, end_ns: int) -> list[Piece]:
    """A rank's work from ``start_ns`` to ``end_ns``, ordered by start; dependencies point to earlier pieces.

    Computation is sequential and cut at launches of communication; after a wait it depends on the awaited ones.
    """
    communicated = [CommunicationPiece(event) for event in _communication(events, start_ns, end_ns)]
    by_end = sorted(communicated, key=_end)
    computed: list[ComputationPiece] = []
    awaited: list[CommunicationPiece] = []  # since the last computation
    waited_for: list[CommunicationPiece] = []  # ever
    for stretch in _cut(
        segments(events, start_ns, end_ns), sorted({communication.asked_ns for communication in communicated})
    ):
        if stretch.kind == Kind.WAIT:
            ended = _awaited(stretch, by_end)
            awaited += ended
            waited_for += ended
            went_on_ns = max((communication.end_ns for communication in ended), default=stretch.start_ns)
            if went_on_ns >= stretch.end_ns:
                continue
            stretch = Segment(went_on_ns, stretch.end_ns, REST, stretch.name)
        kind = _PLAIN.get(stretch.kind, stretch.kind)
        needs: list[Piece] = [*computed[-1:], *awaited]
        computed.append(
            ComputationPiece(stretch.start_ns, stretch.end_ns, kind, stretch.name, stretch.bucket, needs)
        )
        awaited = []
    _set_needs(communicated, computed, sorted(waited_for, key=_end))
    everything: list[Piece] = [*computed, *communicated]
    return sorted(everything, key=lambda piece: piece.start_ns)


def _communication(events: Events, start_ns: int, end_ns: int) -> Iterator[Event]:
    """Collectives, and messages outside collectives."""
    outer = events.where(~inner_messages(events))
    for row in outer.of_kind(Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE):
        asked_ns = row.enqueue_ns if row.enqueue_ns >= 0 else row.start_ns
        if asked_ns < end_ns and row.end_ns > start_ns:
            yield row


def _cut(stretches: Iterable[Segment], cuts: Sequence[int]) -> Iterator[Segment]:
    """Cut computation at the launches of communication (``cuts``)."""
    for stretch in stretches:
        begin = stretch.start_ns
        if stretch.kind != Kind.WAIT:
            for at in cuts[bisect_right(cuts, begin) : bisect_left(cuts, stretch.end_ns)]:
                yield stretch._replace(start_ns=begin, end_ns=at)
                begin = at
        yield stretch._replace(start_ns=begin)


def _awaited(wait: Segment, by_end: Sequence[CommunicationPiece]) -> list[CommunicationPiece]:
    """The communication that ended during a wait; only that of the wait's bucket, if it is known."""
    first = bisect_right(by_end, wait.start_ns, key=_end)
    last = bisect_right(by_end, wait.end_ns + TOLERANCE_NS, key=_end)
    ended = [
        candidate
        for candidate in by_end[first:last]
        if candidate.asked_ns < wait.end_ns and candidate.start_ns < wait.end_ns
    ]
    return [
        candidate
        for candidate in ended
        if candidate.event.bucket >= 0 and candidate.event.bucket == wait.bucket
    ] or ended


def _set_needs(
    communicated: Iterable[CommunicationPiece],
    computed: Sequence[ComputationPiece],
    waited_for: Sequence[CommunicationPiece],
) -> None:
    """Set the dependencies of communication: the computation before its launch, and its queue's predecessor."""
    before: dict[tuple[object, ...], CommunicationPiece] = {}
    for communication in communicated:
        asked_ns = communication.asked_ns
        at = bisect_right(computed, asked_ns, key=_end)
        until_ns = computed[at - 1].end_ns if at else asked_ns
        since = waited_for[
            bisect_right(waited_for, until_ns, key=_end) : bisect_right(waited_for, asked_ns, key=_end)
        ]
        communication.needs = [*computed[at - 1 : at], *since] if at else []
        event = communication.event
        queue = (event.group, event.kind, event.peer if event.kind != Kind.COLLECTIVE else -1)
        previous = before.get(queue)
        if (
            previous is not None
            and previous.end_ns <= communication.start_ns
            and previous not in communication.needs
        ):
            communication.needs.append(previous)
        before[queue] = communication


def _end(piece: Piece) -> int:
    return piece.end_ns


_SERVED = (Kind.PUSH, Kind.PULL, Kind.SUM)
_SHARES = ("all_gather", "gather")  # for these, Chakra's comm_size is each rank's input
_MOST_GROUPS = 1000
_TAGS = 2**20  # a group's messages between two ranks; with the group's number they fit into 31 bits
_ROUNDING_NS = 500


def write_chakra(trace: Trace, folder: Path) -> list[Path]:
    """Write ``trace`` to the new folder ``folder``, one file ``<name>.<rank>.et`` per rank; returns the files.

    Raises TraceError if the folder exists or cannot be written, or if the job has parameter servers, which Chakra
    cannot represent. Raises UserError if the package protobuf is not installed.
    """
    served = any(np.isin(events.kind, _SERVED).any() for events in trace.events.values())
    if trace.servers or served:
        raise TraceError(
            "Chakra cannot represent parameter servers",
            got=f"{len(trace.servers)} servers",
            expected="a job without parameter servers",
        )
    if not trace.steps:
        raise TraceError("the trace contains no complete step", got=trace.path, fix="Record more steps.")
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
    """Number the process groups, as ASTRA-sim requires; 0 is the group of all ranks.

    Raises TraceError if there are too many.
    """
    communicating = (
        events.of_kind(Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE) for events in trace.events.values()
    )
    names = sorted({str(name) for events in communicating for name in set(events.group.tolist())} - {""})
    world_groups = [name for name in names if len(trace.members(name)) == trace.world_size]
    if len(names) > _MOST_GROUPS:
        raise TraceError("too many process groups", got=len(names), expected=f"at most {_MOST_GROUPS}")
    kept = {str(number): number for number in range(0 if "0" in world_groups else 1, _MOST_GROUPS)}
    numbered = {name: kept[name] for name in names if name in kept}
    free = (number for number in range(1, 2 * _MOST_GROUPS + 1) if number not in numbered.values())
    return {name: numbered[name] if name in numbered else next(free) for name in names}


class _Rank:
    """Writes one rank's messages."""

    def __init__(self, trace: Trace, info: RankInfo, groups: dict[str, int], origin_ns: int) -> None:
        self._trace = trace
        self._info = info
        self._groups = groups
        self._origin_ns = origin_ns
        self._tags: dict[tuple[int, int, int], int] = {}

    def messages(self) -> Iterator[Any]:
        """The metadata, the process groups, and the nodes."""
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
        """The node that describes the process groups, as in PyTorch's traces."""
        group_ranks = self._trace.manifest.groups
        described = [
            {
                "pg_name": str(number), "pg_desc": name, "ranks": list(group_ranks.get(name, ())),
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
        if isinstance(piece, ComputationPiece):
            node.type = NodeType.COMP
            node.name = "_".join(word for word in ("COMP_NODE", piece.kind, piece.name) if word)
            _attribute(node, "headway_kind", piece.kind)
            self._extra(node, bucket=piece.bucket)
        else:
            self._communication(node, piece)
        return node

    def _communication(self, node: Any, piece: CommunicationPiece) -> None:
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
        """A send or receive. Both ends tag a message with its index among those between them."""
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
        """Add attributes that only Headway reads."""
        for name, value in stated.items():
            if value not in (-1, ""):
                _attribute(node, f"headway_{name}", value)


def _attribute(message: Any, name: str, value: bool | int | str) -> None:
    field = {bool: "bool_val", int: "int64_val", str: "string_val"}[type(value)]
    setattr(message.attr.add(name=name), field, value)


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)
