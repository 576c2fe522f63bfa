"""The loop over pipelines side by side: recorded, replayed, optimized, and run in another order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from tests import workers
from tests.behaviour import parallel_pipeline_cases as cases
from tests.commands import headway, last_line, torchrun

from headway.replayer.replayer import Replayer
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.trace.events import Kind
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]
SCRIPT = ("train_pipelines_in_parallel.py", "--pace-ms", "10")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("side by side")
    script = torchrun(*SCRIPT, "--data-first", "--weights", folder / "stock.pt", workers=4)
    done = headway("record", "-o", folder / "trace", "--steps", "3:7", "--", *script)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_stage_hands_its_last_gradient_on_before_its_replicas_have_added_up_theirs() -> None:
    """They wait until it has arrived: a stage that waited for them before would wait for ever."""
    found = workers.run(
        4, "tests.behaviour.parallel_pipeline_cases:held_back", timeout_s=100, group_timeout_s=60
    )
    expected = cases.alone()
    for rank, orders in enumerate(found):
        for order, steps in orders.items():
            for number, gradients in enumerate(steps):
                wanted = expected[number][rank % cases.STAGES]
                assert gradients == pytest.approx(wanted, rel=1e-4, abs=1e-6), f"{order}, rank {rank}"


def test_it_is_replayed_as_it_was(recorded: Path) -> None:
    trace = load_trace(recorded / "trace")
    assert len(trace.stages) == 2
    replayer = Replayer(trace)
    assert dict(replayer.job.mesh) == {"data": 2, "pipeline": 2}
    data = DistributedDataParallelStrategy(bucket_cap_mb=25)
    assert replayer.recorded_strategy == MeshStrategy(pipeline=PipelineStrategy(order="recorded"), data=data)
    # Devices are paced, so that most of the step does not hang on what else the machine does.
    assert 0.5 < replayer.base.step_ms / replayer.recorded_step_ms < 2
    groups = {frozenset(each.members) for each in replayer.base.graph.collectives if each.bucket >= 0}
    assert groups == {frozenset((0, 2)), frozenset((1, 3))}
    reduced = [row for row in trace.events[1].of_kind(Kind.COLLECTIVE) if row.bucket >= 0]
    assert len(reduced) == len(trace.steps)


def test_it_is_optimized_and_runs_in_the_planned_order(recorded: Path) -> None:
    """Parameters are those of the stock schedule, and equal on both replicas of a stage."""
    import torch

    plan = recorded / "plan.yaml"
    done = headway("optimize", recorded / "trace", "-o", plan)
    assert done.returncode == 0, done.stderr
    described = yaml.safe_load(plan.read_text())
    assert described["mesh"] == {"data": 2, "pipeline": 2}
    order = {"order": "kfkb", "group_size": 2, "micro_batches": 4}
    described["parallel"]["pipeline"] = {"pipeline": order}
    plan.write_text(yaml.safe_dump(described))
    script = torchrun(*SCRIPT, "--data-first", "--weights", recorded / "planned.pt", workers=4)
    record = ("record", "-o", recorded / "again", "--steps", "3:7", "--no-measuring", "--")
    done = headway("run", "--plan", plan, "--", sys.executable, "-m", "headway", *record, *script)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        stock, planned = (torch.load(recorded / f"{name}.pt.{rank}") for name in ("stock", "planned"))
        replica = torch.load(recorded / f"planned.pt.{(rank + 2) % 4}")
        for name, value in planned.items():
            torch.testing.assert_close(value, stock[name])
            torch.testing.assert_close(value, replica[name], rtol=0, atol=0)
    again = load_trace(recorded / "again")
    replayer = Replayer(again)
    in_force = replayer.recorded_strategy
    assert isinstance(in_force, MeshStrategy)
    assert in_force.pipeline == PipelineStrategy.model_validate(order)
    assert 0.5 < replayer.base.step_ms / replayer.recorded_step_ms < 2
    last = [row for row in again.events[1].of_kind(Kind.BACKWARD_PASS) if row.micro_batch == 3]
    sent = [row for row in again.events[1].of_kind(Kind.SEND) if row.micro_batch == 3]
    assert len(last) == len(sent) == len(again.steps)
    for backward, message in zip(last, sent, strict=True):
        assert backward.start_ns < message.enqueue_ns < backward.end_ns


def test_halved_backwards_are_refused_before_anything_is_trained(recorded: Path) -> None:
    plan = recorded / "halved.yaml"
    described = yaml.safe_load((recorded / "plan.yaml").read_text())
    described["parallel"]["pipeline"] = {"pipeline": {"order": "zero-bubble", "micro_batches": 4}}
    plan.write_text(yaml.safe_dump(described))
    done = headway("run", "--plan", plan, "--", *torchrun(*SCRIPT, "--data-first", workers=4))
    assert done.returncode == 2
    assert "when backward passes are split" in last_line(done.stderr)
