"""The columns of one rank's Parquet file, read piece by piece: a small file can stand for any amount of memory."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np

from headway import files
from headway.errors import TraceError
from headway.trace.events import OPTIONAL_COLUMNS, TEXT_COLUMNS, absent
from headway.units import parse_size_bytes

_WINDOW_BYTES = 64 * 2**10  # of which a header, with its statistics, takes some hundred
_MAX_DEPTH = 8
_UNPACKED, _PACKED = 2, 3  # fields of a header
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_LONG_LIST = 15


# What the pages of a Parquet file unpack to, as their own headers say: a reader takes that much at once for each.
#
# The footer says it too, of whole columns, and need not tell the truth. Headers are structs in Thrift's compact protocol
# (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md) of which three numbers matter.


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
        integers = {}
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else _signed(self._number())
            if kind in _INTEGERS:
                integers[field] = _signed(self._number())
            elif kind not in (_TRUE, _FALSE):
                self._skip(kind, depth)
        return integers

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


MAX_RATIO = 100  # of what a compressed file may unpack to: traces come to 10 to 40
SMALL_BYTES = 64 * 2**20  # what any file may unpack to, whatever its ratio
USUAL_LIMIT_BYTES = 2 * 2**30  # what one file may unpack to, unless the variable says otherwise
LIMIT_VARIABLE = "HEADWAY_MAX_UNPACKED"
HOW_TO_RAISE_LIMIT = f"If the file is what it should be, set {LIMIT_VARIABLE}, for example to 8GiB."
MOST_STREAMS = 100_000  # in one file, one after the other: some tools write one for each 64 kB
_PACKED_BYTES = 16_384
_PIECE_BYTES = 2**20
_GZIP = b"\x1f\x8b"


def most_bytes(stored_bytes: int, files: int = 1) -> int:
    """How much ``files`` of ``stored_bytes`` in all may unpack to: what ``LIMIT_VARIABLE`` says of one, if it is set.

    Raises UnitError where that cannot be read.
    """
    stated = os.environ.get(LIMIT_VARIABLE)
    if stated:
        limit_bytes = files * parse_size_bytes(stated, LIMIT_VARIABLE)
    else:
        limit_bytes = min(MAX_RATIO * stored_bytes, files * USUAL_LIMIT_BYTES)
    return max(SMALL_BYTES, stored_bytes, limit_bytes)


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """The bytes of ``file``, unpacked where it is gzip.

    Raises EOFError where it is truncated and zlib.error where it is damaged, after the last piece that can be read.
    """
    first = file.read(len(_GZIP))
    if first == _GZIP:
        yield from _unpacked(first, file)
    elif first:
        yield first
        # A member of a zip that ends in an error loses the piece that it comes with.
        yield from _stored(file, _PIECE_BYTES if isinstance(file, io.BufferedReader) else _PACKED_BYTES)


def _stored(file: IO[bytes], piece_bytes: int) -> Iterator[bytes]:
    # ``read`` goes on until it has as much as it was asked for, and loses that where there is an error.
    read = cast(io.BufferedReader, file).read1
    while piece := read(piece_bytes):
        yield piece


def _unpacked(first: bytes, file: IO[bytes]) -> Iterator[bytes]:
    """What gzip streams hold, one after the other, with nothing or zeros between them."""
    decoder = zlib.decompressobj(31)
    packed, streams = first, 1
    stored = _stored(file, _PACKED_BYTES)
    while packed:
        if decoder.eof:
            decoder, streams = zlib.decompressobj(31), streams + 1
            if streams > MOST_STREAMS:
                raise zlib.error(f"more than {MOST_STREAMS} compressed streams")
        before = decoder.copy()
        try:
            piece = decoder.decompress(packed, _PIECE_BYTES)
        except zlib.error:
            yield from _until_damage(before, packed)
            raise
        if piece:
            yield piece
        packed = decoder.unconsumed_tail or decoder.unused_data.lstrip(b"\0")
        while not packed:  # the next that is not padding after the end of a stream
            packed = next(stored, b"")
            if not packed:
                break
            packed = packed.lstrip(b"\0") if decoder.eof else packed
    if not decoder.eof:
        raise EOFError


def _until_damage(decoder: zlib._Decompress, packed: bytes) -> Iterator[bytes]:
    """What a decoder makes of the bytes before the one at which it fails."""
    try:
        for position in range(len(packed)):
            yield decoder.decompress(packed[position : position + 1])
    except zlib.error:
        return


_BATCH_ROWS = 2**17
_VALUE_BYTES = 8  # of a number, and of a reference to a text
_TEXT_BYTES = 64  # of a text in Python, besides its characters


class Allowance:
    """How much the files of one trace may come to in memory, given what is stored of them."""

    def __init__(self) -> None:
        self._stored_bytes = self._files = 0
        self.decoded_bytes = 0

    def opened(self, size_bytes: int) -> None:
        """A file of ``size_bytes`` has been opened."""
        self._stored_bytes += size_bytes
        self._files += 1

    def take(self, size_bytes: int, path: Path) -> None:
        """So much more has been decoded of ``path``. Raises TraceError where that is more than traces come to."""
        self.decoded_bytes += size_bytes
        self.check(0, path)

    def check(self, more_bytes: int, path: Path) -> None:
        """Raise TraceError where ``more_bytes`` of ``path`` would be more than traces come to."""
        limit_bytes = most_bytes(self._stored_bytes, self._files)
        if self.decoded_bytes + more_bytes > limit_bytes:
            raise _too_large(path, self.decoded_bytes + more_bytes, limit_bytes)


class RankColumns:
    """One rank's file, opened once; a context. Raises TraceError where it is none, or is damaged."""

    def __init__(self, path: Path, allowance: Allowance) -> None:
        import pyarrow.parquet as pq

        self.path = path
        self._allowance = allowance
        self._decoded_bytes = 0
        with self._told_on_one_line():
            self._file = files.open_regular(path, TraceError, "the file")
            try:
                self._stored_bytes = os.fstat(self._file.fileno()).st_size
                allowance.opened(self._stored_bytes)
                metadata = pq.read_metadata(self._file)
                texts = [name for name in TEXT_COLUMNS if name in metadata.schema.names]
                self._parquet = pq.ParquetFile(
                    self._file, metadata=metadata, read_dictionary=texts, pre_buffer=False
                )
                self.metadata: Mapping[bytes, bytes] = self._parquet.schema_arrow.metadata or {}
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Columns by name: texts as objects, numbers as int64. No other column is read.

        Optional columns that the file lacks are -1 throughout.
        """
        stored = self._parquet.schema_arrow.names
        lacking = [name for name in names if name in OPTIONAL_COLUMNS and name not in stored]
        columns = self._read_stored([name for name in names if name not in lacking])
        return columns | {name: absent(self._parquet.metadata.num_rows) for name in lacking}

    def _read_stored(self, names: Sequence[str]) -> dict[str, Any]:
        for name in names:
            self._check_type(name)
        pieces: dict[str, list[Any]] = {name: [] for name in names}
        with self._told_on_one_line():
            self._check_pages(names)
            for batch in self._parquet.iter_batches(_BATCH_ROWS, columns=list(names)):
                for name in names:
                    self._admit(name, batch.column(name))
                    pieces[name].append(batch.column(name))
            return {name: _joined(name, pieces.pop(name)) for name in names}

    def _check_pages(self, names: Sequence[str]) -> None:
        """Refuse columns whose pages come to too much before they are decoded: each is unpacked in one piece."""
        metadata = self._parquet.metadata
        total_bytes = 0
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                if column.path_in_schema in names:
                    total_bytes += unpacked_bytes(self._file, column)
                    self._allowance.check(total_bytes, self.path)

    def _check_type(self, name: str) -> None:
        import pyarrow.types as kinds

        schema = self._parquet.schema_arrow
        places = schema.get_all_field_indices(name)
        if len(places) != 1:
            got = f"{len(places)} columns {name}" if places else f"no column {name}"
            raise TraceError(
                f"{self.path.name} was not written by Headway", got=got, expected="one column of this name"
            )
        stored = schema.field(places[0]).type
        text = name in TEXT_COLUMNS
        plain = stored.value_type if kinds.is_dictionary(stored) else stored
        if not (kinds.is_string(plain) or kinds.is_large_string(plain) if text else kinds.is_integer(stored)):
            raise self._damaged(name, str(stored))

    def _damaged(self, name: str, got: str) -> TraceError:
        expected = "text" if name in TEXT_COLUMNS else "integers"
        return TraceError(f"{self.path.name} is damaged: column {name}", got=got, expected=expected)

    def _admit(self, name: str, column: Any) -> None:
        """Count what a piece of a column will come to."""
        decoded_bytes = _VALUE_BYTES * len(column)
        if (dictionary := getattr(column, "dictionary", None)) is not None:
            decoded_bytes += dictionary.nbytes + _TEXT_BYTES * len(dictionary)
        self._decoded_bytes += decoded_bytes
        self._allowance.take(decoded_bytes, self.path)
        if self._decoded_bytes > (limit_bytes := most_bytes(self._stored_bytes)):
            raise _too_large(self.path, self._decoded_bytes, limit_bytes)
        if column.null_count:
            raise self._damaged(name, f"{column.null_count} empty values")

    @contextmanager
    def _told_on_one_line(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except TraceError:
            raise
        except (pa.ArrowException, OSError, ValueError, LookupError):
            raise TraceError(
                f"{self.path.name} is damaged or truncated",
                got=self.path,
                expected="a Parquet file",
                fix="Copy it or record again.",
            ) from None


def _joined(name: str, pieces: Sequence[Any]) -> Any:
    import pyarrow as pa

    wanted = object if name in TEXT_COLUMNS else np.int64
    if not pieces:
        return np.empty(0, dtype=wanted)
    return pa.chunked_array(pieces).unify_dictionaries().to_numpy().astype(wanted, copy=False)


def _too_large(path: Path, got_bytes: int, limit_bytes: int) -> TraceError:
    return TraceError(
        f"{path.name} takes more memory than a trace may",
        got=f"at least {got_bytes} bytes",
        expected=f"at most {limit_bytes}",
        fix=HOW_TO_RAISE_LIMIT,
    )
