"""Ctrl-C and SIGTERM while a job is recorded or runs under a plan: what was recorded is kept, nothing else is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.commands import SCRIPTS, communicate, last_line, torchrun
from torch import nn

from headway.diagnosis.diagnosis import diagnose
from headway.plan import Plan
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.module_spec import model_spec
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

JOB = ("--steps", "100000", "--pause-s", "0.02")


def to_all(process: subprocess.Popen[str], number: int) -> None:
    """As a terminal does on Ctrl-C: every process of the group is told."""
    os.killpg(process.pid, number)


def to_headway(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)


@pytest.fixture(autouse=True)
def _ctrl_c_is_heeded() -> Iterator[None]:
    """Tests may run where it is ignored, as shells have it for what they start in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(
    send: Callable[[subprocess.Popen[str], int], None], number: int, *command: object, at: str = "stepped 12"
) -> tuple[int, str]:
    """Send a signal to ``headway`` with ``command`` when the job prints ``at``; exit status and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(at):
                send(process, number)
                break
        _, said = communicate(process, 120)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize(
    ("send", "number", "how"),
    [
        (to_all, signal.SIGINT, torchrun("train_launched.py", "plain")),
        (to_headway, signal.SIGTERM, torchrun("train_launched.py", "plain")),
        pytest.param(
            to_all,
            signal.SIGINT,
            (sys.executable, str(SCRIPTS / "train_launched.py"), "spawn"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["torchrun, Ctrl-C", "torchrun, SIGTERM", "spawn, Ctrl-C"],
)
def test_the_steps_so_far_are_kept(
    send: Callable[[subprocess.Popen[str], int], None], number: int, how: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "trace"
    status, said = interrupted(send, number, "record", "-o", out, "--steps", "3:100000", "--", *how, *JOB)
    assert status == 128 + number, said
    trace = load_trace(out)
    assert set(trace.events) == {0, 1}, said
    assert trace.steps[:3] == (3, 4, 5)
    assert diagnose(trace).verdict
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_nothing_is_left_where_nothing_was_recorded(tmp_path: Path) -> None:
    job = (*torchrun("train_launched.py", "plain"), *JOB)
    record = ("record", "-o", tmp_path / "trace", "--steps", "90000:90001", "--")
    status, said = interrupted(to_headway, signal.SIGINT, *record, *job)
    assert status == 130
    assert last_line(said) == "headway: interrupted before anything was recorded"
    assert list(tmp_path.iterdir()) == []


def test_a_run_under_a_plan_ends_with_the_signals_status(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plan = Plan.data_parallel(DistributedDataParallelStrategy(), 2, model_spec(model))
    plan.save(tmp_path / "plan.yaml")
    job = (*torchrun("train_launched.py", "plain"), *JOB)
    status, said = interrupted(
        to_headway, signal.SIGTERM, "run", "--plan", tmp_path / "plan.yaml", "--", *job, at="stepped 0"
    )
    assert status == 143
    assert "headway:" not in said
