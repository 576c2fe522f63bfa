"""Ctrl-C and SIGTERM while a job is recorded or runs under a plan: what was recorded is kept, nothing else is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.commands import SCRIPTS, communicate, last_line, torchrun
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.diagnosis.diagnosis import diagnose
from headway.integrations import recorded
from headway.plan import Plan
from headway.recording import collectives
from headway.recording.attach import record_this_rank
from headway.recording.recorder import RecordOptions
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.module_spec import model_spec
from headway.trace.folder import assemble, load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BUSY = ("--layers", "60")  # nearly always in a backward, and there in kernels that observe collectives
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
        (to_all, signal.SIGINT, torchrun("train_launched.py", "plain", *BUSY)),
        (to_headway, signal.SIGTERM, torchrun("train_launched.py", "plain", "--pause-s", "0.02")),
        *[
            pytest.param(
                to_all,
                number,
                torchrun("train_launched.py", "plain", *BUSY),
                marks=pytest.mark.exhaustive,
                id=f"{number.name} {time}",
            )
            for number in (signal.SIGINT, signal.SIGTERM)
            for time in range(10)
        ],
        pytest.param(
            to_all,
            signal.SIGINT,
            (sys.executable, str(SCRIPTS / "train_launched.py"), "spawn", "--pause-s", "0.02"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_steps_so_far_are_kept(
    send: Callable[[subprocess.Popen[str], int], None], number: int, how: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "trace"
    status, said = interrupted(send, number, "record", "-o", out, "--steps", "3:100000", "--", *how, *JOB[:2])
    assert status == 128 + number, said
    trace = load_trace(out)
    assert set(trace.events) == {0, 1}, said
    assert trace.steps[:3] == (3, 4, 5)
    assert f"headway: interrupted; {len(trace.steps)} steps recorded, links and cores not measured" in said
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
    told = [line for line in said.splitlines() if line.startswith("headway:")]
    assert told[0].startswith("headway: running under DDP")
    assert len(told) <= 2
    assert all("ms a step" in line for line in told[1:])


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_an_interrupt_inside_ddps_reducer_keeps_the_steps_and_leaves_ddp_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "rank").mkdir()
    recorder = record_this_rank(RecordOptions(folder=tmp_path / "rank", first_step=2, stop_step=1000))
    recorded.call_first(recorder)
    recorder.watch(model, net)
    size, sent, steps = collectives._size_bytes, [0], [0]

    def interrupts(payload: Any) -> int:
        sent[0] += recorder.step == 5
        if sent[0] == 3:  # in the kernel that DDP's reducer calls while it holds its lock
            os.kill(os.getpid(), signal.SIGINT)
        return int(size(payload))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        steps[0] += 1

    monkeypatch.setattr(collectives, "_size_bytes", interrupts)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            step()
    assert steps == [5]
    assert sent[0] >= 3
    assert all(p.grad is not None for p in net.parameters())  # the backward has ended as without Headway
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert assemble(tmp_path / "rank").steps == (2, 3, 4)
    buckets = load_trace(tmp_path / "rank").manifest.ranks[0].buckets
    assert len(buckets) > 3
    step()  # goes on


@pytest.mark.usefixtures("group")
def test_an_interrupt_of_what_follows_the_recording_holds_up_no_exit(tmp_path: Path) -> None:
    (tmp_path / "rank").mkdir()
    recorder = record_this_rank(RecordOptions(folder=tmp_path / "rank"))

    def interrupted_then() -> None:
        raise KeyboardInterrupt

    recorder.when_written(interrupted_then)
    with pytest.raises(KeyboardInterrupt):
        recorder.finish()
    assert recorder.writer is None  # for which the exit of this process would wait
