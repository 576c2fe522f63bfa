"""Perfetto's packets by the million.

Packets that differ in little more than their time are put together from pieces: parts of a TrackEvent that Perfetto's
own classes serialised once each. That is sound because serialised parts of a message, put one after the other,
are the whole message serialised. Only the frame of a packet (its length, time, sequence and flags) is written here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.errors import UserError, how_to_install

AT_ONCE = 20_000  # packets that are put together at once
_VARINT, _BYTES = 0, 2  # protobuf's wire types
_MOST_BYTES = 10  # of a variable-length integer of 64 bits

Pieces = npt.NDArray[np.object_]
Chunk = tuple[int, bytes]
"""How many packets, and they themselves."""
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def protos() -> Any:
    """Perfetto's classes of messages. Raises UserError where they are not installed."""
    try:
        return importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except ImportError:
        raise UserError(
            "a Perfetto file needs the perfetto package, which is not installed",
            fix=f"Run: {how_to_install('traces')}.",
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One part of many messages: the pieces that there are, their sizes, and which of them each message gets."""

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
        """A column that says each of ``values`` with ``piece``, and nothing where it is not ``present``."""
        found, places = np.unique(values[present], return_inverse=True)
        index = np.zeros(len(values), dtype=np.int64)
        index[present] = places + 1
        return cls.of([b"", *(piece(value) for value in found.tolist())], index)

    @classmethod
    def of_messages(cls, values: Numbers, message: Callable[[Any], Any]) -> Column:
        """A column that says each of ``values``, with the message that ``message`` makes of it."""
        everywhere = np.ones(len(values), dtype=np.bool_)
        return cls.of_values(values, everywhere, lambda value: bytes(message(value).SerializeToString()))

    def followed_by(self, count: int) -> Column:
        """The same column for ``count`` messages more, which get nothing; the first piece must be nothing."""
        return Column(self.pieces, self.sizes, np.append(self.index, np.zeros(count, dtype=np.int64)))

    def at(self, rows: Ints) -> tuple[Pieces, Ints]:
        """The pieces of some messages, and their sizes."""
        index = self.index[rows]
        return self.pieces[index], self.sizes[index]


def merged(columns: Sequence[Column]) -> Column:
    """Several columns as one. Messages that get nothing from any of them cost nothing."""
    some = np.flatnonzero(np.logical_or.reduce([column.index > 0 for column in columns]))
    index = np.zeros(len(columns[0].index), dtype=np.int64)
    index[some] = np.arange(1, len(some) + 1)
    parts = zip(*(column.at(some)[0].tolist() for column in columns), strict=True)
    return Column.of([b"", *map(b"".join, parts)], index)


class Packets:
    """Serialises packets of a trace. Times are those of the trace less ``origin_ns``: Perfetto has none below zero."""

    def __init__(self, origin_ns: int) -> None:
        self.messages = protos()
        self.origin_ns = origin_ns
        packet = self.messages.TracePacket
        self._packet_tag = _tag(self.messages.Trace, "packet", _BYTES)
        self._time_tag = _tag(packet, "timestamp", _VARINT)
        self._sequence_tag = _tag(packet, "trusted_packet_sequence_id", _VARINT)
        self._flags = _tag(packet, "sequence_flags", _VARINT) + bytes([packet.SEQ_NEEDS_INCREMENTAL_STATE])
        self._event_tag = _tag(packet, "track_event", _BYTES)

    def one(self, packet: Any) -> Chunk:
        """One whole packet."""
        content: bytes = packet.SerializeToString()
        return 1, self._packet_tag + _varint(len(content)) + content

    def many(self, sequence: int, times_ns: Ints, rows: Ints, columns: Sequence[Column]) -> Iterator[Chunk]:
        """Track events of one sequence: packet i comes at ``times_ns[i]``, made of row ``rows[i]`` of the columns."""
        for start in range(0, len(times_ns), AT_ONCE):
            times, own = times_ns[start : start + AT_ONCE], rows[start : start + AT_ONCE]
            yield len(times), self._put_together(sequence, times, [column.at(own) for column in columns])

    def _put_together(self, sequence: int, times_ns: Ints, parts: list[tuple[Pieces, Ints]]) -> bytes:
        lengths = np.add.reduce([sizes for _, sizes in parts])
        times, time_lengths = self._times(times_ns)
        behind_time = _varint(sequence) + self._flags + self._event_tag
        events, event_lengths = _each(lengths, lambda length: behind_time + _varint(length))
        whole = time_lengths + event_lengths + lengths
        heads, _ = _each(whole, lambda length: self._packet_tag + _varint(length))
        table = np.empty((len(times_ns), 3 + len(parts)), dtype=object)
        for place, column in enumerate((heads, times, events, *(pieces for pieces, _ in parts))):
            table[:, place] = column
        return b"".join(table.ravel().tolist())

    def _times(self, times_ns: Ints) -> tuple[Pieces, Ints]:
        """Time fields with the tag of the next field, and their lengths.

        That tag ends each of them, since numpy drops zeros at the end of bytes, and a time of zero is one.
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


def _each(values: Ints, piece: Callable[[int], bytes]) -> tuple[Pieces, Ints]:
    """The piece that says each value, and the pieces' lengths."""
    found, places = np.unique(values, return_inverse=True)
    pieces = np.empty(len(found), dtype=object)
    pieces[:] = [piece(value) for value in found.tolist()]
    return pieces[places], np.array([len(one) for one in pieces], dtype=np.int64)[places]


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
