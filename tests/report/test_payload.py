"""What the page's scripts get: bounded, showable text that cannot end its script element."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.diagnosis import diagnose
from headway.diagnosis.communication import match
from headway.report import templates, timeline, words
from headway.report.drawing import Drawing, RankView, draw
from headway.report.history import history, rank_times
from headway.report.timeline import Layout
from headway.trace.format import Trace

NAMES = ("</script><b>", "a\x00b\u2028", "\ud800half", "\u202eright to left", "y" * 100_000)


def drawing_of(job: SyntheticJob) -> tuple[Trace, Drawing]:
    trace = synthetic_trace(job)
    return trace, draw(trace, diagnose(trace))


def test_columns_hold_each_text_once() -> None:
    _, drawing = drawing_of(SyntheticJob(modules=NAMES, steps=10))
    columns, tables = timeline.timeline_columns(drawing, Layout(drawing.ranks, drawing.lanes))
    assert {len(column) for column in columns.values()} == {len(drawing.boxes)}
    assert all(isinstance(column, np.ndarray) and column.dtype != object for column in columns.values())
    assert len(tables["name"]) == len(set(tables["name"])) <= len(NAMES) + 4
    assert max(map(len, tables["name"])) == words.MAX_NAME
    for box, name in zip(drawing.boxes, columns["name"].tolist(), strict=True):
        assert tables["name"][name] == words.plain(box.name, words.MAX_NAME)


def test_the_data_is_plain_ascii_and_cannot_end_its_element() -> None:
    trace, drawing = drawing_of(SyntheticJob(modules=NAMES, steps=10))
    _, tables = timeline.timeline_columns(drawing, Layout(drawing.ranks, drawing.lanes))
    past = history(rank_times(trace, trace.steps, match(trace)), trace.steps)
    view = RankView("All", drawing.ranks)
    data = timeline.page_data(drawing, tables, past, (view,), Layout(drawing.ranks, drawing.lanes))
    text = templates.script_json(data)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert len(text) < 20_000
    read = json.loads(text)
    assert "</script><b>" in read["tables"]["name"]
    assert read["steps"][0][0] == "0"
    assert [bar[1] for bar in read["bars"]] == list(range(10))


def test_bars_know_which_drawn_steps_they_stand_for() -> None:
    trace = synthetic_trace(SyntheticJob(steps=40))
    found = diagnose(trace)
    drawing = draw(trace, found, 500)
    _, tables = timeline.timeline_columns(drawing, Layout(drawing.ranks, drawing.lanes))
    past = history(rank_times(trace, trace.steps, match(trace)), trace.steps, max_bars=10)
    data = timeline.page_data(drawing, tables, past, (), Layout(drawing.ranks, drawing.lanes))
    numbers = [step for step, _, _ in drawing.steps]
    for bar, (_, _, low, high) in zip(past.bars, data["bars"], strict=True):
        first, last = bar.of_steps
        assert numbers[low:high] == [number for number in numbers if first <= number <= last]


def test_a_drawing_without_length_can_be_viewed() -> None:
    _, drawing = drawing_of(SyntheticJob(steps=2))
    start, end = timeline.opening_view(replace(drawing, view_ms=(0.0, 0.0), length_ms=0.0))
    assert start < end


@pytest.mark.parametrize("value", ["<", [1, "</script>"], {"a&b": ">"}])
def test_script_json(value: object) -> None:
    text = templates.script_json(value if not isinstance(value, str) else json.dumps(value))
    assert not set("<>&") & set(text)
    assert json.loads(text) == value
