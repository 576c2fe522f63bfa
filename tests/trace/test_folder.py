from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.synthetic import SyntheticJob, synthetic_trace, write_trace

from headway.errors import TraceError
from headway.trace.events import OPTIONAL_COLUMNS, Events, Kind
from headway.trace.folder import assemble, load_trace, rank_file, write_rank


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_trace(SyntheticJob(world_size=2, steps=3), tmp_path / "trace")


def test_a_trace_written_and_read_is_the_same(folder: Path) -> None:
    loaded, made = load_trace(folder), synthetic_trace(SyntheticJob(world_size=2, steps=3))
    assert loaded.manifest.steps == made.manifest.steps
    assert loaded.model == made.model
    for rank in (0, 1):
        assert list(loaded.events[rank]) == list(made.events[rank])


def test_people_can_open_a_rank_with_the_tools_they_have(folder: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(folder / rank_file(0))
    assert {"kind", "name", "start_ns", "duration_ns"} <= set(table.column_names)
    assert json.loads(table.schema.metadata[b"rank"])["rank"] == 0


def spoil(path: Path, text: str) -> None:
    path.write_text(text)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    spoil(path, json.dumps(document))


def recolumn(path: Path, name: str, value: float | None) -> None:
    """Put ``value`` in the first place of a column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    changed = pa.array([value, *table.column(name).to_pylist()[1:]])
    pq.write_table(table.set_column(table.column_names.index(name), name, changed), path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: [p.unlink() for p in f.iterdir()], "the folder is empty"),
        (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
        (lambda f: (f / "model.json").unlink(), "model.json not found"),
        (lambda f: (f / rank_file(1)).unlink(), "lacks rank 1"),
        (
            lambda f: (f / rank_file(1)).write_bytes((f / rank_file(1)).read_bytes()[:500]),
            "damaged or truncated",
        ),
        (lambda f: spoil(f / rank_file(1), ""), "damaged or truncated"),
        (lambda f: spoil(f / "manifest.json", "{"), "manifest.json is damaged"),
        (lambda f: spoil(f / "manifest.json", "[]"), "not a mapping"),
        (lambda f: spoil(f / "manifest.json", '{"traceEvents": []}'), "unknown key|missing"),
        (lambda f: spoil(f / "manifest.json", "[" * 100_000), "damaged"),
        (lambda f: spoil(f / "manifest.json", '{"format": ' + "1" * 5001 + "}"), "manifest.json is damaged"),
        (lambda f: rewrite(f / "manifest.json", lambda d: d.update(world_size=10**9)), "world_size"),
        (lambda f: rewrite(f / "manifest.json", lambda d: d["steps"].append(77)), "lacks step 77"),
        (lambda f: rewrite(f / "manifest.json", lambda d: d.update(world_size=1)), "rank 1 is out of range"),
        (lambda f: rewrite(f / "manifest.json", lambda d: d.update(ranks=[])), "holds no rank"),
        (
            lambda f: rewrite(f / "manifest.json", lambda d: d["ranks"][1].update(rank=0)),
            "a rank is listed twice",
        ),
        (lambda f: rewrite(f / "manifest.json", lambda d: d["steps"].reverse()), "out of order"),
        (
            lambda f: rewrite(f / "model.json", lambda d: d["parameters"].append(d["parameters"][0])),
            "listed twice",
        ),
        (
            lambda f: (f / rank_file(1)).write_bytes((f / rank_file(0)).read_bytes()),
            "belongs to another rank",
        ),
        (lambda f: recolumn(f / rank_file(1), "start_ns", None), "column start_ns; got 1 empty values"),
        (
            lambda f: recolumn(f / rank_file(1), "start_ns", 0.5),
            "column start_ns; got double; expected integers",
        ),
        (lambda f: recolumn(f / rank_file(1), "enqueue_ns", 2**62), "times are out of range"),
        (lambda f: rewrite(f / "model.json", lambda d: d["parameters"][0].update(dtype="int3")), "dtype"),
        (lambda f: rewrite(f / "model.json", lambda d: d["parameters"][0].update(shape=[-1])), "shape"),
        (
            lambda f: rewrite(f / "model.json", lambda d: d["parameters"][0].update(shape=[2**40] * 9)),
            "elements",
        ),
    ],
)
def test_a_damaged_folder_is_refused_on_one_line(folder: Path, damage: object, said: str) -> None:
    assert callable(damage)
    damage(folder)
    with pytest.raises(TraceError, match=said) as caught:
        load_trace(folder)
    assert "\n" not in str(caught.value)


def test_a_future_format_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    spoil(folder / "manifest.json", json.dumps(manifest | {"format": 3, "pipelines": []}))
    with pytest.raises(TraceError, match=r"newer format; got format 3; expected at most 2") as caught:
        load_trace(folder)
    assert "\n" not in str(caught.value)


def test_format_1_is_read(folder: Path) -> None:
    rewrite(folder / "manifest.json", lambda d: d.update(format=1))
    loaded = load_trace(folder)
    assert loaded.manifest.format == 2
    assert list(loaded.events[1]) == list(synthetic_trace(SyntheticJob(world_size=2, steps=3)).events[1])


def test_stages_and_micro_batches_cost_nothing_where_there_are_none(folder: Path) -> None:
    import pyarrow.parquet as pq

    assert not set(OPTIONAL_COLUMNS) & set(pq.read_schema(folder / rank_file(0)).names)
    events = load_trace(folder).events[0]
    some = events.of_kind(Kind.FORWARD)
    for columns in (events, some, events.of_kind("none"), Events.concatenated([events, some])):
        assert columns.stage.tolist() == [-1] * len(columns)
        assert columns.micro_batch.strides == (0,)


def test_stages_and_micro_batches_are_kept_where_there_are_some(folder: Path) -> None:
    trace = load_trace(folder)
    rows = [row._replace(stage=1, micro_batch=index) for index, row in enumerate(trace.events[0])]
    write_rank(folder, trace.manifest.ranks[0], trace.model, rows)
    events = load_trace(folder).events[0]
    assert list(events) == rows
    assert (
        events.of_kind(Kind.STEP).micro_batch.tolist()
        == events.micro_batch[events.kind == Kind.STEP].tolist()
    )


def test_a_foreign_parquet_file_is_refused(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1, 2]}), folder / rank_file(1))
    with pytest.raises(TraceError, match="foreign"):
        load_trace(folder)


def test_a_missing_trace_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trace not found"):
        load_trace(tmp_path / "none")


def test_an_incomplete_recording_does_not_become_a_trace(folder: Path) -> None:
    for name in (rank_file(1), "manifest.json"):
        (folder / name).unlink()
    with pytest.raises(TraceError, match="rank 1 wrote no file"):
        assemble(folder)
    assert not (folder / "manifest.json").exists()
