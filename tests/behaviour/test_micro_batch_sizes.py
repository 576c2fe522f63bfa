"""One script recorded with several numbers of micro-batches, planned with another, and trained so unchanged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.commands import headway, last_line, torchrun
from torch import nn

from headway.plan import Plan
from headway.replayer.replayer import Replayer
from headway.strategies.pipeline.memory import peak_bytes
from headway.strategies.pipeline.micro_batch_sizes import interpolated
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
STAGES, SAMPLES, WIDTH, STEPS = 2, 1024, 32, 8
COUNTS = (8, 2)
SAME: tuple[str, ...] = ("--samples", str(SAMPLES), "--no-dropout", "--gpipe")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    alike = [(str(count), count, SAME) for count in (*COUNTS, 4)]
    for name, count, same in (*alike, ("other", 4, ("--no-dropout",))):
        script = torchrun("train_pipeline.py", *same, "--micro-batches", str(count), workers=STAGES)
        done = headway("record", "-o", folder / name, "--steps", "3:7", "--", *script)
        assert done.returncode == 0, done.stderr
    return folder


def optimized(folder: Path, *more: object) -> dict[str, Any]:
    done = headway("optimize", *more, "-o", folder / "plan.yaml", "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_all_numbers_are_tried_and_those_between(recorded: Path) -> None:
    found = optimized(recorded, *(recorded / str(each) for each in COUNTS))
    names = [each["name"] for each in found["plans"]]
    assert any("2F2B, 8 micro-batches" in name for name in names)
    assert any("2F2B, 2 micro-batches instead of 8" in name for name in names)
    interpolated = [each for each in found["plans"] if each["name"].endswith("(between 2 and 8)")]
    assert {each["name"].split(", ")[2].split()[0] for each in interpolated} == {"4"}
    assert "times of 4 micro-batches are interpolated between 2 and 8" in found["note"]
    peaks = {each["name"]: each["peak_bytes"] for each in found["plans"]}
    one_by_one = {
        count: next(peak for name, peak in peaks.items() if f"1F1B, {count} micro" in name)
        for count in (2, 4, 8)
    }
    assert one_by_one[8] < one_by_one[4] < one_by_one[2], "larger micro-batches hold more"
    limited = optimized(
        recorded, *(recorded / str(each) for each in COUNTS), "--memory-limit", int(1.13 * one_by_one[8])
    )
    assert not any("2 micro-batches" in each["name"] for each in limited["plans"])


def test_what_was_measured_is_what_is_predicted(recorded: Path) -> None:
    """Passes and messages of every recorded number are its own, whichever recording comes first."""
    one, other = (Replayer(load_trace(recorded / str(each))) for each in COUNTS)
    assert other.job.boundary_bytes[0] == 4 * one.job.boundary_bytes[0]
    names = {
        each["name"]: each["peak_bytes"]
        for each in optimized(recorded, recorded / "2", recorded / "8")["plans"]
    }
    planned = one.replay(PipelineStrategy(micro_batches=8, order="eager-1f1b"))
    assert names["pipeline, eager 1F1B, 8 micro-batches instead of 2"] == planned.peak_bytes


def test_memory_between_recorded_numbers_is_that_of_a_recording(recorded: Path) -> None:
    many, few, real = (Replayer(load_trace(recorded / str(each))).job for each in (*COUNTS, 4))
    found = interpolated(few, many, 4)
    assert found.job.boundary_bytes == real.boundary_bytes
    for one, other in zip(found.job.stages, real.stages, strict=True):
        mine, wanted = one.stage_memory, other.stage_memory
        assert mine is not None
        assert wanted is not None
        assert mine.kept_bytes == pytest.approx(wanted.kept_bytes, rel=0.01)
        assert mine.backward_bytes == pytest.approx(wanted.backward_bytes, rel=0.01)
        assert mine.outputs_bytes == pytest.approx(wanted.outputs_bytes, rel=0.01)
    for order in ("1f1b", "eager-1f1b", "zero-bubble"):
        schedule = PipelineStrategy(micro_batches=4, order=order).schedule_of(STAGES)
        peaks = [
            [peak_bytes(job, schedule, stage) or 0 for stage in range(STAGES)] for job in (found.job, real)
        ]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_recordings_of_other_jobs_are_refused(recorded: Path) -> None:
    for more, said in (
        (recorded / "other", "they differ in the batch, by what stages hand on of all of it"),
        (recorded / "8", "two recordings have the same number of micro-batches; got 8"),
    ):
        done = headway("optimize", recorded / "8", more, "-o", recorded / "refused.yaml")
        assert done.returncode == 2
        assert said in last_line(done.stderr)


def alone() -> list[float]:
    """The losses of whole batches, in one process."""
    parts = []
    for stage in range(STAGES):
        torch.manual_seed(stage)
        parts.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), data)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def planned(recorded: Path, **options: Any) -> Path:
    path = recorded / "by_hand.yaml"
    Plan.pipeline(PipelineStrategy(**options), load_trace(recorded / "8").stages).save(path)
    return path


@pytest.mark.parametrize("count", [2, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_a_script_trains_in_the_plans_micro_batches(recorded: Path, count: int) -> None:
    """One of eight micro-batches, in another number: as one process does, with as many losses as there are of them."""
    plan = planned(recorded, order="kfkb", group_size=2, micro_batches=count, script_micro_batches=8)
    losses = recorded / f"{count}.json"
    script = torchrun("train_pipeline.py", *SAME, "--micro-batches", "8", "--losses", losses, workers=STAGES)
    done = headway("run", "--plan", plan, "--", *script)
    assert done.returncode == 0, done.stderr
    own = torch.tensor(json.loads(losses.read_text())).reshape(STEPS, count).mean(1)
    assert own.tolist() == pytest.approx(alone(), rel=1e-4)


def test_a_recording_under_such_a_plan_is_planned_for_the_same_script(recorded: Path) -> None:
    plan = planned(recorded, micro_batches=2, script_micro_batches=8)
    script = torchrun("train_pipeline.py", *SAME, "--micro-batches", "8", workers=STAGES)
    record = headway(
        "run",
        "--plan",
        plan,
        "--",
        sys.executable,
        "-m",
        "headway",
        "record",
        "-o",
        recorded / "under",
        "--",
        *script,
    )
    assert record.returncode == 0, record.stderr
    replayer = Replayer(load_trace(recorded / "under"))
    assert replayer.recorded_strategy == PipelineStrategy(micro_batches=2, script_micro_batches=8)
    optimized(recorded, recorded / "under", recorded / "8")
    strategy = yaml.safe_load((recorded / "plan.yaml").read_text())["parallel"]["pipeline"]["pipeline"]
    assert strategy.get("script_micro_batches") == (None if strategy["micro_batches"] == 8 else 8)


def test_what_would_train_otherwise_is_refused(recorded: Path) -> None:
    for options, arguments, said in (
        ({"micro_batches": 2}, (), "another number of micro-batches; got 8; expected 2"),
        ({"micro_batches": 2, "script_micro_batches": 4}, (), "another number of micro-batches; got 8"),
        (
            {"micro_batches": 3, "script_micro_batches": 8},
            (),
            "cannot be split into 3 micro-batches of one size",
        ),
        ({"micro_batches": 2, "script_micro_batches": 8}, ("--summed",), "loss is not a mean over samples"),
    ):
        plan = planned(recorded, **options)
        script = torchrun("train_pipeline.py", *SAME, "--micro-batches", "8", *arguments, workers=STAGES)
        done = headway("run", "--plan", plan, "--", *script)
        assert done.returncode, done.stdout
        assert said in done.stderr
