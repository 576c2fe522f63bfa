"""The HTML page: whole without a network, readable, and deaf to markup in names."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import pytest
from tests.report.pages import HOSTILE, HOSTILE_JOB, browser_page, open_offline
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.diagnose import diagnose
from headway.errors import UserError
from headway.report.drawing import MAX_BOXES, draw
from headway.report.page import render_html, write_html


def test_names_cannot_become_markup() -> None:
    trace = synthetic_trace(HOSTILE_JOB)
    html = render_html(trace, diagnose(trace))
    own, _, rest = html.partition('<script type="application/json"')
    data = rest.partition("</script>")[0]
    assert HOSTILE not in own
    assert "<" not in data.partition(">")[2]
    assert "alert(1)" in data
    assert html.count("alert(1)") == data.count("alert(1)") + own.count("&lt;script&gt;alert(1)")
    assert "<img" not in own


def test_the_page_names_nothing_elsewhere() -> None:
    trace = synthetic_trace()
    html = render_html(trace, diagnose(trace))
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", html)
    assert "default-src 'none'" in html
    assert len(html) < 2_500_000


def test_drawing_is_bounded_and_says_so() -> None:
    trace = synthetic_trace(SyntheticJob(steps=40))
    found = diagnose(trace)
    drawing = draw(trace, found, max_boxes=500)
    assert len(drawing.boxes) <= 500
    assert found.typical_step in {step for step, _, _ in drawing.steps}
    assert drawing.cut.startswith("Steps ")
    whole = draw(trace, found)
    assert whole.cut == ""
    assert len(whole.steps) == 40
    assert len(whole.boxes) < MAX_BOXES
    start, end = whole.view_ms
    assert end - start == pytest.approx(3 * found.step_ms, rel=0.1)


def test_steps_too_big_are_drawn_pass_by_pass() -> None:
    trace = synthetic_trace(SyntheticJob(steps=5, modules=tuple(f"layer{number}" for number in range(100))))
    found = diagnose(trace)
    drawing = draw(trace, found, max_boxes=200)
    assert len(drawing.boxes) <= 200
    assert len(drawing.steps) >= 3
    assert "Passes are drawn whole" in drawing.cut
    forward = [box for box in drawing.boxes if box.kind == "forward" and box.rank == 0]
    assert [box.end_ms - box.start_ms for box in forward] == pytest.approx([10.0] * len(drawing.steps))
    drawing = draw(trace, found, max_boxes=30)
    assert len(drawing.boxes) == 30
    assert "the 30 longest are drawn" in drawing.cut


@pytest.mark.parametrize(
    "job",
    [
        SyntheticJob(world_size=1, steps=1),
        SyntheticJob(world_size=70, steps=1),
        SyntheticJob(bucket_bytes=()),
    ],
)
def test_odd_jobs_are_drawn(job: SyntheticJob) -> None:
    trace = synthetic_trace(job)
    html = render_html(trace, diagnose(trace))
    assert html.count("<td>rank ") >= job.world_size


def test_without_bokeh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("bokeh"):
            raise ImportError(name)
        return real(name, *rest, **named)

    trace = synthetic_trace()
    found = diagnose(trace)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'headway\[report\]'"):
        write_html(trace, found, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.browser
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    trace = synthetic_trace(HOSTILE_JOB)
    found = diagnose(trace)
    path = tmp_path / "page.html"
    write_html(trace, found, path)
    with browser_page() as page:
        complaints = open_offline(page, path)
        assert page.inner_text("#verdict") == found.verdict
        rows = page.inner_text("#breakdown")
        bars = page.inner_text("#bars")
        ticks = page.evaluate(
            "Array.from(Bokeh.documents[0].get_model_by_name('timeline').left[0].major_label_overrides.values())"
        )
        for rank in trace.events:
            assert f"rank {rank}" in rows
            assert f"rank {rank}" in bars
            assert f"rank {rank}" in ticks
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280

        before = _view(page)
        assert before[1] - before[0] == pytest.approx(3 * found.step_ms, rel=0.1)
        page.locator("#timeline").scroll_into_view_if_needed()
        page.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
        box = page.locator("#timeline").bounding_box()
        middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
        page.mouse.move(*middle)
        page.mouse.wheel(0, -300)
        zoomed = _view_after(page, before)
        assert zoomed[1] - zoomed[0] < 0.9 * (before[1] - before[0])
        page.mouse.down()
        page.mouse.move(middle[0] + 150, middle[1], steps=5)
        page.mouse.up()
        panned = _view_after(page, zoomed)
        assert panned[0] < zoomed[0]
        assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])

        shown = _hover_over(page, HOSTILE)
        assert HOSTILE in shown
        assert "LIVE SCRIPT" not in shown
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert complaints == []


def _view(page: Any) -> tuple[float, float]:
    start, end = page.evaluate(
        "(() => { const r = Bokeh.documents[0].get_model_by_name('timeline').x_range; return [r.start, r.end]; })()"
    )
    return float(start), float(end)


def _view_after(page: Any, before: tuple[float, float]) -> tuple[float, float]:
    """The view once it has changed and come to rest."""
    last = before
    for _ in range(50):
        page.wait_for_timeout(200)
        now = _view(page)
        if now == last != before:
            return now
        last = now
    return last


def _hover_over(page: Any, name: str) -> str:
    """Put the first box called ``name`` into the middle of the view, and the pointer onto it; the tooltip's text."""
    place = page.evaluate(
        """async (name) => {
            const plot = Bokeh.documents[0].get_model_by_name('timeline');
            const bars = plot.renderers.find(r => r.data_source && r.data_source.data.name);
            const data = bars.data_source.data;
            const i = Array.from(data.name).indexOf(name);
            const middle = (data.left[i] + data.right[i]) / 2;
            plot.x_range.setv({start: middle - 5, end: middle + 5});
            await new Promise(done => setTimeout(done, 400));
            const view = Bokeh.index.find_one(plot);
            const frame = view.el.getBoundingClientRect();
            const inner = view.frame.bbox;
            return [
                frame.left + inner.left + inner.width / 2,
                frame.top + view.frame.y_scale.compute((data.top[i] + data.bottom[i]) / 2),
            ];
        }""",
        name,
    )
    page.mouse.move(place[0] - 3, place[1])
    page.mouse.move(*place)
    for _ in range(25):
        page.wait_for_timeout(200)
        if name in (shown := _texts(page)):
            break
    return shown


def _texts(page: Any) -> str:
    """The text inside of every shadow root, where tooltips are."""
    return str(
        page.evaluate(
            """() => {
                const texts = [];
                const walk = (root) => {
                    for (const element of root.querySelectorAll('*')) {
                        if (element.tagName === 'SCRIPT' && root !== document) texts.push('LIVE SCRIPT');
                        if (element.shadowRoot) {
                            texts.push(element.shadowRoot.textContent);
                            walk(element.shadowRoot);
                        }
                    }
                };
                walk(document);
                return texts.join('\\n');
            }"""
        )
    )
