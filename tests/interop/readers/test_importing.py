"""Imports as a whole: every tool's recordings become traces that can be diagnosed, drawn and exported."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from tests.interop.readers.imported_jobs import ImportedJob, check_job, copied
from tests.interop.readers.kineto_documents import document, job_events

from headway.diagnosis import diagnose
from headway.errors import TraceError
from headway.interop.readers.formats import readers
from headway.interop.readers.importing import Imported, import_trace
from headway.trace.folder import load_trace

FIXTURES = Path(__file__).parent / "fixtures"
JOBS = {
    "kineto": ImportedJob(["kineto/*.gz"], "pytorch", 2, 3, {"kineto": 2, "execution-trace": 2, "flight-recorder": 2}),
    "kineto alone": ImportedJob(["kineto/rank*"], "pytorch", 2, 3, {"kineto": 2}),
    "execution traces": ImportedJob(["execution_trace/*.gz"], "pytorch", 2, 2, {"kineto": 2, "execution-trace": 2}),
    "flight recorders of the same run": ImportedJob(
        ["execution_trace/*.gz", "flight_recorder/*.json"], "pytorch", 2, 2,
        {"kineto": 2, "execution-trace": 2, "flight-recorder": 2},
    ),
    "chakra": ImportedJob(["chakra/gloo.*"], "chakra", 2, 2, {"chakra": 2}),
    "chakra as text": ImportedJob(["chakra/text.*"], "chakra", 2, 3, {"chakra": 2}),
}  # fmt: skip


def left_behind(folder: Path) -> set[str]:
    """What is in a folder, hidden files too."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", JOBS)
def test_from_documents_to_all_that_a_trace_is_for(tmp_path: Path, name: str) -> None:
    check_job(JOBS[name], FIXTURES, tmp_path)


def test_ranks_that_are_missing(tmp_path: Path) -> None:
    source = copied(FIXTURES, tmp_path, ["kineto/rank1*"])
    import_trace(source, tmp_path / "out")
    trace = load_trace(tmp_path / "out")
    assert (trace.missing_ranks, list(trace.events), trace.world_size) == ((0,), [1], 2)
    assert "1 of 2 ranks are not in this trace." in diagnose(trace).notes


FAILURES: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "companions alone": (["kineto/flight*"], {}, r"no file contains times\. A flight recorder"),
    "a pickle": (["flight_recorder/*"], {}, "is a pickle, which is never opened"),
    "nothing known": (["kineto/make.py"], {}, "no file of a known format; got 1 file,"),
    "another format": (["kineto/rank0*"], {"format_name": "chakra"}, "rank0"),
    "no format": (
        ["kineto/rank0*"],
        {"format_name": "etl"},
        "no such format; got etl; expected auto, flight-recorder",
    ),
    "several tools": (["chakra/gloo.0*", "kineto/rank1*"], {}, "are recordings of several jobs"),
    "nothing that takes time": (["chakra/allreduce*"], {}, "contains no durations"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_import_that_fails_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    patterns, options, complaint = FAILURES[name]
    source = copied(FIXTURES, tmp_path, patterns)
    before = left_behind(source)
    with pytest.raises(TraceError, match=complaint) as failure:
        import_trace(source, tmp_path / "out", **options)
    assert "\n" not in str(failure.value)
    assert left_behind(tmp_path) == {"in"}
    assert left_behind(source) == before


@pytest.mark.parametrize("chosen", list(readers()))
@pytest.mark.parametrize("lenient", [False, True])
def test_any_file_forced_into_any_format(tmp_path: Path, chosen: str, lenient: bool) -> None:
    files = ["kineto/rank0.json.gz", "chakra/gloo.0.et.gz", "flight_recorder/*.pickle", "kineto/make.py"]
    for number, pattern in enumerate(files):
        (path,) = FIXTURES.glob(pattern)
        try:
            import_trace(path, tmp_path / str(number), format_name=chosen, lenient=lenient)
        except TraceError as failure:
            assert "\n" not in str(failure)  # noqa: PT017 - some of them are of that format
        assert not any(name.startswith(".") for name in left_behind(tmp_path))


def test_a_failure_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.interop.readers.importing.write_trace", fail)
    with pytest.raises(KeyboardInterrupt):
        import_trace(copied(FIXTURES, tmp_path, ["kineto/rank*"]), tmp_path / "out")
    assert left_behind(tmp_path) == {"in"}


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    source = copied(FIXTURES, tmp_path, ["kineto/rank*"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(TraceError, match="the output already exists"):
        import_trace(source, tmp_path / "out")
    assert left_behind(tmp_path / "out") == {"mine"}


def test_damaged_documents_are_left_out_leniently(tmp_path: Path) -> None:
    source = copied(FIXTURES, tmp_path, ["kineto/rank*"])
    (source / "rank2.json").write_bytes(b'{"schemaVersion": 1, "traceEvents": [')
    (source / "rank3.json.gz").write_bytes(gzip.compress(document(job_events()))[:6])
    with pytest.raises(TraceError, match=r"rank2\.json is damaged|rank3\.json\.gz cannot be read"):
        import_trace(source, tmp_path / "out")
    done = import_trace(source, tmp_path / "out", lenient=True)
    assert [info.rank for info in done.manifest.ranks] == [0, 1]
    said = " ".join(done.manifest.notes)
    assert "rank2.json contains no operators" in said
    assert "rank3.json.gz cannot be read" in said
    for only in ("rank2.json", "rank3.json.gz"):
        with pytest.raises(TraceError):
            import_trace(source / only, tmp_path / "other", lenient=True)


def test_a_truncated_recording_is_kept_as_far_as_it_goes(tmp_path: Path) -> None:
    source = copied(FIXTURES, tmp_path, ["kineto/rank1*"])
    whole = gzip.compress(document(job_events(range(1, 200)), rank=0))
    (source / "rank0.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="the file is truncated"):
        import_trace(source / "rank0.json.gz", tmp_path / "out")
    manifest = import_trace(source / "rank0.json.gz", tmp_path / "out", lenient=True).manifest
    assert 50 < len(manifest.steps) < 150
    assert 1 <= manifest.ranks[0].dropped_events <= 3


def test_progress_counts_documents(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    import_trace(
        copied(FIXTURES, tmp_path, ["kineto/*.gz"]),
        tmp_path / "out",
        progress=lambda done, of: seen.append((done, of)),
    )
    assert seen[-1] == (6, 6)
    assert seen == sorted(seen)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / os.fsdecode(b"rank0\xff\x1b[31m.json")).write_bytes(
        document(job_events(), rank=0, host_name="a\x1b[2Jb")
    )
    done: Imported = import_trace(tmp_path / "in", tmp_path / "out")
    (info,) = load_trace(tmp_path / "out").manifest.ranks
    assert info == done.manifest.ranks[0]
    assert info.host == "a [2Jb"
    assert r"rank0\udcff" in info.source
