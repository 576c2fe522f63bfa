"""A step of a pipeline as a picture: what is drawn where, and as markup that can be read."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.synthetic import SyntheticJob, synthetic_trace, trace_of

from headway.diagnosis import diagnose
from headway.report import words
from headway.report.page import render_html
from headway.report.pipeline_picture import MARGIN, WIDTH, cells_of, pipeline_picture
from headway.scheduling.pipeline.orders import one_forward_one_backward, zero_bubble
from headway.scheduling.pipeline.schedule import Pass, PipelineSchedule, ideal_times
from headway.trace.events import Event, Kind, Stream
from headway.trace.format import Trace

UNIT_NS = 1_000_000
SVG = re.compile(r"<svg id=\"pipeline\".*?</svg>", re.DOTALL)
NAMESPACE = "{http://www.w3.org/2000/svg}"


def a_pipeline(schedule: PipelineSchedule, steps: int = 3) -> Trace:
    """Steps of ``schedule`` as they would be recorded if messages took no time, with an update behind each."""
    times = ideal_times(schedule)
    length_ns = (times.total + 1) * UNIT_NS
    rows: dict[int, list[Event]] = {}
    for rank, actions in enumerate(schedule.ranks):
        rows[rank] = []
        for step in range(steps):
            begin_ns = step * length_ns
            rows[rank].append(Event(Kind.STEP, "", Stream.COMPUTE, step, begin_ns, length_ns))
            for action in actions:
                kind = Kind.FORWARD_PASS if action.kind is Pass.FORWARD else Kind.BACKWARD_PASS
                start, end = times.begins[action] * UNIT_NS, times.ends[action] * UNIT_NS
                rows[rank].append(
                    Event(
                        kind, "", Stream.COMPUTE, step, begin_ns + start, end - start,
                        stage=action.stage, micro_batch=action.micro_batch,
                    )
                )  # fmt: skip
            update_ns = begin_ns + times.total * UNIT_NS
            rows[rank].append(Event(Kind.OPTIMIZER, "Adam", Stream.COMPUTE, step, update_ns, UNIT_NS))
    return trace_of(rows)


def test_every_pass_is_drawn_at_its_time() -> None:
    schedule = one_forward_one_backward(3, 4)
    picture = pipeline_picture(a_pipeline(schedule), 1)
    assert picture is not None
    times = ideal_times(schedule)
    unit = (WIDTH - MARGIN) / (times.total + 1)
    passes = [box for box in picture.boxes if "micro-batch" in box.title]
    assert len(passes) == 2 * 3 * 4
    drawn = {(round((box.x - MARGIN) / unit), round(box.width / unit), box.text, box.y) for box in passes}
    tops = [y for _, y in picture.lanes]
    expected = {
        (begin, times.ends[action] - begin, str(action.micro_batch), tops[action.stage])
        for action, begin in times.begins.items()
    }
    assert drawn == expected
    assert [label for label, _ in picture.lanes] == ["rank 0", "rank 1", "rank 2"]
    assert [name for name, _ in picture.legend] == ["forward", "backward", "update", "waiting"]


def test_halves_of_backwards_are_told_apart() -> None:
    trace = a_pipeline(zero_bubble(3, 6))
    rows = sorted(
        trace.events[2].of_step(0).of_kind(Kind.FORWARD_PASS, Kind.BACKWARD_PASS),
        key=lambda row: row.start_ns,
    )
    found = [(cell.what, cell.number) for cell in cells_of(2, rows)]
    names = {
        Pass.FORWARD: words.FORWARD_PASS,
        Pass.INPUT_GRADIENT: words.INPUT_GRADIENT,
        Pass.WEIGHT_GRADIENT: words.WEIGHT_GRADIENT,
    }
    assert found == [(names[each.kind], str(each.micro_batch)) for each in zero_bubble(3, 6).ranks[2]]


def test_the_page_shows_it_in_markup_that_can_be_read() -> None:
    trace = a_pipeline(one_forward_one_backward(2, 3))
    html = render_html(trace, diagnose(trace))
    (svg,) = SVG.findall(html)
    root = ElementTree.fromstring(svg)
    title = root.find(f"{NAMESPACE}title")
    assert title is not None
    assert title.text is not None
    assert "3 micro-batches on 2 ranks" in title.text
    assert root.get("aria-labelledby") == title.get("id")
    texts = [each.text for each in root.iter(f"{NAMESPACE}text")]
    assert texts.count("2") == 4, "the last micro-batch, forward and backward, on both ranks"


def test_other_jobs_have_no_such_picture() -> None:
    trace = synthetic_trace(SyntheticJob())
    assert pipeline_picture(trace, trace.steps[0]) is None
    assert not SVG.search(render_html(trace, diagnose(trace)))
