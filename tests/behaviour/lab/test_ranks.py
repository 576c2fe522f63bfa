"""Ranks in the lab, with real processes: what they see, and how they are slowed down."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.behaviour.lab.jobs import Job, cli, start_cli

from headway.errors import LabError
from headway.lab import slow, state
from headway.lab.launch import Mode, best_mode, run
from headway.lab.spec import LabSpec, override, parse_event

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.mark.namespaces
def test_ranks_see_torchruns_environment(any_mode: Mode) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE HEADWAY_HOST"
    script = f'for name in {names}; do eval "printf %s, \\$$name"; done'
    spec = LabSpec(hosts=2, workers_per_host=2)
    job = Job(spec, ["sh", "-c", script], mode=any_mode)
    assert job.status == 0
    assert [job.text_of(rank) for rank in range(4)] == [
        ["0,0,4,2,0,2,host0,"],
        ["1,1,4,2,0,2,host0,"],
        ["2,0,4,2,1,2,host1,"],
        ["3,1,4,2,1,2,host1,"],
    ]
    assert state.labs() == []


def test_the_best_mode_is_the_one_auto_takes() -> None:
    job = Job(LabSpec(hosts=1), ["sh", "-c", "echo $HEADWAY_LAB_MODE"], mode="auto")
    assert job.text_of(0) == [best_mode()]


def test_loopback_says_that_links_are_unshaped() -> None:
    job = Job(LabSpec(hosts=2, rate="80mbit"), ["true"])
    assert any("links are unshaped" in notice for notice in job.notices)


def test_the_command_line_prefixes_lines_and_keeps_the_streams_apart() -> None:
    result = cli("run", "--hosts", "1", "--mode", "loopback", "--", "sh", "-c", "echo out; echo err >&2")
    assert result.returncode == 0
    assert result.stdout == "[rank 0] out\n"
    assert "[rank 0] err\n" in result.stderr
    assert "headway lab: 1 hosts, 1 workers, plain loopback\n" in result.stderr
    bare = cli("run", "--hosts", "1", "--mode", "loopback", "--no-prefix", "--", "echo", "out")
    assert bare.stdout == "out\n"


def test_a_lab_file_and_flags(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text("hosts: 3\nrate: 80mbit\npace: {0: 2.0}\n")
    script = 'echo "$WORLD_SIZE $HEADWAY_PACE_FACTOR"'
    flags = ("--hosts", "1", "--pace", "0=3", "--mode", "loopback", "--no-prefix")
    result = cli("run", str(tmp_path / "lab.yaml"), *flags, "--", "sh", "-c", script)
    assert result.stdout == "1 3\n"


def test_a_slow_worker_gets_its_share_and_recovers(tmp_path: Path) -> None:
    script = tmp_path / "spin.py"
    script.write_text(
        "import time\n"
        "now = time.monotonic\n"
        "begun, last = now(), now()\n"
        "stopped = [0.0, 0.0, 0.0, 0.0]\n"
        "while last < begun + 4:\n"
        "    time.sleep(0.0005)\n"
        "    gap, last = now() - last, now()\n"
        "    stopped[min(3, int(last - begun))] += gap if gap > 0.02 else 0.0\n"
        "print(stopped[0], stopped[3])\n"
    )
    events = [parse_event("2s slow 0 1")]
    spec = override(None, hosts=1, slow={0: "0.25"}, slow_by="signals", timeline=events)
    job = Job(spec, [sys.executable, "-S", str(script)])
    assert job.status == 0
    assert any("stopped for part of every 40 ms" in notice for notice in job.notices)
    # A quarter of the first second runs, the fourth is whole but for what else the machine does.
    first_s, fourth_s = (float(number) for number in job.text_of(0)[0].split())
    assert 0.5 < first_s < 0.95
    assert fourth_s < 0.5 * first_s


def groups_left() -> list[Path]:
    """The control groups of this process's own labs, or skip where quotas are not permitted."""
    spec = LabSpec(hosts=1, slow={0: 0.5}, slow_by="quota")
    try:
        run(spec, ["true"], mode="loopback", on_notice=lambda _: None)
        return list(slow.find_parent().path.glob(f"headway-lab-{os.getpid()}-*"))
    except LabError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.namespaces
def test_a_quota_bounds_a_worker_and_its_children(any_mode: Mode) -> None:
    """The kernel keeps to a quota whatever else the machine does: CPU time may be less, never much more."""
    assert groups_left() == []
    spin = (
        "import os, time\n"
        "child = os.fork()\n"
        "end = time.monotonic() + 1\n"
        "while time.monotonic() < end: pass\n"
        "if child: os.wait(); print(sum(os.times()[:4]))\n"
    )
    spec = override(
        None, hosts=2, slow={1: "0.25"}, slow_by="quota", timeline=[parse_event("900ms slow 0 0.5")]
    )
    job = Job(spec, [sys.executable, "-S", "-c", spin], mode=any_mode)
    assert job.status == 0
    assert float(job.text_of(1)[0]) < 0.4
    assert any("a CPU quota (cgroup v" in notice for notice in job.notices)
    assert "900ms: rank 0 gets 50% of a core" in job.notices
    assert groups_left() == []


def test_clean_empties_and_removes_the_control_group_that_a_killed_lab_left() -> None:
    """What is in the group is the lab's, also a process that has forgotten its environment."""
    assert groups_left() == []
    flags = ("--hosts", "1", "--mode", "loopback", "--slow", "0=0.5", "--slow-by", "quota")
    script = "(env -i setsid sleep 300 >/dev/null 2>&1 &); echo up; sleep 300"
    with start_cli("run", *flags, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        (lab,) = state.labs()
        assert lab.record.group is not None
        assert lab.record.group.exists()
        assert state.clean() == ([], [])
        process.send_signal(signal.SIGSTOP)
        os.kill(lab.record.orchestrator.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    assert lab.record.group.exists()
    assert cli("clean").returncode == 0
    assert not lab.record.group.exists()
    assert state.labs() == []


@pytest.mark.parametrize("slow_by", ["auto", "quota"])
def test_groups_that_turn_out_not_to_work(monkeypatch: pytest.MonkeyPatch, slow_by: str) -> None:
    def refuse(*_: object) -> None:
        raise slow.NotPermittedError("enough groups")

    monkeypatch.setattr(slow, "find_parent", lambda: slow.Parent(Path("/groups"), 2, is_own=True))
    monkeypatch.setattr(slow.Quotas, "make", refuse)
    spec = override(None, hosts=1, slow={0: "0.5"}, slow_by=slow_by)
    if slow_by == "auto":
        job = Job(spec, ["true"])
        assert job.status == 0
        assert job.notices[-1].endswith("(no CPU quota: enough groups)")
    else:
        with pytest.raises(LabError, match="not permitted here; got enough groups"):
            Job(spec, ["true"])
    assert state.labs() == []
