"""How labs end: by failures, signals and killed launchers, and that nothing outlives them."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tests.behaviour.lab.jobs import Job, cli, start_cli, wait_until
from tests.commands import communicate

from headway.lab import state
from headway.lab.launch import Mode, run
from headway.lab.processes import members
from headway.lab.spec import LabSpec, override, parse_event

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_the_first_failure_is_the_status_and_ends_the_others() -> None:
    script = "case $RANK in 0) exit 3;; 1) trap 'exit 7' TERM; while :; do sleep 0.05; done;; esac"
    job = Job(LabSpec(hosts=3), ["sh", "-c", script], grace_s=0.3)
    assert job.status == 3
    assert any("rank 0 ended with status 3" in notice for notice in job.notices)


def test_a_rank_that_does_not_end_is_killed() -> None:
    script = "[ $RANK = 0 ] && exit 4; trap '' TERM; while :; do sleep 0.05; done"
    assert Job(LabSpec(hosts=2), ["sh", "-c", script], grace_s=0.2).status == 4


def test_time_is_up() -> None:
    job = Job(LabSpec(hosts=2), ["sleep", "50"], timeout_s=0.2)
    assert job.status == 124


@pytest.mark.namespaces
def test_a_killed_rank_gives_137(any_mode: Mode) -> None:
    spec = override(None, hosts=2, timeline=[parse_event("200ms kill 1")])
    job = Job(spec, ["sh", "-c", "[ $RANK = 0 ] || sleep 50"], mode=any_mode)
    assert job.status == 137


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got {name}; exit 5' {name}; echo up; while :; do sleep 0.05; done"
    with start_cli("run", "--hosts", "2", "--mode", "loopback", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)]
        process.send_signal(number)
        out, _ = communicate(process, 30)
    assert sorted(out.splitlines()) == [f"[rank 0] got {name}", f"[rank 1] got {name}"]
    assert process.returncode == 5


@pytest.mark.namespaces
def test_nothing_outlives_a_killed_launcher(any_mode: Mode) -> None:
    """Not even a rank's own child in a session of its own, that ignores signals."""
    script = "(trap '' TERM HUP; setsid sleep 300 >/dev/null 2>&1 &); echo up; sleep 300"
    with start_cli("run", "--hosts", "2", "--mode", any_mode, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)]
        (lab,) = state.labs()
        assert lab.state == "running"
        assert len(lab.pids) >= 5
        listed = json.loads(cli("list", "--json").stdout)
        assert [(row["id"], row["state"]) for row in listed["labs"]] == [(lab.record.id, "running")]
        assert cli("clean").returncode == 0
        assert len(state.labs()[0].pids) >= 5
        process.kill()
        process.wait()
    wait_until(lambda: not members(lab.record.id) and not lab.record.orchestrator.alive)
    assert state.labs()[0].state == "leftover"
    assert lab.record.id in cli("clean").stdout
    assert json.loads(cli("list", "--json").stdout)["labs"] == []


def test_clean_ends_what_a_killed_orchestrator_left() -> None:
    """Without a process namespace, killing both parents at once leaves ranks' children behind."""
    script = "(setsid sleep 300 >/dev/null 2>&1 &); echo up; sleep 300"
    with start_cli("run", "--hosts", "1", "--mode", "loopback", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        (lab,) = state.labs()
        process.send_signal(signal.SIGSTOP)
        os.kill(lab.record.orchestrator.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    assert members(lab.record.id)
    cleaned, stuck = state.clean()
    assert [one.record.id for one in cleaned] == [lab.record.id]
    assert stuck == []
    assert not members(lab.record.id)


def test_a_callback_that_fails_ends_the_lab() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run(LabSpec(hosts=2), ["sh", "-c", "echo; sleep 300"], mode="loopback", on_line=fail)
    assert state.labs() == []
