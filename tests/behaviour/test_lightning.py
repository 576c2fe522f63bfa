"""A job of Lightning's: its forward and backward run inside ``optimizer.step``, and its wrapper goes when fit ends."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.commands import headway, torchrun

from headway.diagnosis import diagnose
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.precision import Precision
from headway.plan import Plan
from headway.replayer.replayer import Replayer
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.trace.events import Kind
from headway.trace.folder import load_trace

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="Lightning is not installed"),
]

STEPS = 12


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    done = headway(
        "record", "-o", folder / "trace", "--steps", f"4:{STEPS}", "--",
        *torchrun("train_lightning.py", folder / "stock.json", STEPS), timeout_s=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_the_closure_is_forward_and_backward(recorded: Path) -> None:
    trace = load_trace(recorded / "trace")
    for events in trace.events.values():
        for step in trace.steps:
            rows = list(events.of_step(step))
            (backward,) = (row for row in rows if row.kind == Kind.BACKWARD_PASS)
            (update,) = (row for row in rows if row.kind == Kind.OPTIMIZER)
            assert backward.end_ns <= update.start_ns
    found = diagnose(trace)
    for parts in found.breakdown.values():
        assert parts.computation > 0
        assert parts.rest > -1e-6
    assert not [note for note in found.notes if "No forward or backward" in note]
    replayer = Replayer(trace)
    assert 0.25 < replayer.base.step_ms / replayer.recorded_step_ms < 4  # thread switches on a shared machine


def test_a_decoupled_plan_trains_tests_and_saves_the_same(recorded: Path) -> None:
    trace = load_trace(recorded / "trace")
    plan = recorded / "plan.yaml"
    Plan.data_parallel(DecoupledStrategy(), 2, trace.model).save(plan)
    done = headway(
        "run", "--plan", plan, "--", *torchrun("train_lightning.py", recorded / "ours.json", STEPS), timeout_s=180
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stock, ours = (json.loads((recorded / name).read_text()) for name in ("stock.json", "ours.json"))
    for what in stock:  # in another order of summing, because gradients are clipped by norm
        assert ours[what] == pytest.approx(stock[what], rel=1e-5, abs=1e-6), what


def test_manual_optimization_trains_the_same_decoupled(recorded: Path) -> None:
    trace = load_trace(recorded / "trace")
    plan, results = (
        recorded / "by-hand.yaml",
        [recorded / f"{each}-by-hand.json" for each in ("stock", "ours")],
    )
    Plan.data_parallel(DecoupledStrategy(), 2, trace.model).save(plan)
    script = [torchrun("train_lightning.py", out, STEPS, "by-hand") for out in results]
    done = [headway("run", "--plan", plan, "--", *script[1], timeout_s=180)]
    done.append(subprocess.run(script[0], capture_output=True, text=True, check=False, timeout=180))
    assert [each.returncode for each in done] == [0, 0], [each.stderr[-2000:] for each in done]
    stock, ours = (json.loads(each.read_text()) for each in results)
    for what in stock:
        assert ours[what] == pytest.approx(stock[what], rel=1e-5, abs=1e-6), what


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_its_steps_of_training_compute_under_autocast(
    recorded: Path, dtype: Literal["bfloat16", "float16"]
) -> None:
    lower = Precision(dtype=dtype)
    found, out = ran(recorded, lower, dtype)
    assert found.returncode == 0, found.stderr
    stock, ours = (json.loads(each.read_text()) for each in (recorded / "stock.json", out))
    assert ours != stock, "something is rounded"
    for what in stock:
        assert ours[what] == pytest.approx(stock[what], rel=0.05, abs=0.05), what


def test_batches_that_its_steps_take_are_not_split(recorded: Path) -> None:
    found, _ = ran(recorded, Accumulate(micro_batches=2), "split")
    assert found.returncode == 2
    assert "a forward replaced on the instance, as by Lightning" in found.stderr


def ran(recorded: Path, changed: Pass, name: str) -> tuple[Any, Path]:
    """What came of the job under a plan of stock DDP with a pass, and the file of its results."""
    trace = load_trace(recorded / "trace")
    plan = Plan.data_parallel(DistributedDataParallelStrategy(), 2, trace.model)
    path, out = recorded / f"{name}.yaml", recorded / f"{name}.json"
    plan.model_copy(update={"passes": (changed,), "changes_training": changed.changes_training}).save(path)
    job = torchrun("train_lightning.py", out, STEPS)
    return headway("run", "--plan", path, "--", *job, timeout_s=180), out
