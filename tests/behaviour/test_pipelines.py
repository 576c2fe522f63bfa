"""The loop over a pipeline of torch: recorded, diagnosed, replayed, optimized, and run in another order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import headway, last_line, torchrun

from headway.diagnosis import diagnose
from headway.plan import Plan, Prediction
from headway.replayer.as_trace import replayed_trace
from headway.replayer.replayer import Replayer
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.trace.events import Kind
from headway.trace.folder import load_trace
from headway.trace.format import Trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
MICRO_BATCHES, ROWS, WIDTH, STAGES = 4, 2, 32, 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    script = torchrun("train_pipeline.py", "--losses", folder / "stock.json", workers=STAGES)
    done = headway("record", "-o", folder / "trace", "--steps", "3:7", "--", *script)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def trace(recorded: Path) -> Trace:
    return load_trace(recorded / "trace")


def labels(trace: Trace, rank: int, kind: str, peer: int | None = None) -> list[tuple[int, int]]:
    rows = trace.events[rank].of_kind(kind).of_step(trace.steps[0])
    return [(row.stage, row.micro_batch) for row in rows if peer in (None, row.peer)]


def test_passes_and_messages_have_their_stage_and_micro_batch(trace: Trace) -> None:
    for rank in range(STAGES):
        expected = [(rank, number) for number in range(MICRO_BATCHES)]
        for kind in (Kind.FORWARD_PASS, Kind.BACKWARD_PASS):
            assert labels(trace, rank, kind) == expected
        for peer in {rank - 1, rank + 1} & set(range(STAGES)):
            for kind in (Kind.SEND, Kind.RECEIVE):
                assert labels(trace, rank, kind, peer) == expected
        messages = trace.events[rank].of_kind(Kind.SEND, Kind.RECEIVE)
        assert set(messages.size_bytes.tolist()) == {4 * ROWS * WIDTH}


def test_every_stage_has_its_model(trace: Trace) -> None:
    assert len(trace.stages) == STAGES
    for stage in trace.stages:
        assert [parameter.name for parameter in stage.parameters] == ["0.weight", "0.bias"]
        assert stage.optimizer_state_bytes >= 2 * stage.size_bytes
        assert (
            stage.activation_bytes == 3 * 4 * ROWS * WIDTH
        )  # what the linear layer, dropout and tanh put out


def test_what_a_stage_holds_is_measured(trace: Trace) -> None:
    """Of one micro-batch: what dropout and tanh put out, dropout's mask, and what the loss needs."""
    row = 4 * ROWS * WIDTH
    for place, stage in enumerate(trace.stages):
        memory = stage.stage_memory
        assert memory is not None
        assert memory.gradient_bytes == stage.size_bytes
        assert 2 * row <= memory.kept_bytes <= memory.forward_bytes <= 6 * row
        last = place == STAGES - 1
        assert memory.outputs_bytes == (row if last else 0)
        assert memory.end_bytes == (MICRO_BATCHES * row if last else 0)
        assert memory.batch_bytes == (0 if 0 < place < STAGES - 1 else MICRO_BATCHES * row)
        neighbours = (place > 0) + (place < STAGES - 1)
        assert memory.received_bytes == neighbours * MICRO_BATCHES * row, "torch has buffers for all"
    replayer = Replayer(trace)
    planned = [replayer.replay(PipelineStrategy(order=order)) for order in ("1f1b", "eager-1f1b", "gpipe")]
    for rank in range(STAGES):
        peaks = [each.rank_peak_bytes(rank) or 0 for each in planned]
        assert 0 < peaks[0] <= peaks[1] <= peaks[2]
    assert planned[0].rank_peak_bytes(0) != planned[0].rank_peak_bytes(1)


def test_what_halved_backwards_hold_is_told_from_whole_ones(recorded: Path, trace: Trace) -> None:
    """As a recording under zero-bubble finds it, but for small change."""
    plan = recorded / "halves.yaml"
    Plan.pipeline(PipelineStrategy(micro_batches=MICRO_BATCHES, order="zero-bubble"), trace.stages).save(plan)
    script = torchrun("train_pipeline.py", workers=STAGES)
    record = ("record", "-o", recorded / "halves", "--steps", "3:7", "--")
    done = headway("run", "--plan", plan, "--", sys.executable, "-m", "headway", *record, *script)
    assert done.returncode == 0, done.stderr
    row = 4 * ROWS * WIDTH
    for place, stage in enumerate(load_trace(recorded / "halves").stages):
        told, seen = (each.stage_memory and each.stage_memory.halves for each in (trace.stages[place], stage))
        if place == 0:
            assert told is None, "torch's first stage puts all of it off"
            continue
        assert told is not None
        assert seen is not None
        for name in ("input_bytes", "put_off_bytes", "first_weight_bytes", "weight_bytes"):
            assert getattr(told, name) == pytest.approx(getattr(seen, name), rel=0.05, abs=row), name


def test_orders_over_the_memory_limit_are_left_out(recorded: Path) -> None:
    def optimized(*more: str) -> dict[str, Any]:
        done = headway("optimize", recorded / "trace", "-o", recorded / "fits.yaml", "--json", *more)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    plans = {each["name"]: each["peak_bytes"] for each in optimized()["plans"]}
    least = min(plans.values())
    limited = optimized("--memory-limit", f"{int(1.06 * least)}")
    assert 0 < len(limited["plans"]) < len(plans)
    assert all(1.05 * each["peak_bytes"] <= 1.06 * least for each in limited["plans"])
    assert {each["name"] for each in (*limited["plans"], *limited["excluded"])} == set(plans)
    assert yaml.safe_load((recorded / "fits.yaml").read_text())["prediction"]["peak_bytes"] <= 1.06 * least
    done = headway("optimize", recorded / "trace", "--memory-limit", "1k")
    assert done.returncode == 2
    assert "no plan keeps every rank within the memory limit" in last_line(done.stderr)


def test_its_report_shows_the_pipeline(recorded: Path) -> None:
    done = headway("diagnose", recorded / "trace", "--html", recorded / "page.html")
    assert done.returncode == 0, done.stderr
    assert '<svg id="pipeline"' in (recorded / "page.html").read_text()


def test_it_is_diagnosed_and_replayed_as_it_was(recorded: Path, trace: Trace) -> None:
    causes = {one.cause for one in diagnose(trace).findings}
    assert {"pipeline messages", "pipeline bubble"} <= causes
    assert causes.isdisjoint({"communication", "straggler", "imbalance"})
    replayer = Replayer(trace)
    assert replayer.recorded_strategy == PipelineStrategy(order="recorded")
    assert replayer.job.boundary_bytes == (4 * ROWS * WIDTH,) * (STAGES - 1)
    assert 0.25 < replayer.base.step_ms / replayer.recorded_step_ms < 4, "a machine that others use"
    assert replayer.base.graph.schedule.micro_batches == MICRO_BATCHES
    again = replayed_trace(replayer, replayer.base)
    for rank in range(STAGES):
        for kind in (Kind.SEND, Kind.RECEIVE):
            assert len(again.events[rank].of_kind(kind)) == len(trace.events[rank].of_kind(kind))
    parts = diagnose(again).breakdown.values()
    assert sum(each.exposed_communication + each.straggler_wait for each in parts) > 0


def test_it_is_optimized_and_runs_in_the_planned_order(recorded: Path) -> None:
    """Losses are those of the stock schedule, dropout among it; a recording shows the order that ran."""
    plan = recorded / "plan.yaml"
    done = headway("optimize", recorded / "trace", "-o", plan)
    assert done.returncode == 0, done.stderr
    assert "rank 0  F0" in done.stdout, "the order is drawn"
    described = yaml.safe_load(plan.read_text())
    assert described["mesh"] == {"pipeline": STAGES}
    described["parallel"]["pipeline"] = {
        "pipeline": {"order": "kfkb", "group_size": 2, "micro_batches": MICRO_BATCHES}
    }
    plan.write_text(yaml.safe_dump(described))
    script = torchrun("train_pipeline.py", "--losses", recorded / "planned.json", workers=STAGES)
    record = ("record", "-o", recorded / "again", "--steps", "3:7", "--")
    done = headway("run", "--plan", plan, "--", sys.executable, "-m", "headway", *record, *script)
    assert done.returncode == 0, done.stderr
    stock, planned = (json.loads((recorded / f"{name}.json").read_text()) for name in ("stock", "planned"))
    assert planned == pytest.approx(stock, rel=1e-5)
    said = headway("replay", recorded / "trace", "--plan", plan)
    assert "pipeline, 2F2B, 4 micro-batches" in said.stdout
    assert "rank 2  ·" in said.stdout
    again = load_trace(recorded / "again")
    in_force = Replayer(again).recorded_strategy
    assert in_force == PipelineStrategy(order="kfkb", group_size=2, micro_batches=MICRO_BATCHES)
    passes = again.events[1].of_kind(Kind.FORWARD_PASS, Kind.BACKWARD_PASS).of_step(again.steps[0])
    in_order = sorted(passes, key=lambda row: row.start_ns)
    assert "".join(row.kind[0] for row in in_order) == "ffffbbbb"


def test_a_plan_for_another_pipeline_is_refused_before_anything_is_computed(recorded: Path) -> None:
    plan = recorded / "other.yaml"
    strategy = PipelineStrategy(micro_batches=MICRO_BATCHES)
    Plan.pipeline(strategy, load_trace(recorded / "trace").stages).save(plan)
    for arguments, workers, said in (
        (("--micro-batches", "8"), STAGES, "another number of micro-batches; got 8; expected 4"),
        ((), STAGES - 1, "another world size; got 2 workers; expected 3"),
    ):
        script = torchrun("train_pipeline.py", *arguments, workers=workers)
        done = headway("run", "--plan", plan, "--", *script)
        assert done.returncode == 2
        assert said in last_line(done.stderr)


def test_a_plan_that_needs_more_memory_than_there_is_is_refused(recorded: Path) -> None:
    plan = recorded / "large.yaml"
    strategy = PipelineStrategy(micro_batches=MICRO_BATCHES)
    expected = Prediction(step_ms=1.0, baseline_ms=2.0, uncertainty_ms=0.1, peak_bytes=2**60)
    Plan.pipeline(strategy, load_trace(recorded / "trace").stages, prediction=expected).save(plan)
    done = headway("run", "--plan", plan, "--", *torchrun("train_pipeline.py", workers=STAGES))
    assert done.returncode == 2
    assert "the plan needs more memory than a rank has" in last_line(done.stderr)


def test_a_script_without_a_pipeline_does_not_follow_its_plan(recorded: Path) -> None:
    plan = recorded / "unused.yaml"
    strategy = PipelineStrategy(micro_batches=MICRO_BATCHES)
    Plan.pipeline(strategy, load_trace(recorded / "trace").stages[:2]).save(plan)
    done = headway("run", "--plan", plan, "--", *torchrun("train_small.py"))
    assert done.returncode == 2
    assert "the plan was not applied" in last_line(done.stderr)
