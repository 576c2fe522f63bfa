"""Real ranks, started by hand, of which one is lost: the others end or go on within the stated time, and say why."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from tests import limits, workers
from tests.behaviour import fault_cases
from tests.commands import free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

RANKS = 3
GROUP_LIMIT_S = 4.0
MOST_GROUP_LIMIT_S = 12.0  # of a busy machine: every rank that stops costs as much
AFTERWARDS_S = (
    20.0  # of which an exit takes some seconds in Gloo, and the store's keeper as many to be given up
)

ENDS = (
    "ddp",
    "int8",
    "parameters",
    "gradients",
    "servers",
    "asynchronous",
    "local-sgd",
    "pipeline",
    "following",
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
    return found + [path.name for path in Path(trial).iterdir() if path.name != "fault"]


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


@pytest.mark.parametrize("name", ["ddp", "servers", "pipeline"])
def test_a_rank_0_that_stops_and_keeps_the_store_is_given_up(name: str, tmp_path: Path) -> None:
    for survivor in trial(name, "STOP", 0, tmp_path):
        assert survivor.status == 1
        assert "rank 0" in survivor.output or "Traceback" in survivor.output
