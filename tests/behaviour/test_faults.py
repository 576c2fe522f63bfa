"""Real ranks, started by hand, of which one is lost: the others end or go on within the stated time, and say why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import limits, workers
from tests.behaviour import fault_cases
from tests.commands import free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

RANKS = 3
GROUP_LIMIT_S = 4.0
MOST_GROUP_LIMIT_S = 12.0  # of a busy machine: every rank that stops costs as much
AFTERWARDS_S = 20.0
"""An exit takes some seconds of it in Gloo, the question who is lost five, and to give up a stopped keeper of the store
as many."""

GO_ON = ("static", "first-come", "stale", "global-division")
NAME_THE_LOST = ("servers", "int8", "asynchronous", "pipeline", "following")
KINDS = ("KILL", "STOP", "TERM", "raise", "os._exit", "sys.exit")
CHEAPEST = (
    ("ddp", "STOP", 0),
    ("pipeline", "STOP", 2),
    ("servers", "os._exit", 2),
    ("static", "KILL", 2),
)


def trial(name: str, kind: str, lost: int, folder: Path, ranks: int = RANKS) -> list[workers.Worker]:
    """Lose rank ``lost`` of a job under the plan called ``name``; returns how the others ended, in time."""
    pipeline = fault_cases.STRATEGIES[name][0] == "pipeline"
    path = fault_cases.plan(name, ranks, folder / ("pipeline" if pipeline else "plan"))
    here = folder / "trial"
    here.mkdir()
    limit_s = min(limits.stretched(GROUP_LIMIT_S), MOST_GROUP_LIMIT_S)
    ended = workers.launch(
        ranks, "tests.behaviour.fault_cases:train", free_port(), str(here), path, kind, lost, limit_s,
        timeout_s=GROUP_LIMIT_S + AFTERWARDS_S, backend="", lost=[lost],
    )  # fmt: skip
    assert (here / "fault").exists(), ended[lost].output
    assert left_behind(str(here)) == []
    return [each for each in ended if each.rank != lost]


def left_behind(trial: str) -> list[str]:
    """Processes that ranks of ``trial`` started and that do not end by themselves soon, and what is in its folder."""
    limit = limits.Limit(10.0)
    while (found := _processes_of(trial)) and not limit.over():
        time.sleep(0.1)
    # Where the process that started a coordinator is killed, its folder goes when the next one starts.
    files = [path.name for path in Path(trial).iterdir()]
    return found + [name for name in files if name != "fault" and not name.startswith("headway-coordinator-")]


def _processes_of(trial: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(fault_cases.TRIAL_VARIABLE) == trial:
                ports = [
                    each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN
                ]
                found.append(f"{process.cmdline()} listening at {ports}")
        except psutil.Error:
            continue
    return found


def trials() -> list[Any]:
    """Every strategy with every kind of fault of the last rank, and those of rank 0, which keeps the store."""
    names = [name for name in fault_cases.STRATEGIES if name != "stock"]
    every = [(name, kind, RANKS - 1) for name in names for kind in KINDS]
    every += [(name, kind, 0) for name in names for kind in ("KILL", "STOP")]
    every += [(name, "leaves", RANKS - 1) for name in (*GO_ON, "asynchronous")]
    return [pytest.param(*each, marks=() if each in CHEAPEST else pytest.mark.exhaustive) for each in every]


@pytest.mark.parametrize(("name", "kind", "lost"), trials())
def test_the_others_end_or_go_on_in_time(name: str, kind: str, lost: int, tmp_path: Path) -> None:
    serves_first = name == "asynchronous" and kind in ("sys.exit", "leaves")  # its exit waits for the others
    goes_on = name in GO_ON or serves_first
    for survivor in trial(name, kind, lost, tmp_path):
        if goes_on:
            assert survivor.status == 0, survivor.output
            assert survivor.result == {"steps": fault_cases.STEPS}
        else:
            assert survivor.status == 1, survivor.output
            said = survivor.output.rpartition("step ")[2]
            assert "Traceback" in said or "headway: " in said
            if fault_cases.STRATEGIES[name][0] != "decoupled":  # whose state is spread over ranks
                assert "saved" in said, "a last checkpoint"
            if name in NAME_THE_LOST:
                assert f"rank {lost} has ended" in said
