"""Builds Perfetto packets for the events of a rank: tracks, names, annotations and arrows, by the million.

Packets that differ in little but their time are assembled from pieces: parts of a TrackEvent, each serialised once by
Perfetto's classes. Concatenated serialised parts of a message are the serialised message. Only a packet's frame
(length, time, sequence and flags) is written here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.diagnosis.communication import Communications, match
from headway.errors import UserError, how_to_install
from headway.interop.exporters.rank_tracks import MATCHED, RankTracks, clean, ends_ns
from headway.trace.events import OPTIONAL_COLUMNS, Events, Kind, is_absent
from headway.trace.format import Trace

AT_ONCE = 20_000  # packets per chunk
_VARINT, _BYTES = 0, 2  # protobuf's wire types
_MOST_BYTES = 10  # of a variable-length integer of 64 bits

Pieces = npt.NDArray[np.object_]
Chunk = tuple[int, bytes]
"""The number of packets, and their bytes."""
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def protos() -> Any:
    """Perfetto's message classes. Raises UserError if they are not installed."""
    try:
        return importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except ImportError:
        raise UserError(
            "Perfetto files need the perfetto package, which is not installed",
            fix=f"Run: {how_to_install('traces')}.",
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One part of many messages: the distinct pieces, their sizes, and the index of each message's piece."""

    pieces: Pieces
    sizes: Ints
    index: Ints

    @classmethod
    def of(cls, pieces: Sequence[bytes], index: Ints) -> Column:
        """A column from a list of pieces."""
        table = np.empty(len(pieces), dtype=object)
        table[:] = pieces
        return cls(table, np.array([len(piece) for piece in pieces], dtype=np.int64), index)

    @classmethod
    def of_values(
        cls, values: Numbers, present: npt.NDArray[np.bool_], piece: Callable[[Any], bytes]
    ) -> Column:
        """A column with ``piece(value)`` for each of ``values``, and nothing where it is not ``present``."""
        distinct, places = np.unique(values[present], return_inverse=True)
        index = np.zeros(len(values), dtype=np.int64)
        index[present] = places + 1
        return cls.of([b"", *(piece(value) for value in distinct.tolist())], index)

    @classmethod
    def of_messages(cls, values: Numbers, message: Callable[[Any], Any]) -> Column:
        """A column with the serialised ``message(value)`` for each of ``values``."""
        everywhere = np.ones(len(values), dtype=np.bool_)
        return cls.of_values(values, everywhere, lambda value: bytes(message(value).SerializeToString()))

    def followed_by(self, count: int) -> Column:
        """This column with ``count`` more messages that get nothing; the first piece must be empty."""
        return Column(self.pieces, self.sizes, np.append(self.index, np.zeros(count, dtype=np.int64)))

    def at(self, rows: Ints) -> tuple[Pieces, Ints]:
        """The pieces of the given messages, and their sizes."""
        index = self.index[rows]
        return self.pieces[index], self.sizes[index]


def merged(columns: Sequence[Column]) -> Column:
    """Merge columns into one. Messages with nothing in all of them cost nothing."""
    some = np.flatnonzero(np.logical_or.reduce([column.index > 0 for column in columns]))
    index = np.zeros(len(columns[0].index), dtype=np.int64)
    index[some] = np.arange(1, len(some) + 1)
    parts = zip(*(column.at(some)[0].tolist() for column in columns), strict=True)
    return Column.of([b"", *map(b"".join, parts)], index)


class Packets:
    """Serialises packets. Times are relative to ``origin_ns``, because Perfetto has no negative times."""

    def __init__(self, origin_ns: int) -> None:
        self.messages = protos()
        self.origin_ns = origin_ns
        packet = self.messages.TracePacket
        self._packet_tag = _tag(self.messages.Trace, "packet", _BYTES)
        self._time_tag = _tag(packet, "timestamp", _VARINT)
        self._sequence_tag = _tag(packet, "trusted_packet_sequence_id", _VARINT)
        self._flags = _tag(packet, "sequence_flags", _VARINT) + bytes([packet.SEQ_NEEDS_INCREMENTAL_STATE])
        self._event_tag = _tag(packet, "track_event", _BYTES)

    def single(self, packet: Any) -> Chunk:
        """One whole packet."""
        content: bytes = packet.SerializeToString()
        return 1, self._packet_tag + _varint(len(content)) + content

    def many(self, sequence: int, times_ns: Ints, rows: Ints, columns: Sequence[Column]) -> Iterator[Chunk]:
        """Track events of one sequence: packet i is at ``times_ns[i]`` and has row ``rows[i]`` of the columns."""
        for start in range(0, len(times_ns), AT_ONCE):
            times, chosen = times_ns[start : start + AT_ONCE], rows[start : start + AT_ONCE]
            yield len(times), self._put_together(sequence, times, [column.at(chosen) for column in columns])

    def _put_together(self, sequence: int, times_ns: Ints, parts: list[tuple[Pieces, Ints]]) -> bytes:
        lengths = np.add.reduce([sizes for _, sizes in parts])
        times, time_lengths = self._times(times_ns)
        behind_time = _varint(sequence) + self._flags + self._event_tag
        events, event_lengths = _piece_per_value(lengths, lambda length: behind_time + _varint(length))
        totals = time_lengths + event_lengths + lengths
        heads, _ = _piece_per_value(totals, lambda length: self._packet_tag + _varint(length))
        table = np.empty((len(times_ns), 3 + len(parts)), dtype=object)
        for place, column in enumerate((heads, times, events, *(pieces for pieces, _ in parts))):
            table[:, place] = column
        return b"".join(table.ravel().tolist())

    def _times(self, times_ns: Ints) -> tuple[Pieces, Ints]:
        """Time fields, each followed by the tag of the next field, and their lengths.

        The tag is needed because numpy drops trailing zero bytes, and a time of zero is one.
        """
        values = times_ns.astype(np.uint64) - np.uint64(self.origin_ns % 2**64)
        count = np.ones(len(values), dtype=np.int64)
        for place in range(1, _MOST_BYTES):
            count += values >> np.uint64(7 * place) > 0
        text = np.zeros((len(values), 2 + _MOST_BYTES), dtype=np.uint8)
        text[:, 0] = self._time_tag[0]
        for place in range(_MOST_BYTES):
            seven = (values >> np.uint64(7 * place)).astype(np.uint8) & 0x7F
            text[:, 1 + place] = np.where(place < count - 1, seven | 0x80, seven)
        text[np.arange(len(values)), 1 + count] = self._sequence_tag[0]
        return text.view(f"S{text.shape[1]}").ravel().astype(object), count + 2


def _piece_per_value(values: Ints, piece: Callable[[int], bytes]) -> tuple[Pieces, Ints]:
    """``piece(value)`` for each value, computed once per distinct value, and the pieces' lengths."""
    distinct, places = np.unique(values, return_inverse=True)
    pieces = np.empty(len(distinct), dtype=object)
    pieces[:] = [piece(value) for value in distinct.tolist()]
    return pieces[places], np.array([len(content) for content in pieces], dtype=np.int64)[places]


def _tag(message: Any, field: str, wire_type: int) -> bytes:
    tag = message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type
    assert tag < 0x80
    return bytes([tag])


def _varint(value: int) -> bytes:
    content = bytearray()
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)


@dataclass(frozen=True, slots=True, eq=False)
class Arrows:
    """All ranks' communication and the arrows in it.

    For each row of ``rows``, ``event`` is the event's position among its rank's events and ``members`` the number of
    rows of its instance. Arrows have the rows ``cause`` and ``effect``, and ``at_ns``, the later of their starts:
    that of the effect if ``on_start``. No arrow leads to an event that ended before its cause began.
    """

    rows: Communications
    event: Ints
    members: Ints
    cause: Ints
    effect: Ints
    at_ns: Ints
    on_start: npt.NDArray[np.bool_]


def find_arrows(trace: Trace) -> Arrows:
    """Match communication across ranks and find causes and effects."""
    rows = match(trace, messages=True)
    rows = rows.where(np.isin(rows.kind, MATCHED))  # without pushes and pulls, which end at servers
    event, start, end = [], [], []
    for _, events in sorted(trace.events.items()):  # in the order of the rows
        positions = np.flatnonzero(np.logical_or.reduce([events.kind == kind for kind in MATCHED]))
        event.append(positions)
        start.append(events.start_ns[positions])
        end.append(ends_ns(events)[positions])
    starts, ends = _joined(start), _joined(end)
    members = np.bincount(rows.instance)[rows.instance] if len(rows) else starts
    causing = np.flatnonzero(
        (rows.kind == Kind.SEND) | ((rows.kind == Kind.COLLECTIVE) & (rows.rank == rows.last_rank))
    )
    cause_of = np.full(int(rows.instance.max(initial=-1)) + 1, -1, dtype=np.int64)
    cause_of[rows.instance[causing]] = causing
    cause = cause_of[rows.instance]
    effect = np.flatnonzero((cause >= 0) & (cause != np.arange(len(rows))))
    cause = cause[effect]
    on_start = starts[effect] > starts[cause]
    kept = on_start | (starts[cause] < ends[effect])
    cause, effect, on_start = cause[kept], effect[kept], on_start[kept]
    at_ns = np.maximum(starts[cause], starts[effect])
    return Arrows(rows, _joined(event), members, cause, effect, at_ns, on_start)


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


NUMBERS = {  # annotations and their columns, shown where not negative
    "bytes": "size_bytes",
    "bucket": "bucket",
    "peer": "peer",
    "sequence": "sequence",
}
TEXTS = ("group", "algorithm")


class RankPieces:
    """The interned names of one rank, and the columns of pieces that make up its packets.

    ``communication`` are this rank's rows of ``arrows.rows``. Its tracks are numbered from ``first_uuid`` on. Times in
    annotations are relative to ``origin_ns``, like those of packets.
    """

    def __init__(
        self,
        messages: Any,
        events: Events,
        tracks: RankTracks,
        arrows: Arrows,
        communication: Ints,
        *,
        first_uuid: int,
        origin_ns: int,
    ) -> None:
        self._messages = messages
        self._tracks = tracks
        self._arrows = arrows
        self._communication = communication
        self._first_uuid = first_uuid
        self._origin_ns = origin_ns
        self._step = events.step
        present = [name for name in OPTIONAL_COLUMNS if not is_absent(getattr(events, name))]
        self._numbers = NUMBERS | dict(zip(present, present, strict=True))
        has_details = events.enqueue_ns != -1
        for column in self._numbers.values():
            has_details |= getattr(events, column) >= 0
        for column in TEXTS:
            has_details |= getattr(events, column) != ""
        has_details[arrows.event[communication]] = True
        self._told = np.flatnonzero(has_details)  # events with more annotations than their step
        self._more = events.where(has_details)
        self._categories = _numbered(kind for kind, _ in tracks.labels)
        self._titles = _numbered(title for _, title in tracks.labels)
        self._annotations = _numbered(("step", *self._numbers, "enqueue_ns", *TEXTS, "last_rank"))
        self._texts = _numbered(text for name in TEXTS for text in getattr(self._more, name).tolist())

    def intern(self, data: Any) -> None:
        """Add every name to ``data``, an InternedData; packets refer to names by number."""
        for numbers, field in (
            (self._categories, data.event_categories),
            (self._titles, data.event_names),
            (self._annotations, data.debug_annotation_names),
        ):
            for text, number in numbers.items():
                field.add(iid=number, name=clean(text))
        for text, number in self._texts.items():
            data.debug_annotation_string_values.add(iid=number, str=clean(text).encode())

    def columns(self) -> list[Column]:
        """The columns of this rank's events, followed by one slice end for each track."""
        ends = len(self._tracks.names)
        more = merged([*self._annotation_columns(), *self._arrow_columns()])
        index = np.zeros(len(self._step), dtype=np.int64)
        index[self._told] = more.index
        return [
            self._moves(),
            self._labels().followed_by(ends),
            self._number("step", self._step, self._step >= 0).followed_by(ends),
            Column(more.pieces, more.sizes, index).followed_by(ends),
        ]

    def _moves(self) -> Column:
        """The type and track of each event."""
        event = self._messages.TrackEvent
        pieces = [
            self._piece(type=kind, track_uuid=self._first_uuid + number)
            for number in range(len(self._tracks.names))
            for kind in (
                event.TYPE_INSTANT if number == self._tracks.instants else event.TYPE_SLICE_BEGIN,
                event.TYPE_SLICE_END,
            )
        ]
        ends = 2 * np.arange(len(self._tracks.names)) + 1
        return Column.of(pieces, np.append(2 * self._tracks.track, ends))

    def _labels(self) -> Column:
        pieces = [
            self._piece(
                category_iids=[self._categories[kind]] if kind else [], name_iid=self._titles.get(title)
            )
            for kind, title in self._tracks.labels
        ]
        return Column.of([b"", *pieces], self._tracks.label + 1)

    def _annotation_columns(self) -> list[Column]:
        enqueue_ns = self._more.enqueue_ns
        columns = [self._number("enqueue_ns", enqueue_ns - self._origin_ns, enqueue_ns != -1)]
        for name, column in self._numbers.items():
            values = getattr(self._more, column)
            columns.append(self._number(name, values, values >= 0))
        columns.extend(self._text(name, getattr(self._more, name).tolist()) for name in TEXTS)
        return columns

    def _arrow_columns(self) -> list[Column]:
        """The rank that arrived last, the correlation id of the communication, and the ends of arrows."""
        arrows, rows = self._arrows, self._communication
        at = np.searchsorted(self._told, arrows.event[rows])
        several = arrows.members[rows] > 1
        last, same = (np.full(len(self._told), -1, dtype=np.int64) for _ in range(2))
        collective = several & (arrows.rows.kind[rows] == Kind.COLLECTIVE)
        last[at[collective]] = arrows.rows.last_rank[rows][collective]
        same[at[several]] = arrows.rows.instance[rows][several] + 1
        return [
            self._number("last_rank", last, last >= 0),
            Column.of_values(same, same >= 0, lambda value: self._piece(correlation_id=value)),
            self._arrow_ends(arrows.cause, np.arange(len(arrows.cause)), at, "flow_ids"),
            self._arrow_ends(arrows.effect, np.flatnonzero(arrows.on_start), at, "terminating_flow_ids"),
        ]

    def _arrow_ends(self, rows: Ints, numbers: Ints, at: Ints, field: str) -> Column:
        """The ends at this rank of the arrows ``numbers``, which begin or end at ``rows``."""
        index = np.zeros(len(self._told), dtype=np.int64)
        ends = rows[numbers]
        place = np.searchsorted(self._communication, ends)
        is_here = place < len(self._communication)
        is_here[is_here] = self._communication[place[is_here]] == ends[is_here]
        order = np.argsort(place[is_here], kind="stable")
        places, flows = place[is_here][order], numbers[is_here][order] + 1
        distinct, firsts = np.unique(places, return_index=True)
        index[at[distinct]] = np.arange(1, len(distinct) + 1)
        groups = np.split(flows, firsts[1:]) if len(distinct) else []
        return Column.of([b"", *(self._piece(**{field: group.tolist()}) for group in groups)], index)

    def _number(self, name: str, values: Ints, present: Any) -> Column:
        return Column.of_values(values, present, lambda value: self._annotation(name, int_value=value))

    def _text(self, name: str, texts: list[str]) -> Column:
        numbers = np.array([self._texts.get(text, 0) for text in texts], dtype=np.int64)
        return Column.of_values(
            numbers, numbers > 0, lambda number: self._annotation(name, string_value_iid=number)
        )

    def _annotation(self, name: str, **value: int) -> bytes:
        annotation = self._messages.DebugAnnotation(name_iid=self._annotations[name], **value)
        return self._piece(debug_annotations=[annotation])

    def _piece(self, **fields: Any) -> bytes:
        content: bytes = self._messages.TrackEvent(**fields).SerializeToString()
        return content


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    """Number the distinct texts from 1; 0 means none."""
    return {text: number for number, text in enumerate(dict.fromkeys(text for text in texts if text), 1)}
