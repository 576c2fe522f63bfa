"""The page in a browser: no complaints, the verdict in sight, and every way to move the timeline's view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import limits
from tests.report.pages import HOSTILE, HOSTILE_JOB, MANY_RANKS_JOB, browser, detailed_trace, open_offline
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.diagnosis import Diagnosis, diagnose
from headway.diagnosis.comparison import compare
from headway.report.comparison_view import Baseline
from headway.report.decisions import decisions_page
from headway.report.page import write_html
from headway.strategies.decisions import Entry
from headway.trace.format import Trace

pytestmark = pytest.mark.browser

OUTLIER_JOB = SyntheticJob(steps=300, slow={(1, "forward"): 40.0}, slow_steps=(5, 150), jitter=0.02)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


def shown(page: Any, trace: Trace, folder: Path) -> tuple[Diagnosis, list[str]]:
    """Write and open the trace's report; the diagnosis, and what will be complained of."""
    found = diagnose(trace)
    write_html(trace, found, folder / "page.html")
    return found, open_offline(page, folder / "page.html")


def view(page: Any) -> tuple[float, float]:
    start, end = page.evaluate("holds(({start, end}) => [start, end])")
    return float(start), float(end)


def width(page: Any) -> float:
    start, end = view(page)
    return end - start


def wait_for(page: Any, condition: str) -> None:
    """Wait until ``condition`` holds of the timeline's ranges, its boxes' columns, and the hits among them."""
    page.wait_for_function(f"holds((x, y, data, hits) => {condition})", timeout=limits.stretched(20_000))


def point_of(page: Any, name: str, x: str, y: str) -> tuple[float, float]:
    """Where data coordinates of a figure lie on the screen, after it was brought there."""
    left, top = page.evaluate(f"holds((range, _, data) => place('{name}', {x}, {y}))")
    return float(left), float(top)


def labels(page: Any) -> list[str]:
    """What is written next to the timeline's rows."""
    return list(page.evaluate("Array.from(model('timeline').left[0].major_label_overrides.values())"))


def test_the_page_opens_and_says_what_it_must(page: Any, tmp_path: Path) -> None:
    trace = synthetic_trace(HOSTILE_JOB)
    found, complaints = shown(page, trace, tmp_path)
    assert page.inner_text("#verdict") == found.verdict
    assert page.locator("#verdict").is_visible()
    assert "rank 2" in page.inner_text("#blamed")
    rows, bars = page.inner_text("#breakdown"), page.inner_text("#bars")
    ticks = labels(page)
    for rank in trace.events:
        assert f"rank {rank}" in rows
        assert f"rank {rank}" in bars
        assert f"{'▸ ' * (rank == 2)}rank {rank}" in ticks
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert width(page) == pytest.approx(3 * found.step_ms, rel=0.1)
    assert page.locator("#history canvas").count() >= 1
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert complaints == []


def test_narrow_and_dark_pages_fit(chromium: Any, tmp_path: Path) -> None:
    before, trace = synthetic_trace(HOSTILE_JOB), synthetic_trace(replace(HOSTILE_JOB, forward_ms=25.0))
    then, now = diagnose(before), diagnose(trace)
    write_html(
        trace, now, tmp_path / "page.html", Baseline(("a " + "long" * 30,), (then,), compare(now, then))
    )
    entry = Entry(step=3, before="a plan", order="b" * 300, reason=HOSTILE * 5, measured_ms=3.0)
    (tmp_path / "decisions.html").write_text(decisions_page([entry], HOSTILE))
    for name, figure in (("page", "timeline"), ("decisions", "decisions")):
        for scheme, paper in (("dark", "#1a2129"), ("light", "white")):
            context = chromium.new_context(viewport={"width": 400, "height": 900}, color_scheme=scheme)
            opened = context.new_page()
            complaints = open_offline(opened, tmp_path / f"{name}.html")
            assert opened.evaluate("document.documentElement.scrollWidth") <= 400
            assert colour_of(opened, figure) == paper
            ink = opened.evaluate("getComputedStyle(document.body).color")
            assert (ink == "rgb(31, 41, 51)") == (scheme == "light")
            if name == "page" and scheme == "dark":
                opened.emulate_media(color_scheme="light")  # as when it is printed
                limit = limits.Limit(10)
                while colour_of(opened, figure) != "white" and limit.left_s() > 0:
                    opened.wait_for_timeout(50)
                assert colour_of(opened, figure) == "white"
            assert complaints == []
            context.close()


def colour_of(page: Any, figure: str) -> str:
    """The background of a figure."""
    return str(page.evaluate(f"model('{figure}').background_fill_color"))


def test_the_wheel_zooms_and_dragging_moves(page: Any, tmp_path: Path) -> None:
    _, complaints = shown(page, synthetic_trace(HOSTILE_JOB), tmp_path)
    start, end = view(page)
    page.mouse.move(*point_of(page, "timeline", f"{(start + end) / 2}", "-1.3"))
    page.mouse.wheel(0, -300)
    wait_for(page, f"x.end - x.start < {0.9 * (end - start)}")
    zoomed = width(page)
    start, end = view(page)
    middle = point_of(page, "timeline", f"{(start + end) / 2}", "-1.3")
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] + 150, middle[1] + 40, steps=5)
    page.mouse.up()
    wait_for(page, f"x.start < {start - 0.05 * zoomed}")
    assert width(page) == pytest.approx(zoomed)
    assert complaints == []


def test_keys_move_the_view(page: Any, tmp_path: Path) -> None:
    found, complaints = shown(page, synthetic_trace(HOSTILE_JOB), tmp_path)
    first = view(page)
    whole = first[1] - first[0]
    for closer, farther in (("w", "s"), ("+", "-")):
        page.keyboard.press(closer)
        wait_for(page, f"x.end - x.start < {0.8 * whole}")
        page.keyboard.press(farther)
        wait_for(page, f"x.end - x.start > {0.99 * whole}")
    page.keyboard.press("w")
    page.keyboard.press("w")
    wait_for(page, f"x.end - x.start < {0.6 * whole}")
    for left, right in (("a", "d"), ("ArrowLeft", "ArrowRight")):
        start, end = view(page)
        page.keyboard.press(left)
        wait_for(page, f"x.start < {start - 0.2 * (end - start)}")
        page.keyboard.press(right)
        wait_for(page, f"Math.abs(x.start - {start}) < {0.01 * (end - start)}")
    for key in ("0", "Home"):
        page.keyboard.press("w")
        wait_for(page, f"x.end - x.start < {0.8 * whole}")
        page.keyboard.press(key)
        wait_for(page, f"x.start === {first[0]} && x.end === {first[1]}")
    page.keyboard.press("n")
    wait_for(page, f"x.end - x.start < {1.2 * found.step_ms}")
    start, _ = view(page)
    page.keyboard.press("p")
    wait_for(page, f"Math.abs(x.start - {start} + {found.step_ms}) < {0.2 * found.step_ms}")
    for _ in range(30):  # farther than there are steps
        page.keyboard.press("p")
    wait_for(page, "x.start <= 0")
    assert complaints == []


def test_keys_do_nothing_while_typing(page: Any, tmp_path: Path) -> None:
    _, complaints = shown(page, synthetic_trace(HOSTILE_JOB), tmp_path)
    before = view(page)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("wasdnp0c?+-")
    assert page.input_value("#search") == "wasdnp0c?+-"
    assert page.inner_text("#found") == "no hits"
    assert view(page) == before
    assert not page.locator("#help").is_visible()
    assert page.is_checked("#path-shown")
    page.keyboard.press("Escape")
    assert page.input_value("#search") == ""
    assert page.evaluate("document.activeElement.id") != "search"
    page.keyboard.press("Control+a")
    assert view(page) == before
    assert complaints == []


def test_help_opens_and_closes(page: Any, tmp_path: Path) -> None:
    _, complaints = shown(page, synthetic_trace(HOSTILE_JOB), tmp_path)
    before = view(page)
    for close in ("Escape", "?"):
        page.keyboard.press("?")
        page.locator("#help").wait_for(state="visible")
        assert "next step" in page.inner_text("#help")
        page.keyboard.press("w")  # the help is in front
        page.keyboard.press(close)
        page.locator("#help").wait_for(state="hidden")
    assert view(page) == before
    page.click("button[data-action=help]")
    page.click("#help button")
    page.locator("#help").wait_for(state="hidden")
    assert complaints == []


def test_the_critical_path_can_be_hidden(page: Any, tmp_path: Path) -> None:
    _, complaints = shown(page, synthetic_trace(HOSTILE_JOB), tmp_path)
    visible = "['path', 'path-halo'].every((name) => model(name).visible)"
    assert page.evaluate(visible)
    page.keyboard.press("c")
    page.wait_for_function(f"!({visible})")
    assert not page.is_checked("#path-shown")
    page.check("#path-shown")
    page.wait_for_function(visible)
    assert complaints == []


def test_rows_of_the_critical_path_lead_there(page: Any, tmp_path: Path) -> None:
    found, complaints = shown(page, synthetic_trace(HOSTILE_JOB), tmp_path)
    pieces = found.critical_path
    longest = max(range(len(pieces)), key=lambda index: pieces[index].ms)
    page.keyboard.press("c")
    page.locator("#path tbody tr").nth(longest).click()
    wait_for(page, f"Math.abs(x.end - x.start - {2 * pieces[longest].ms}) < 1e-3")
    assert page.is_checked("#path-shown")
    page.locator("#path tbody tr").first.focus()
    for _ in range(longest + 1):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_for(page, f"Math.abs(x.end - x.start - {2 * pieces[longest + 1].ms}) < 1e-3")
    assert complaints == []


def test_search_finds_and_goes_from_hit_to_hit(page: Any, tmp_path: Path) -> None:
    trace = synthetic_trace(HOSTILE_JOB)
    _, complaints = shown(page, trace, tmp_path)
    page.keyboard.press("/")
    page.keyboard.type("LAYER2")
    hits = 2 * HOSTILE_JOB.world_size * HOSTILE_JOB.steps
    assert page.inner_text("#found") == f"{hits} hits"
    wait_for(page, f"hits.length === {hits}")
    page.keyboard.press("Enter")
    first = page.inner_text("#found")
    number = int(first.split()[0])
    assert first == f"{number} of {hits}"
    for by in range(4):
        inside = f"((row) => data.left[row] >= x.start && data.right[row] <= x.end)(hits[{number - 1 + by}])"
        wait_for(page, inside)
        assert page.inner_text("#found") == f"{number + by} of {hits}"
        page.keyboard.press("Enter")
    for _ in range(4):
        page.keyboard.press("Shift+Enter")
    assert page.inner_text("#found") == first
    assert len(page.evaluate("model('hit').data_source.data.left")) == 1
    for _ in range(number):  # before the first hit comes the last one, which is out of sight
        page.keyboard.press("Shift+Enter")
    assert page.inner_text("#found") == f"{hits} of {hits}"
    wait_for(page, f"((row) => data.left[row] >= x.start && data.right[row] <= x.end)(hits[{hits - 1}])")
    page.fill("#search", "rank 3")
    wait_for(page, "hits.length && hits.every((row) => data.rank[row] === 3)")
    for text in ("collective", "all_reduce", "arrived last"):
        page.fill("#search", text)
        assert page.inner_text("#found").endswith(" hits")
    page.fill("#search", ".*")  # a text, not a pattern
    assert page.inner_text("#found") == "no hits"
    page.keyboard.press("Escape")
    wait_for(page, "hits.length === 0")
    assert complaints == []


def test_foreign_names_stay_text(page: Any, tmp_path: Path) -> None:
    _, complaints = shown(page, synthetic_trace(HOSTILE_JOB), tmp_path)
    page.fill("#search", HOSTILE)
    page.keyboard.press("Enter")
    wait_for(page, "hits.length > 0")
    row = f"data.what.findIndex((what, at) => what.includes({HOSTILE!r}) && data.left[at] >= range.start)"
    middle = "(data.left[row] + data.right[row]) / 2, (data.bottom[row] + data.top[row]) / 2"
    x, y = page.evaluate(f"holds((range, _, data) => ((row) => place('timeline', {middle}))({row}))")
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    page.wait_for_function(f"shadows().includes({HOSTILE!r})")
    assert "LIVE SCRIPT" not in page.evaluate("shadows()")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert complaints == []


def test_bars_of_the_history_lead_to_their_steps(page: Any, tmp_path: Path) -> None:
    trace = synthetic_trace(OUTLIER_JOB)
    found, complaints = shown(page, trace, tmp_path)
    drawn = page.evaluate("JSON.parse(document.getElementById('page-data').textContent).steps")
    step, start, end = drawn[len(drawn) // 4]
    page.mouse.click(*point_of(page, "history", step, "model('history').y_range.end / 2"))
    wait_for(page, f"x.start > {start - 5} && x.start <= {start} && x.end >= {end} && x.end < {end + 5}")
    assert f"step {step}" in page.inner_text("#history-told")
    assert page.inner_text("#shown").startswith(f"step {step}, ")
    frame = page.evaluate("(({left, right, visible}) => [left, right, visible])(model('history-view'))")
    assert frame == [int(step) - 0.5, int(step) + 0.5, True]
    before = view(page)
    named = [str(number) for number, _, _ in drawn]
    for number in (5, 150):
        page.click(f"button[data-step='{number}']")
        told = page.inner_text("#history-told")
        if str(number) in named:
            assert told == f"The timeline shows step {number}."
        else:
            assert told.startswith(f"Step {number} is not drawn")
            assert view(page) == before
    assert len(named) < OUTLIER_JOB.steps
    assert complaints == []
    assert found.steps


def test_many_ranks_are_readable(page: Any, tmp_path: Path) -> None:
    trace = synthetic_trace(MANY_RANKS_JOB)
    found, complaints = shown(page, trace, tmp_path)
    assert (tmp_path / "page.html").stat().st_size < 6_000_000
    assert "Rank 37" in found.verdict
    assert page.inner_text("#blamed").startswith("rank 37")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    height = page.locator("#timeline").bounding_box()["height"]
    assert height < 800
    assert "▸ rank 37" in labels(page)
    page.click("#blamed button")
    wait_for(page, "y.end - y.start === 10")
    kept = ["rank 35", "rank 36", "▸ rank 37", "rank 38", "rank 39"]
    assert [label for label in labels(page) if label != "network"] == kept
    # The others' rows are gone; those that are left lie where their labels are.
    tops = page.evaluate(
        """holds((x, y, {rank, top}) => {
            const found = {};
            rank.forEach((one, row) => { if (!isNaN(top[row])) found[one] = Math.max(top[row], found[one] ?? -99); });
            return found;
        })"""
    )
    assert {int(rank): round(top - 0.46) for rank, top in tops.items()} == {
        35: 0,
        36: -2,
        37: -4,
        38: -6,
        39: -8,
    }
    page.wait_for_function("document.getElementById('timeline').getBoundingClientRect().height < 450")
    page.fill("#search", "rank 60")
    page.locator("#search").press("Enter")
    wait_for(page, "y.end - y.start === 128")  # a hit on a rank that was left out brings all back
    assert page.evaluate("document.getElementById('ranks').selectedIndex") == 0
    page.select_option("#ranks", label="Host host4: rank 32-39")
    wait_for(page, "y.end - y.start === 16")
    assert complaints == []


def test_operators_and_messages_can_be_searched(page: Any, tmp_path: Path) -> None:
    trace = detailed_trace(SyntheticJob(steps=4), operators=4, messages=2)
    _, complaints = shown(page, trace, tmp_path)
    page.fill("#search", "operator3")
    assert page.inner_text("#found") == f"{4 * 4 * 8} hits"
    page.fill("#search", "to rank 2")
    assert page.inner_text("#found") == f"{4 * 4 * 2} hits"
    assert complaints == []


def test_every_control_can_be_reached_with_tab(page: Any, tmp_path: Path) -> None:
    _, complaints = shown(page, synthetic_trace(HOSTILE_JOB), tmp_path)
    missing = set(
        page.evaluate(
            """Array.from(document.querySelectorAll('main button, main select, main input')).map((one, index) => {
                one.dataset.number = index;
                return String(index);
            })"""
        )
    )
    assert len(missing) >= 10
    for _ in range(60):
        page.keyboard.press("Tab")
        number, ring = page.evaluate(
            "(({dataset}, {outlineStyle}) => [dataset.number ?? '', outlineStyle])"
            "(document.activeElement, getComputedStyle(document.activeElement))"
        )
        if number in missing:
            missing.remove(number)
            assert ring == "solid"
    assert missing == set()
    assert complaints == []
