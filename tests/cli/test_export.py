from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.interop.exporters.perfetto_file import read
from tests.replayer.test_replayer import as_bucketed
from tests.synthetic import SyntheticJob, synthetic_trace, write_trace

from headway.cli.main import run
from headway.trace import folder as folder_of


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(SyntheticJob(world_size=2, steps=2), tmp_path / "trace")


def test_a_perfetto_file(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.pftrace.gz"
    assert run(["export", str(trace), "--to", "perfetto", "-o", str(target)]) == 0
    said = capsys.readouterr().out
    assert f"events of 2 ranks ({target.stat().st_size / 1000:.1f} kB) to {target}" in said
    found = read(target)
    assert found.order == ["rank 0 (host0)", "rank 1 (host1)"]
    assert len(found.flows) == 8


def test_json_says_what_was_written(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    assert run(["export", str(trace), "--to", "perfetto", "-o", str(target), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {"headway", "kind", "path", "format", "events", "bytes", "notes"} == set(said)
    assert (said["kind"], said["path"], said["format"]) == ("export", str(target), "perfetto")
    assert said["bytes"] == target.stat().st_size
    assert said["events"] == len([one for one in read(target).slices if one.category != "cause"])


def test_goal_of_what_a_replay_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = as_bucketed(synthetic_trace(SyntheticJob(world_size=2, steps=2)))
    folder, target = tmp_path / "trace", tmp_path / "out.goal"
    folder.mkdir()
    folder_of.write_trace(folder, recorded.manifest, recorded.model, recorded.events)
    assert run(["export", str(folder), "--to", "goal", "-o", str(target)]) == 0
    assert "txt2bin" in capsys.readouterr().out
    assert target.read_text().startswith("num_ranks 2\n")
    assert run(["export", str(folder), "--to", "goal", "-o", str(target)]) == 2


def test_chakra_traces(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("headway.interop.exporters.chakra")
    target = tmp_path / "out"
    assert run(["export", str(trace), "--to", "chakra", "-o", str(target), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == "chakra"
    assert said["bytes"] == sum(path.stat().st_size for path in target.iterdir())


def test_refusals_are_one_line_and_status_2(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    target.write_text("mine")
    for arguments, complaint in (
        ([str(trace), "--to", "perfetto", "-o", str(target)], "already exists"),
        ([str(trace), "--to", "chakra", "-o", str(target)], "already exists"),
        ([str(trace), "--to", "perfetto", "-o", str(tmp_path / "empty")], "is a folder"),
        ([str(trace), "--to", "perfetto", "-o", str(tmp_path / "no" / "file")], "cannot be written"),
        ([str(tmp_path / "no"), "--to", "perfetto", "-o", str(tmp_path / "new")], "not found"),
        ([str(trace), "--to", "vcd", "-o", str(tmp_path / "new")], "not one of"),
    ):
        assert run(["export", *arguments]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("headway: ")
        assert complaint in line
    assert run(["export", str(trace), "-o", str(tmp_path / "new")]) == 2
    assert "--to" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "out", "trace"]
