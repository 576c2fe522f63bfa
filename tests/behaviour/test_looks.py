"""A script's own looks at gradients and values are recorded, and change nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tests import workers

from headway.graph.computation import Part
from headway.graph.recorded import timelines_of
from headway.trace.events import Kind, Read
from headway.trace.folder import load_trace
from headway.trace.format import Trace

CASES = "tests.behaviour.look_cases"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LOOK, CLIP = Read.LOOK, Read.CLIP


def reads(trace: Trace) -> dict[int, list[tuple[str, tuple[str, ...]]]]:
    """What was read, and of which parameters, in each step of both ranks alike."""
    found: list[dict[int, list[tuple[str, tuple[str, ...]]]]] = []
    for events in trace.events.values():
        found.append({})
        for step in trace.steps:
            rows = events.of_step(step)
            *_, backward = rows.of_kind(Kind.BACKWARD_PASS)
            *_, update = rows.of_kind(Kind.OPTIMIZER)
            of_step = sorted(rows.of_kind(Kind.READ), key=lambda row: row.start_ns)
            forward, *_ = rows.of_kind(Kind.FORWARD_PASS)
            for r in of_step:
                if r.name == Read.VALUES:
                    assert r.end_ns <= forward.start_ns
                else:
                    assert backward.end_ns <= r.start_ns <= r.end_ns <= update.start_ns
            assert all(a.end_ns <= b.start_ns for a, b in pairwise(of_step))
            named = [(row.start_ns, row.name) for row in rows.of_kind(Kind.GRADIENT_READ)]
            found[-1][step] = [
                (row.name, tuple(sorted(name for at_ns, name in named if at_ns == row.start_ns)))
                for row in of_step
            ]
    assert all(one == found[0] for one in found)
    return found[0]


def test_looks_are_recorded_in_the_steps_that_take_them(tmp_path: Path) -> None:
    for losses in workers.run(2, f"{CASES}:looks", str(tmp_path), timeout_s=200):
        for stock, recorded in losses.values():
            assert stock == recorded
    traces = {name: load_trace(tmp_path / name) for name in losses}
    steps = traces["none"].steps
    alike = {
        "none": [],
        "clears": [],
        "by hand": [(LOOK, ())],
        "by hand, closure": [(LOOK, ())],
        "averages": [(Read.VALUES, ())],
        "about neither": [],
        "around clipping": [(LOOK, ("0.weight",)), (CLIP, ()), (LOOK, ("2.weight",))],
    }
    for name, expected in alike.items():
        assert reads(traces[name]) == dict.fromkeys(steps, expected), name
    assert reads(traces["sometimes"]) == {step: [(LOOK, ("0.weight",))] if step % 2 else [] for step in steps}
    saved = [(Read.VALUES, ("2.bias", "2.weight"))]  # between the step before and this one
    assert reads(traces["saves"]) == {step: [] if step % 2 else saved for step in steps}
    # Replay knows of them, and counts no time twice.
    for trace in traces.values():
        for rank, timelines in timelines_of(trace).items():
            for timeline in timelines:
                rows = trace.events[rank].of_step(timeline.step)
                reads_ns = sum(row.duration_ns for row in rows.of_kind(Kind.READ))
                in_replay = sum(item.duration_ns for item in timeline.items if item.kind == Part.READ)
                assert in_replay == pytest.approx(reads_ns, abs=1)


def test_parameters_are_ordinary_when_a_recording_has_ended(tmp_path: Path) -> None:
    workers.run(2, f"{CASES}:ends_where_looks_are_watched", str(tmp_path), timeout_s=120)
