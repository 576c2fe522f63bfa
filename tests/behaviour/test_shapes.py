"""Jobs that are no single wrapped model are recorded as what they are, and not planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import workers

import headway
from headway.diagnosis import diagnose
from headway.errors import TraceError
from headway.replayer.incomplete import check_takes_plans
from headway.trace.events import Kind

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

CASES = "tests.behaviour.shape_cases"


def test_of_two_models_the_larger_is_recorded_an_iteration_a_step(tmp_path: Path) -> None:
    for warned in workers.run(2, f"{CASES}:two_models", str(tmp_path), timeout_s=120):
        assert any("gradients of Generator" in message and "Critic" in message for message in warned)
    trace = headway.load_trace(tmp_path / "two")
    assert [parameter.module for parameter in trace.model.parameters] == ["0", "0", "2", "2"]
    for step in trace.steps:
        rows = list(trace.events[0].of_step(step))
        assert sum(row.kind == Kind.BACKWARD_PASS for row in rows) == 4
        assert sum(row.kind == Kind.OPTIMIZER for row in rows) == 4
        assert sum(row.kind == Kind.GRADIENT_READY for row in rows) == 4
    assert any("Critic" in note for note in diagnose(trace).notes)
    with pytest.raises(TraceError, match=r"several wrapped models.*Critic \(36 B\)"):
        check_takes_plans(trace)


def test_a_fully_sharded_job_is_recorded_as_such(tmp_path: Path) -> None:
    workers.run(2, f"{CASES}:sharded", str(tmp_path), timeout_s=120)
    trace = headway.load_trace(tmp_path / "sharded")
    assert trace.steps == (2, 3, 4)
    for step in trace.steps:
        rows = list(trace.events[0].of_step(step))
        names = [row.name for row in rows if row.kind == Kind.COLLECTIVE]
        assert names.count("all_gather") >= 3
        assert names.count("reduce_scatter") == 3
        for kind in (Kind.FORWARD_PASS, Kind.BACKWARD_PASS, Kind.OPTIMIZER):
            assert sum(row.kind == kind for row in rows) == 1
    found = diagnose(trace)
    assert any("FSDP2" in note for note in found.notes)
    assert all(parts.computation > 0 for parts in found.breakdown.values())
    with pytest.raises(TraceError, match="FSDP2"):
        check_takes_plans(trace)
