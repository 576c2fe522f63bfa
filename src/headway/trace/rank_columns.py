"""The columns of one rank's Parquet file, read piece by piece: a small file can stand for any amount of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from headway import files
from headway.errors import TraceError
from headway.trace.events import OPTIONAL_COLUMNS, TEXT_COLUMNS, absent
from headway.trace.page_sizes import unpacked_bytes
from headway.trace.unpacking import TO_RAISE_IT, most_bytes

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
                found = pq.read_metadata(self._file)
                texts = [name for name in TEXT_COLUMNS if name in found.schema.names]
                self._parquet = pq.ParquetFile(
                    self._file, metadata=found, read_dictionary=texts, pre_buffer=False
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
        found = self._read_stored([name for name in names if name not in lacking])
        return found | {name: absent(self._parquet.metadata.num_rows) for name in lacking}

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
        found = self._parquet.metadata
        total_bytes = 0
        for group in map(found.row_group, range(found.num_row_groups)):
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
        found = schema.field(places[0]).type
        text = name in TEXT_COLUMNS
        plain = found.value_type if kinds.is_dictionary(found) else found
        if not (kinds.is_string(plain) or kinds.is_large_string(plain) if text else kinds.is_integer(found)):
            raise self._damaged(name, str(found))

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
        fix=TO_RAISE_IT,
    )
