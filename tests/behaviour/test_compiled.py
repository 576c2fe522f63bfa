"""Compiled models are recorded without being recompiled, and train alike under the decoupled all-reduce."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import workers

import headway
from headway.diagnosis import diagnose
from headway.trace.events import Kind

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

CASES = "tests.behaviour.compiled_cases"


def test_they_are_recorded_as_they_run_alone(tmp_path: Path) -> None:
    for result in workers.run(2, f"{CASES}:recorded", str(tmp_path), timeout_s=300, group_timeout_s=200):
        for how in ("before", "in part", "in place, later", "after"):
            alone, recorded = result[f"{how}, alone"], result[f"{how}, recorded"]
            assert recorded["losses"] == alone["losses"], how
            assert recorded["compiled"][-2] == recorded["compiled"][-1], how
            if how != "after":  # compiled around the wrapper, whose own code is broken up in any case
                assert recorded["compiled"] == alone["compiled"], how
    for how in ("before", "in part", "in place, later", "after"):
        trace = headway.load_trace(tmp_path / how)
        assert trace.steps == (3, 4, 5)
        for step in trace.steps:
            kinds = [row.kind for row in trace.events[0].of_step(step)]
            for kind in (Kind.FORWARD_PASS, Kind.BACKWARD_PASS, Kind.OPTIMIZER):
                assert kinds.count(kind) == 1 + (kind == Kind.FORWARD_PASS and step == 5), (how, kind)
            assert kinds.count(Kind.GRADIENT_READY) == len(trace.model.parameters)
        assert any("compiled" in note for note in diagnose(trace).notes), how
        seen = {row.name for row in trace.events[0].of_kind(Kind.FORWARD) if row.duration_ns}
        assert seen == ({f"first.layers.{i}" for i in range(3)} if how == "in part" else set())
        assert {parameter.module for parameter in trace.model.parameters} == set(trace.model.forward_order)
    for how, may in (("before", True), ("in part", True), ("after", False), ("after, watched", False)):
        info = headway.load_trace(tmp_path / how).manifest.ranks[0]
        assert ("decoupled" not in info.refusals) == may, how


def test_they_train_alike_when_decoupled() -> None:
    for result in workers.run(2, f"{CASES}:decoupled", timeout_s=300, group_timeout_s=200):
        for case in ("before, False", "before, True", "in part, False"):
            stock, ours = result[f"{case}, stock"], result[f"{case}, ours"]
            assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6), case
            assert ours["compiled"] == stock["compiled"], case


def test_they_are_compiled_in_as_many_parts_as_inside_ddp() -> None:
    """Gradients of one graph come all at once: a single one would leave nothing of backward to communicate under."""
    for graphs in workers.run(2, f"{CASES}:parts", timeout_s=200):
        assert graphs["ours"] == graphs["planned"] == graphs["stock"] > graphs["alone"] == 1
