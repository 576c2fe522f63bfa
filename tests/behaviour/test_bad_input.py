"""Bad input through the command line: one line, exit status 2, no traceback, nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands import headway, last_line
from tests.synthetic import SyntheticJob, write_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def refused(folder: Path, *arguments: object) -> str:
    """Run a command that must be refused; returns its one line."""
    before = sorted(path.name for path in folder.iterdir())
    done = headway(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(path.name for path in folder.iterdir()) == before
    line = last_line(done.stderr)
    assert line.startswith("headway: ")
    return line


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(SyntheticJob(world_size=2, steps=3), tmp_path / "trace")


def test_a_trace_that_is_missing_empty_or_foreign(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "trace.json").write_text("{}")
    assert "trace not found" in refused(tmp_path, "diagnose", tmp_path / "none")
    assert "empty" in refused(tmp_path, "replay", tmp_path / "empty")
    assert "manifest.json" in refused(
        tmp_path, "optimize", tmp_path / "foreign", "-o", tmp_path / "plan.yaml"
    )


def test_a_trace_that_is_truncated_or_lacks_a_rank(tmp_path: Path, trace: Path) -> None:
    file = trace / "rank-00001.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "truncated" in refused(tmp_path, "diagnose", trace)
    file.unlink()
    assert "lacks rank 1" in refused(tmp_path, "diagnose", trace)


def test_unknown_keys_and_versions_in_yaml(tmp_path: Path, trace: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "format: 9\nstrategy: {ddp: {}}\nworld_size: 2\nmodel: {parameters: 1, size_bytes: 1, fingerprint: a}"
    )
    assert "format" in refused(tmp_path, "replay", trace, "--plan", plan)
    plan.write_text("colour: red")
    assert "plan" in refused(tmp_path, "run", "--plan", plan, "--", "true")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("hosts: [{name: a, workers: 2, up_gbps: 0, down_gbps: 1}]")
    assert "up_gbps" in refused(tmp_path, "replay", trace, "--cluster", cluster)


def test_commands_that_are_wrong(tmp_path: Path, trace: Path) -> None:
    assert "--what-if" in refused(tmp_path, "replay", trace, "--what-if", "bandwidth=fast")
    assert "workers" in refused(tmp_path, "replay", trace, "--what-if", "workers=0")
    assert "--steps" in refused(tmp_path, "record", "-o", tmp_path / "out", "--steps", "9:3", "--", "true")
    assert "no command" in refused(tmp_path, "record", "-o", tmp_path / "out")
    assert "exists already" in refused(tmp_path, "record", "-o", trace, "--", "true")
    assert "cannot start" in refused(tmp_path, "record", "-o", tmp_path / "out", "--", "no-such-command")
    assert "RANK" in refused(tmp_path, "probe", "-o", tmp_path / "cluster.yaml")
    assert "No such command" in refused(tmp_path, "rekord")
    assert "No such option" in refused(tmp_path, "diagnose", trace, "--htlm", "x")


@pytest.mark.parametrize("rate", ["0mbit", "10 gigabit", "fast", "10"])
def test_link_rates_that_are_none(tmp_path: Path, rate: str) -> None:
    assert "rate" in refused(tmp_path, "lab", "run", "--hosts", "2", "--rate", rate, "--", "true")


def test_a_plan_cannot_be_written_where_nothing_can(tmp_path: Path, trace: Path) -> None:
    assert refused(tmp_path, "optimize", trace, "-o", tmp_path / "missing" / "plan.yaml")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(tmp_path, "record", "-o", tmp_path / "file" / "trace", "--", "true")


def test_the_demo_does_not_remove_what_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert "holds something else" in refused(tmp_path, "demo", "-o", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
