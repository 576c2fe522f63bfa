"""Jobs as people start them, with torchrun and without: recorded, or said not to be; under a plan, or refused."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from tests.commands import SCRIPTS, headway, last_line, torchrun
from torch import nn

from headway.plan import Plan
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.module_spec import model_spec
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SCRIPT = (sys.executable, SCRIPTS / "train_launched.py")
PATIENCE_S = 240


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan for a model that no script here has."""
    made_for = model_spec(nn.Linear(2, 2))
    path = tmp_path / "plan.yaml"
    Plan.data_parallel(DistributedDataParallelStrategy(), 2, made_for).save(path)
    return path


def started(how: str, folder: Path) -> tuple[object, ...]:
    """The command that starts a job of two ranks in one of the ways that know no RANK from the start."""
    if how != "slurm":
        return (*SCRIPT, how)
    tasks = " & ".join(
        f"SLURM_PROCID={rank} SLURM_NTASKS=2 MEETING=file://{folder}/meeting {shlex.join(map(str, SCRIPT))} slurm"
        for rank in range(2)
    )
    return ("bash", "-c", f"{tasks} & wait")


@pytest.mark.exhaustive
def test_an_evaluation_that_a_rank_starts_is_neither_recorded_nor_planned(tmp_path: Path) -> None:
    job = torchrun("train_with_evaluation.py")
    out = tmp_path / "trace"
    recorded = headway("record", "-o", out, "--steps", "3:8", "--", *job, timeout_s=PATIENCE_S)
    assert recorded.returncode == 0, recorded.stderr
    trace = load_trace(out)
    assert (trace.world_size, trace.steps) == (2, (3, 4, 5, 6, 7))
    planned = model_spec(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    Plan.data_parallel(DistributedDataParallelStrategy(), 2, planned).save(tmp_path / "plan.yaml")
    ran = headway("run", "--plan", tmp_path / "plan.yaml", "--", *job, timeout_s=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    for each in (recorded, ran):
        assert "evaluation ended with 0" in each.stdout
        assert each.stderr.count("and is not the job's") == 1


@pytest.mark.parametrize(
    "how", ["spawn", pytest.param("fork", marks=pytest.mark.exhaustive), "slurm", "lightning"]
)
def test_ranks_are_recorded_however_they_are_started(how: str, tmp_path: Path) -> None:
    done = headway(
        "record", "-o", tmp_path / "trace", "--steps", "3:8", "--", *started(how, tmp_path), timeout_s=PATIENCE_S
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "headway:" not in done.stderr
    trace = load_trace(tmp_path / "trace")
    assert trace.world_size == len(trace.events) == 2
    assert trace.steps == tuple(range(3, 8))
    assert all(info.clock.uncertainty_ns < 1e9 for info in trace.manifest.ranks)
    assert trace.manifest.run
    assert not list(tmp_path.glob(".*"))


def test_training_without_a_process_group_is_said_at_once_and_goes_on(tmp_path: Path) -> None:
    done = headway(
        "record", "-o", tmp_path / "trace", "--", *SCRIPT, "alone", "--steps", 9, timeout_s=PATIENCE_S
    )
    assert done.stdout.count("stepped") == 9
    assert done.returncode == 2
    first, last = (line for line in done.stderr.splitlines() if line.startswith("headway: "))
    assert "nothing is being recorded: process" in first
    assert "without a process group" in first
    assert "nothing was recorded" in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "way",
    [
        "caught",
        *(pytest.param(way, marks=pytest.mark.exhaustive) for way in ("hooked", "spawned")),
        "unwrapped",
        "alone",
    ],
)
def test_a_plan_that_is_not_followed_is_refused_last_of_all(way: str, plan: Path) -> None:
    job: tuple[object, ...] = {
        "caught": (*torchrun("train_launched.py", "plain", "--catches"),),
        "hooked": (*torchrun("train_launched.py", "plain", "--excepthook"),),
        "spawned": (*SCRIPT, "spawn"),
        "unwrapped": (*torchrun("train_launched.py", "plain", "--unwrapped"),),
        "alone": (*SCRIPT, "alone", "--steps", 3),
    }[way]
    done = headway("run", "--plan", plan, "--", *job, timeout_s=PATIENCE_S)
    assert done.returncode == 2, done.stderr
    said = {"unwrapped": "before any DistributedDataParallel", "alone": "of which no process"}
    assert said.get(way, "the plan is for another model") in last_line(done.stderr)
    assert last_line(done.stderr).startswith("headway: ")
    assert way == "alone" or "stepped" not in done.stdout
    # No traceback goes deeper into Headway than the call that refused.
    assert "headway/plan/" not in done.stderr


def test_what_is_known_before_is_refused_before_anything_starts(plan: Path) -> None:
    for command in (torchrun("train_launched.py", "plain", workers=3), ("true",)):
        done = headway("run", "--plan", plan, "--", *command)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert ("got 3 workers" if len(command) > 1 else "was not applied") in line
