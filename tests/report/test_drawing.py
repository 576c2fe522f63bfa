"""What is drawn: bounded, whole steps around the typical one, detail given up in a known order, and said."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tests.report.pages import detailed_trace, served_trace
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.diagnosis import diagnose
from headway.diagnosis.findings import Finding
from headway.report.drawing import (
    COMMUNICATION,
    COMPUTE,
    MAX_BOXES,
    MAX_RANKS,
    OPERATORS,
    Drawing,
    blamed_ranks,
    draw,
    interesting_ranks,
)
from headway.trace.events import Kind
from headway.trace.format import Trace

MESSAGES = {Kind.SEND, Kind.RECEIVE}


def drawn(trace: Trace, max_boxes: int = MAX_BOXES) -> Drawing:
    drawing = draw(trace, diagnose(trace), max_boxes)
    assert len(drawing.boxes) <= max_boxes
    return drawing


def kinds(drawing: Drawing) -> set[str]:
    return {box.kind for box in drawing.boxes}


def test_drawing_is_bounded_and_says_so() -> None:
    trace = synthetic_trace(SyntheticJob(steps=40))
    found = diagnose(trace)
    drawing = drawn(trace, 500)
    assert found.typical_step in {step for step, _, _ in drawing.steps}
    assert drawing.cut.startswith("Steps ")
    whole = drawn(trace)
    assert whole.cut == ""
    assert len(whole.steps) == 40
    start, end = whole.view_ms
    assert end - start == pytest.approx(3 * found.step_ms, rel=0.1)


def test_steps_too_big_are_drawn_pass_by_pass() -> None:
    trace = synthetic_trace(SyntheticJob(steps=5, modules=tuple(f"layer{number}" for number in range(100))))
    drawing = drawn(trace, 200)
    assert len(drawing.steps) >= 3
    assert "Each pass is drawn as one box" in drawing.cut
    forward = [box for box in drawing.boxes if box.kind == "forward" and box.rank == 0]
    assert [box.length_ms for box in forward] == pytest.approx([10.0] * len(drawing.steps))
    drawing = drawn(trace, 30)
    assert len(drawing.boxes) == 30
    assert "The 30 longest of " in drawing.cut


def test_all_detail_is_drawn_where_it_fits() -> None:
    drawing = drawn(detailed_trace(SyntheticJob(steps=4), operators=5, messages=3))
    assert drawing.cut == ""
    assert {Kind.OPERATOR, Kind.SEND, Kind.RECEIVE, Kind.COLLECTIVE, Kind.FORWARD} <= kinds(drawing)
    rows = {box.kind: box.row for box in drawing.boxes}
    assert rows[Kind.OPERATOR] == OPERATORS
    assert rows[Kind.SEND] == COMMUNICATION
    assert rows[Kind.FORWARD] == COMPUTE
    sends = [box for box in drawing.boxes if box.kind == Kind.SEND and box.rank == 1]
    assert "to rank 2" in sends[0].detail


def test_collectives_are_preferred_to_their_messages() -> None:
    trace = detailed_trace(SyntheticJob(steps=5), messages=50)
    drawing = drawn(trace, 600)
    assert Kind.COLLECTIVE in kinds(drawing)
    assert not MESSAGES & kinds(drawing)
    assert len(drawing.steps) >= 3
    left_out = 50 * 2 * 4 * 4 * len(drawing.steps)
    assert (
        f"Collectives are drawn without their messages ({left_out:,} sends and receives left out)."
        in drawing.cut
    )


def test_messages_are_drawn_where_there_is_nothing_else() -> None:
    trace = detailed_trace(SyntheticJob(steps=5), messages=20)
    for rank, events in trace.events.items():
        trace.events[rank] = events.where(events.kind != Kind.COLLECTIVE)
    drawing = drawn(trace, 600)
    assert kinds(drawing) >= MESSAGES
    assert "longest of " in drawing.cut


def test_operators_are_kept_where_the_diagnosis_points() -> None:
    job = SyntheticJob(world_size=6, steps=5, slow={(4, "backward"): 12.0})
    trace = detailed_trace(job, operators=30)
    found = diagnose(trace)
    drawing = drawn(trace, 1200)
    operators = [box for box in drawing.boxes if box.kind == Kind.OPERATOR]
    assert 4 in {box.rank for box in operators}
    assert {box.step for box in operators} == {found.typical_step}
    assert f"Operators are drawn only in step {found.typical_step} on ranks 0, " in drawing.cut
    assert Kind.FORWARD in kinds(drawing)
    assert len(drawing.steps) == 5


def test_parameter_servers_are_drawn() -> None:
    drawing = drawn(served_trace(SyntheticJob(world_size=3, steps=4)))
    rows = {box.kind: box.row for box in drawing.boxes}
    assert rows[Kind.PUSH] == rows[Kind.PULL] == COMMUNICATION
    assert rows[Kind.SUM] == COMPUTE
    push = next(box for box in drawing.boxes if box.kind == Kind.PUSH)
    assert push.detail == "5.0 MB, to rank 2"


def test_too_many_ranks_are_sampled_with_those_that_matter() -> None:
    job = SyntheticJob(world_size=MAX_RANKS + 100, steps=2, slow={(123, "forward"): 30.0})
    drawing = drawn(synthetic_trace(job))
    assert len(drawing.ranks) == MAX_RANKS
    assert {0, 123, MAX_RANKS + 99} <= set(drawing.ranks)
    assert drawing.ranks == tuple(sorted(drawing.ranks))
    assert {piece[0] for piece in drawing.path} <= set(drawing.ranks)
    assert f"{MAX_RANKS} of {MAX_RANKS + 100} ranks are drawn" in drawing.cut


def test_nobody_is_blamed_where_ranks_take_turns() -> None:
    found = diagnose(synthetic_trace(SyntheticJob(slow={(2, "backward"): 9.0})))
    assert blamed_ranks(found) == (2,)
    turns = Finding("moving_imbalance", 5.0, "Ranks wait for one another.")
    assert blamed_ranks(replace(found, findings=(turns,))) == ()
    assert interesting_ranks(replace(found, findings=(turns,)))[0] == found.critical_path[0].rank


def test_what_overlaps_lies_in_lanes() -> None:
    drawing = drawn(detailed_trace(SyntheticJob(steps=3), messages=3))
    own = [box for box in drawing.boxes if box.rank == 0 and box.row == COMMUNICATION]
    by_lane: dict[int, list[tuple[float, float]]] = {}
    for box in own:
        by_lane.setdefault(box.lane, []).append((box.start_ms, box.end_ms))
    assert len(by_lane) == drawing.lanes == 3
    for spans in by_lane.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
