"""The loop over a pipeline with two stages a rank: recorded, diagnosed, replayed, optimized, run in another order."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from tests.commands import headway, last_line, torchrun

from headway.diagnosis import diagnose
from headway.replayer.replayer import Replayer
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.trace.events import Kind
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
RANKS, STAGES, MICRO_BATCHES, ROWS = 2, 4, 4, 2
SCRIPT = ("train_pipeline.py", "--interleaved")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    script = torchrun(*SCRIPT, "--losses", folder / "stock.json", workers=RANKS)
    done = headway("record", "-o", folder / "trace", "--steps", "3:7", "--", *script)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_is_diagnosed_and_replayed_as_it_was(recorded: Path) -> None:
    trace = load_trace(recorded / "trace")
    assert trace.ranks_of_stages == {0: (0,), 1: (1,), 2: (0,), 3: (1,)}
    assert [len(stage.parameters) for stage in trace.stages] == [2] * STAGES
    assert all(stage.optimizer_state_bytes > 2 * stage.size_bytes for stage in trace.stages), "two moments"
    assert "pipeline bubble" in {one.cause for one in diagnose(trace).findings}
    replayer = Replayer(trace)
    assert replayer.recorded_strategy == PipelineStrategy(order="recorded")
    # Both neighbours of a rank are one here, and only the order of its messages tells what they are.
    assert replayer.job.boundary_bytes == tuple(4 * ROWS * width for width in (16, 24, 32))
    assert 0.25 < replayer.base.step_ms / replayer.recorded_step_ms < 4, "a machine that others use"
    assert len(replayer.base.peaks_bytes or ()) == RANKS


def test_it_is_optimized_and_runs_in_the_planned_order(recorded: Path) -> None:
    """Losses are those of the stock schedule; a recording shows the order that ran."""
    plan = recorded / "plan.yaml"
    done = headway("optimize", recorded / "trace", "-o", plan)
    assert done.returncode == 0, done.stderr
    assert "looped GPipe" in done.stdout
    described = yaml.safe_load(plan.read_text())
    assert described["mesh"] == {"pipeline": RANKS}
    order = {"order": "looped", "micro_batches": MICRO_BATCHES}
    described["parallel"]["pipeline"] = {"pipeline": order}
    plan.write_text(yaml.safe_dump(described))
    script = torchrun(*SCRIPT, "--losses", recorded / "planned.json", workers=RANKS)
    record = ("record", "-o", recorded / "again", "--steps", "3:7", "--no-measuring", "--")
    done = headway("run", "--plan", plan, "--", sys.executable, "-m", "headway", *record, *script)
    assert done.returncode == 0, done.stderr
    stock, planned = (json.loads((recorded / f"{name}.json").read_text()) for name in ("stock", "planned"))
    assert planned == pytest.approx(stock, rel=1e-5)
    assert len(stock) == 8 * MICRO_BATCHES
    again = load_trace(recorded / "again")
    assert Replayer(again).recorded_strategy == PipelineStrategy.model_validate(order)
    passes = again.events[1].of_kind(Kind.FORWARD_PASS, Kind.BACKWARD_PASS).of_step(again.steps[0])
    in_order = sorted(passes, key=lambda row: row.start_ns)
    assert (
        "".join(f"{row.stage}{row.kind[0]}" for row in in_order) == "1f" * 4 + "3f" * 4 + "3b" * 4 + "1b" * 4
    )
    assert "looped GPipe, 4 micro-batches" in headway("replay", recorded / "trace", "--plan", plan).stdout


def test_orders_of_one_stage_a_rank_are_refused(recorded: Path) -> None:
    plan = recorded / "plan.yaml"
    described = yaml.safe_load(plan.read_text())
    described["parallel"]["pipeline"] = {"pipeline": {"order": "1f1b", "micro_batches": MICRO_BATCHES}}
    other = recorded / "other.yaml"
    other.write_text(yaml.safe_dump(described))
    refused = headway("replay", recorded / "trace", "--plan", other)
    assert refused.returncode == 2
    assert "does not fit the number of stages per rank" in last_line(refused.stderr), refused.stderr
    refused = headway("run", "--plan", other, "--", *torchrun(*SCRIPT, workers=RANKS))
    assert refused.returncode == 2
    assert "does not fit the number of stages per rank" in refused.stderr
