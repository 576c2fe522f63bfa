"""Rank files that stand for more memory than they should, or are none: refused on one line, before it is taken."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests import limits
from tests.synthetic import SyntheticJob, write_trace

from headway.errors import TraceError, UnitError
from headway.trace import rank_columns
from headway.trace.events import OPTIONAL_COLUMNS, TEXT_COLUMNS, Event
from headway.trace.folder import assemble, load_trace, rank_file
from headway.trace.rank_columns import Allowance, RankColumns, unpacked_bytes

BATCH_ROWS, BATCHES = 500_000, 6
SMALL_FILE_BYTES = 500_000
TAKEN_BYTES = 120 * 2**20  # in Arrow and in Python: what a small file may come to, and one batch more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_trace(SyntheticJob(world_size=2, steps=3), tmp_path / "trace")


def _swell(path: Path) -> int:
    """Give a rank file millions of rows that are all alike, which costs nothing; returns what they come to."""
    schema = pq.read_schema(path)
    columns = []
    for field in schema:
        if field.name in TEXT_COLUMNS:
            indices = pa.array(np.zeros(BATCH_ROWS, np.int32))
            columns.append(pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 40])))
        else:
            columns.append(pa.array(np.zeros(BATCH_ROWS, np.int64)))
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for _ in range(BATCHES):
            writer.write_batch(batch, row_group_size=BATCH_ROWS * BATCHES)
    return BATCH_ROWS * BATCHES * 8 * len(columns)


_LOADING = """
import resource, sys
import pyarrow.parquet
from headway.errors import TraceError
from headway.trace.folder import load_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_trace(sys.argv[1])
except TraceError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


def _refused(folder: Path) -> tuple[int, str]:
    """By how much a process grows that loads a trace that is refused, in bytes, and what it is told."""
    command = [sys.executable, "-c", _LOADING, str(folder)]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=limits.stretched(100)
    ).stdout
    grown_kb, _, message = said.partition(" ")
    return int(grown_kb) * 1024, message.rstrip("\n")


@pytest.mark.timeout(120)
def test_a_small_file_that_comes_to_much_is_refused_before_it_does(folder: Path) -> None:
    path = folder / rank_file(1)
    comes_to_bytes = _swell(path)
    assert path.stat().st_size < SMALL_FILE_BYTES
    assert comes_to_bytes > 2 * TAKEN_BYTES
    grown_bytes, message = _refused(folder)
    assert "takes more memory than allowed for a trace" in message
    assert "\n" not in message
    assert grown_bytes < TAKEN_BYTES


def test_what_a_trace_comes_to_is_counted_over_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowance = Allowance()
    with RankColumns(folder / rank_file(0), allowance) as file:
        file.read(Event._fields)
    monkeypatch.setattr(rank_columns, "most_bytes", lambda *_: int(1.5 * allowance.decoded_bytes))
    with pytest.raises(TraceError, match=r"rank-00001\.parquet takes more memory"):
        load_trace(folder)


def test_how_much_a_file_may_unpack_to_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    assert rank_columns.most_bytes(mib) == 100 * mib
    assert rank_columns.most_bytes(500 * mib) == 2048 * mib
    assert rank_columns.most_bytes(3000 * mib) == 3000 * mib  # what is not packed
    assert rank_columns.most_bytes(500 * mib, files=10) == 20480 * mib
    monkeypatch.setenv(rank_columns.LIMIT_VARIABLE, "8GiB")
    assert rank_columns.most_bytes(mib) == 8192 * mib
    assert rank_columns.most_bytes(mib, files=2) == 16384 * mib
    monkeypatch.setenv(rank_columns.LIMIT_VARIABLE, "much")
    with pytest.raises(UnitError, match="HEADWAY_MAX_UNPACKED cannot be read"):
        rank_columns.most_bytes(mib)


def test_pages_that_unpack_to_much_are_not_unpacked_whatever_the_footer_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_columns, "most_bytes", lambda *_: 3 * 2**19)
    path = folder / rank_file(1)
    table = pq.read_table(path).slice(0, 1)
    texts = pa.array(["x" * 2_000_000], type=pa.large_string())
    place = table.column_names.index("name")
    pq.write_table(table.set_column(place, "name", texts), path, compression="zstd", use_dictionary=False)
    stated_bytes = pq.read_metadata(path).row_group(0).column(place).total_uncompressed_size
    path.write_bytes(path.read_bytes().replace(_thrift(stated_bytes), _thrift(2**20)))
    assert pq.read_metadata(path).row_group(0).column(place).total_uncompressed_size == 2**20
    refused = pytest.raises(TraceError, match=r"at least 2\d{6} bytes; expected at most 1572864")
    with refused, RankColumns(path, Allowance()) as file:
        file.read(["name"])


def _thrift(number: int) -> bytes:
    """A positive integer as the footer has it."""
    left, parts = 2 * number, []
    while left:
        parts.append(left & 127 | (128 if left > 127 else 0))
        left >>= 7
    return bytes(parts)


@pytest.mark.parametrize("name", [name for name in Event._fields if name not in OPTIONAL_COLUMNS])
def test_what_pages_unpack_to_is_what_the_footer_of_an_honest_file_says(folder: Path, name: str) -> None:
    path = folder / rank_file(0)
    place = Event._fields.index(name)
    column = pq.read_metadata(path).row_group(0).column(place)
    with path.open("rb") as file:
        unpacked = unpacked_bytes(file, column)
    # The footer counts headers, too.
    assert 0 < unpacked < column.total_uncompressed_size < unpacked + 1000


@pytest.mark.parametrize("header", [b"\x19" * 100_000, b"\x19\xf1" + b"\xff" * 8, b"\x15\x00", b"\x1b"])
def test_damaged_pages_are_refused(header: bytes) -> None:
    chunk = SimpleNamespace(data_page_offset=0, has_dictionary_page=False, total_compressed_size=200_000)
    with pytest.raises(ValueError, match=r"header|size|number"):
        unpacked_bytes(io.BytesIO(header), chunk)


def test_assembling_reads_the_columns_that_tell_steps_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    usual = RankColumns.read

    def noted(self: RankColumns, names: Any) -> Any:
        read.append(names)
        return usual(self, names)

    monkeypatch.setattr(RankColumns, "read", noted)
    assert assemble(folder).steps == load_trace(folder).manifest.steps
    assert read == [("kind", "step")] * 2 + [Event._fields] * 2


def test_columns_of_others_are_not_read(folder: Path) -> None:
    path = folder / rank_file(1)
    table = pq.read_table(path)
    pq.write_table(table.append_column("own", pa.array([[1]] * len(table))), path)
    assert len(load_trace(folder).events[1]) == len(table)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([{"a": "step"}]), "column kind; got struct"),
        (pa.array([["step"]]), "column kind; got list"),
        (pa.array([b"step"]), "column kind; got dictionary<values=binary"),
        (pa.array([1]), "column kind; got int64; expected text"),
    ],
)
def test_a_column_of_another_type_is_refused(folder: Path, column: Any, said: str) -> None:
    path = folder / rank_file(1)
    table = pq.read_table(path)
    place = table.column_names.index("kind")
    whole = pa.concat_arrays([column] * len(table))
    pq.write_table(table.set_column(place, "kind", whole), path)
    with pytest.raises(TraceError, match=said):
        load_trace(folder)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    path = folder / rank_file(1)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TraceError, match="lacks rank 1"):
        load_trace(folder)
    with pytest.raises(TraceError, match="is not a file; got a device or a pipe"):
        RankColumns(path, Allowance())
