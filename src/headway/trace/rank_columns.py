"""Reads the columns of a rank's Parquet file within a memory limit, as a small file may unpack to any size.

The limit is checked before decoding, by the sizes in the pages' own headers: a reader unpacks each page at once. The
footer also states sizes, of whole columns, but need not be truthful. Headers are structs in Thrift's compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), of which only two fields are needed.
"""

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

_WINDOW_BYTES = 64 * 2**10  # read at once; a header with its statistics takes some hundred bytes
_MAX_DEPTH = 8
_UNPACKED, _PACKED = 2, 3  # field numbers of the uncompressed and the compressed page size
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_LONG_LIST = 15


def unpacked_bytes(file: IO[bytes], chunk: Any) -> int:
    """The unpacked size of all pages of a column chunk (pyarrow's ``ColumnChunkMetaData``).

    Raises ValueError if there is no valid page where one should be.
    """
    return sum(unpacked for unpacked, _ in _pages(file, chunk))


def _pages(file: IO[bytes], chunk: Any) -> Iterator[tuple[int, int]]:
    place = chunk.data_page_offset
    if chunk.has_dictionary_page:
        # A column without values has no data page, and an offset of 0.
        place = min(place or chunk.dictionary_page_offset, chunk.dictionary_page_offset)
    end = place + chunk.total_compressed_size
    while place < end:
        file.seek(place)
        header = _Header(file.read(_WINDOW_BYTES))
        numbers = header.integers()
        unpacked, packed = numbers.get(_UNPACKED, -1), numbers.get(_PACKED, -1)
        if unpacked < 0 or packed < 0:
            raise ValueError("page header without sizes")
        yield unpacked, packed
        place += header.place + packed


class _Header:
    """Parses a Thrift struct at the beginning of ``data``; ``place`` is the position reached."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def integers(self, depth: int = 0) -> dict[int, int]:
        """Read the struct to its end; returns its integer fields by number."""
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
            raise ValueError("page header too deeply nested, or truncated")
        if kind in (_TRUE, _FALSE, _BYTE):  # outside structs, booleans take a byte
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
            raise ValueError("not a page header")

    def _number(self) -> int:
        value = shift = 0
        while True:
            part = self._byte()
            value |= (part & 127) << shift
            if part < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("integer too long")

    def _byte(self) -> int:
        if self.place >= len(self._data):
            raise ValueError("page header truncated")
        self.place += 1
        return self._data[self.place - 1]


def _signed(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


MAX_RATIO = 100  # largest ratio of unpacked to stored size; traces have 10 to 40
SMALL_BYTES = 64 * 2**20  # any file may unpack to this size, whatever its ratio
USUAL_LIMIT_BYTES = 2 * 2**30  # limit of one file's unpacked size, unless LIMIT_VARIABLE is set
LIMIT_VARIABLE = "HEADWAY_MAX_UNPACKED"
HOW_TO_RAISE_LIMIT = f"If you trust the file, raise the limit with {LIMIT_VARIABLE}, for example to 8GiB."
MOST_STREAMS = 100_000  # gzip streams in one file; some tools write one for every 64 kB
_PACKED_BYTES = 16_384
_PIECE_BYTES = 2**20
_GZIP = b"\x1f\x8b"


def most_bytes(stored_bytes: int, files: int = 1) -> int:
    """The limit in bytes to which ``files`` files with ``stored_bytes`` in total may unpack.

    ``LIMIT_VARIABLE``, if set, is the limit for one file. Raises UnitError if it cannot be parsed.
    """
    stated = os.environ.get(LIMIT_VARIABLE)
    if stated:
        limit_bytes = files * parse_size_bytes(stated, LIMIT_VARIABLE)
    else:
        limit_bytes = min(MAX_RATIO * stored_bytes, files * USUAL_LIMIT_BYTES)
    return max(SMALL_BYTES, stored_bytes, limit_bytes)


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of ``file`` in pieces, decompressed if it is gzip.

    After the last readable piece, raises EOFError if the file is truncated and zlib.error if it is damaged.
    """
    first = file.read(len(_GZIP))
    if first == _GZIP:
        yield from _unpacked(first, file)
    elif first:
        yield first
        # In a zip member, an error loses the piece being read: so pieces are small there.
        yield from _stored(file, _PIECE_BYTES if isinstance(file, io.BufferedReader) else _PACKED_BYTES)


def _stored(file: IO[bytes], piece_bytes: int) -> Iterator[bytes]:
    # ``read`` collects the requested size first, and would lose it at an error.
    read = cast(io.BufferedReader, file).read1
    while piece := read(piece_bytes):
        yield piece


def _unpacked(first: bytes, file: IO[bytes]) -> Iterator[bytes]:
    """Yield the contents of consecutive gzip streams, which may be separated by zero padding."""
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
        while not packed:  # skip padding after the end of a stream
            packed = next(stored, b"")
            if not packed:
                break
            packed = packed.lstrip(b"\0") if decoder.eof else packed
    if not decoder.eof:
        raise EOFError


def _until_damage(decoder: zlib._Decompress, packed: bytes) -> Iterator[bytes]:
    """Yield what the decoder produces before the byte at which it fails."""
    try:
        for position in range(len(packed)):
            yield decoder.decompress(packed[position : position + 1])
    except zlib.error:
        return


_BATCH_ROWS = 2**17
_VALUE_BYTES = 8  # of a number, and of a reference to a text
_TEXT_BYTES = 64  # of a Python string, in addition to its characters


class Allowance:
    """The memory that the files of one trace may take together, relative to their stored size."""

    def __init__(self) -> None:
        self._stored_bytes = self._files = 0
        self.decoded_bytes = 0

    def opened(self, size_bytes: int) -> None:
        """Add an opened file of ``size_bytes``."""
        self._stored_bytes += size_bytes
        self._files += 1

    def take(self, size_bytes: int, path: Path) -> None:
        """Count ``size_bytes`` more, decoded from ``path``. Raises TraceError if that exceeds the limit."""
        self.decoded_bytes += size_bytes
        self.check(0, path)

    def check(self, more_bytes: int, path: Path) -> None:
        """Raise TraceError if ``more_bytes`` of ``path`` would exceed the limit."""
        limit_bytes = most_bytes(self._stored_bytes, self._files)
        if self.decoded_bytes + more_bytes > limit_bytes:
            raise _too_large(path, self.decoded_bytes + more_bytes, limit_bytes)


class RankColumns:
    """One rank's open file, a context manager. Raises TraceError if it is damaged or not a rank's file."""

    def __init__(self, path: Path, allowance: Allowance) -> None:
        import pyarrow.parquet as pq

        self.path = path
        self._allowance = allowance
        self._decoded_bytes = 0
        with self._readable_errors():
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
        """Read only the columns ``names``: strings as dtype object, numbers as int64.

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
        with self._readable_errors():
            self._check_pages(names)
            for batch in self._parquet.iter_batches(_BATCH_ROWS, columns=list(names)):
                for name in names:
                    self._admit(name, batch.column(name))
                    pieces[name].append(batch.column(name))
            return {name: _joined(name, pieces.pop(name)) for name in names}

    def _check_pages(self, names: Sequence[str]) -> None:
        """Raise TraceError, before decoding, if the pages of these columns unpack to too much."""
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
        """Count the memory that a piece of a column will take, and check the limits."""
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
    def _readable_errors(self) -> Iterator[None]:
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
        f"{path.name} takes more memory than allowed for a trace",
        got=f"at least {got_bytes} bytes",
        expected=f"at most {limit_bytes}",
        fix=HOW_TO_RAISE_LIMIT,
    )
