"""Bad input through the command line: one line, exit status 2, no traceback, nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import free_port, headway, in_process, last_line
from tests.synthetic import SyntheticJob, write_trace

from headway.cli.demo import _make_room


def refused(folder: Path, *arguments: object) -> str:
    """Run a command that must be refused; returns its one line."""
    before = sorted(path.name for path in folder.iterdir())
    run_command = headway if arguments[0] == "probe" else in_process  # a probe leaves a process group behind
    done = run_command(*arguments)
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
    assert "already exists" in refused(tmp_path, "record", "-o", trace, "--", "true")
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
    assert "contains other files" in refused(tmp_path, "demo", "-o", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_the_demo_removes_only_what_a_demo_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    (folder / "trace").mkdir(parents=True)
    for name in (".headway-demo", "demo.json", "plan.yaml", "thesis.txt"):
        (folder / name).write_text("precious")
    assert "thesis.txt" in refused(tmp_path, "demo", "-o", folder)
    assert len(list(folder.iterdir())) == 5
    (folder / "thesis.txt").unlink()
    (folder / ".headway-demo").unlink()
    (folder / "demo.json").unlink()
    assert "contains other files" in refused(tmp_path, "demo", "-o", folder)
    assert (folder / "plan.yaml").exists()


def test_the_demo_follows_links_and_never_removes_through_them(tmp_path: Path) -> None:
    folder, link, elsewhere = tmp_path / "demo", tmp_path / "link", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("precious")
    folder.mkdir()
    (folder / ".headway-demo").touch()
    (folder / "plan.yaml").touch()
    (folder / "trace").symlink_to(elsewhere)
    link.symlink_to(folder)
    _make_room(link)
    assert [path.name for path in folder.iterdir()] == [".headway-demo"]
    assert (elsewhere / "thesis.txt").exists()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "broken link" in refused(tmp_path, "demo", "-o", tmp_path / "dangling")


def test_a_probe_outside_a_job_or_without_a_place_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "WORLD_SIZE, MASTER_ADDR" in refused(tmp_path, "probe", "-o", tmp_path / "cluster.yaml")
    for name, value in (("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    assert "cannot be written" in refused(tmp_path, "probe", "-o", tmp_path / "none" / "cluster.yaml")
    assert "a folder" in refused(tmp_path, "probe", "-o", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "two" in refused(tmp_path, "probe", "-o", tmp_path / "cluster.yaml")


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_probe_whose_peer_dies_says_so_on_one_line(tmp_path: Path) -> None:
    job = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "headway", "probe", "-o", str(tmp_path / "cluster.yaml")]
    first, peer = (
        subprocess.Popen(command, env={**job, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    )
    with first, peer:
        assert first.stderr is not None
        said = ""
        for line in first.stderr:
            said += line
            if "probing collectives" in line:
                peer.kill()
        assert first.wait(60) == 1
    assert "Traceback" not in said
    assert last_line(said).startswith("headway: the probe was aborted")
    assert list(tmp_path.iterdir()) == []
