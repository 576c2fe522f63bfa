"""Jobs as most language models are trained, through the whole loop: record, replay, optimize, run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import headway, torchrun

from headway.trace.events import Kind
from headway.trace.folder import load_trace
from headway.trace.format import Trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

LIMIT_S = 180


def recorded(folder: Path, script: str, *options: object) -> Trace:
    """Record ``script`` into ``folder``, with its losses next to the trace."""
    job = torchrun(script, *options, "--losses", folder / "stock.json")
    done = headway("record", "-o", folder / "trace", "--steps", "3:8", "--", *job, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return load_trace(folder / "trace")


def optimized_and_run(folder: Path, script: str, *options: object, strategy: str = "decoupled") -> Any:
    """What ``script`` trained under the best plan of ``strategy``, and what it trained when it was recorded."""
    plan, losses = folder / "plan.yaml", folder / "planned.json"
    found = headway("optimize", folder / "trace", "-o", plan, "--strategy", strategy, timeout_s=LIMIT_S)
    assert found.returncode == 0, found.stderr
    job = torchrun(script, *options, "--losses", losses)
    done = headway("run", "--plan", plan, "--", *job, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(losses.read_text()), json.loads((folder / "stock.json").read_text())


def assert_uses_are_no_bucket(trace: Trace) -> None:
    """Each step's one all-reduce of uses is in the trace, and waited for with the buckets."""
    assert trace.model.find_unused_parameters
    for events in trace.events.values():
        for step in trace.steps:
            *_, backward = events.of_step(step).of_kind(Kind.BACKWARD_PASS)
            uses = [
                row
                for row in events.of_step(step).of_kind(Kind.COLLECTIVE)
                if row.name == "all_reduce" and row.bucket < 0 and row.size_bytes == trace.model.uses_bytes
                and backward.start_ns <= row.enqueue_ns <= backward.end_ns
            ]  # fmt: skip
            assert len(uses) == 1


def test_unused_parameters_and_accumulation(tmp_path: Path) -> None:
    options = ("--find-unused", "--accumulate", 2)
    trace = recorded(tmp_path, "train_language.py", *options)
    assert_uses_are_no_bucket(trace)
    done = headway("replay", tmp_path / "trace", "--json")
    assert done.returncode == 0, done.stderr
    for strategy in ("ddp", "decoupled"):
        planned, stock = optimized_and_run(tmp_path, "train_language.py", *options, strategy=strategy)
        assert planned["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert planned["checksum"] == pytest.approx(stock["checksum"], rel=1e-5)


def reads_of(trace: Trace) -> list[tuple[str, str]]:
    """What gradients were read for in every step alike, on every rank, between backward and step."""
    found = set()
    for events in trace.events.values():
        for step in trace.steps:
            rows = events.of_step(step)
            *_, backward = rows.of_kind(Kind.BACKWARD_PASS)
            (update,) = rows.of_kind(Kind.OPTIMIZER)
            reads = list(rows.of_kind(Kind.READ))
            assert all(backward.end_ns <= r.start_ns < r.end_ns <= update.start_ns for r in reads)
            assert not len(rows.of_kind(Kind.GRADIENT_READ)), "all gradients were read"
            found.add(tuple((row.name, row.algorithm) for row in reads))
    (alike,) = found
    return list(alike)


def test_clipping_and_unscaling_are_recorded_where_they_are_whole_and_where_they_are_sharded(
    tmp_path: Path,
) -> None:
    options = ("--clip", 0.5, "--scale")
    assert reads_of(recorded(tmp_path, "train_language.py", *options)) == [("unscale", ""), ("clip", "")]
    planned, stock = optimized_and_run(tmp_path, "train_language.py", *options)
    assert planned["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    run = (sys.executable, "-m", "headway", "run", "--plan", tmp_path / "plan.yaml", "--")
    job = torchrun("train_language.py", *options)
    done = headway("record", "-o", tmp_path / "again", "--steps", "3:8", "--", *run, *job, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    sharded = (
        yaml.safe_load((tmp_path / "plan.yaml").read_text())["parallel"]["data"]["decoupled"]["gather"]
        == "parameters"
    )
    by = "sharded" if sharded else ""
    assert reads_of(load_trace(tmp_path / "again")) == [("unscale", by), ("clip", by)]
    assert headway("replay", tmp_path / "again", "--json").returncode == 0


def test_the_trainer_of_transformers_with_its_defaults(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trace = recorded(tmp_path, "train_with_trainer.py")
    assert_uses_are_no_bucket(trace)
    assert reads_of(trace) == [("clip", "")]
    planned, stock = optimized_and_run(tmp_path, "train_with_trainer.py")
    assert planned["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert planned["norms"] == pytest.approx(stock["norms"], rel=1e-4)
    assert planned["checksum"] == pytest.approx(stock["checksum"], rel=1e-5)
