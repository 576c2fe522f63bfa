"""What the pages of a Parquet file unpack to, as their own headers say: a reader takes that much at once for each.

The footer says it too, of whole columns, and need not tell the truth. Headers are structs in Thrift's compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md) of which three numbers matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

_WINDOW_BYTES = 64 * 2**10  # of which a header, with its statistics, takes some hundred
_MAX_DEPTH = 8
_UNPACKED, _PACKED = 2, 3  # fields of a header
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_LONG_LIST = 15


def unpacked_bytes(file: IO[bytes], chunk: Any) -> int:
    """What the pages of a column chunk, pyarrow's ``ColumnChunkMetaData``, unpack to.

    Raises ValueError where there are no pages where they should be.
    """
    return sum(unpacked for unpacked, _ in _pages(file, chunk))


def _pages(file: IO[bytes], chunk: Any) -> Iterator[tuple[int, int]]:
    place = chunk.data_page_offset
    if chunk.has_dictionary_page:
        # A column without values has no data page, and 0 for where that is.
        place = min(place or chunk.dictionary_page_offset, chunk.dictionary_page_offset)
    end = place + chunk.total_compressed_size
    while place < end:
        file.seek(place)
        header = _Header(file.read(_WINDOW_BYTES))
        numbers = header.integers()
        unpacked, packed = numbers.get(_UNPACKED, -1), numbers.get(_PACKED, -1)
        if unpacked < 0 or packed < 0:
            raise ValueError("a page without a size")
        yield unpacked, packed
        place += header.place + packed


class _Header:
    """A struct at the beginning of ``data``; ``place`` is where it has been read to."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def integers(self, depth: int = 0) -> dict[int, int]:
        """The struct's integer fields, by number; it is read to its end."""
        found = {}
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else _signed(self._number())
            if kind in _INTEGERS:
                found[field] = _signed(self._number())
            elif kind not in (_TRUE, _FALSE):
                self._skip(kind, depth)
        return found

    def _skip(self, kind: int, depth: int) -> None:
        if depth > _MAX_DEPTH or self.place >= len(self._data):
            raise ValueError("a header that is too deep, or does not end")
        if kind in (_TRUE, _FALSE, _BYTE):  # booleans, too, take a byte outside of structs
            self.place += 1
        elif kind in _INTEGERS:
            self._number()
        elif kind == _DOUBLE:
            self.place += 8
        elif kind == _BINARY:
            size_bytes = self._number()
            self.place += size_bytes
        elif kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4
            for _ in range(self._number() if count == _LONG_LIST else count):
                self._skip(head & 15, depth + 1)
        elif kind == _STRUCT:
            self.integers(depth + 1)
        else:
            raise ValueError("no page's header")

    def _number(self) -> int:
        value = shift = 0
        while True:
            part = self._byte()
            value |= (part & 127) << shift
            if part < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("an endless number")

    def _byte(self) -> int:
        if self.place >= len(self._data):
            raise ValueError("a header that is too deep, or does not end")
        self.place += 1
        return self._data[self.place - 1]


def _signed(number: int) -> int:
    return (number >> 1) ^ -(number & 1)
