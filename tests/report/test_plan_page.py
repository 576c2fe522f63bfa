"""The page of a search: the way from the recorded step to the plan, and the plans compared."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.commands import headway
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.report.pages import HOSTILE
from tests.synthetic import synthetic_trace

from headway.optimization.explanation import Explanation, explain
from headway.optimization.result import SearchResult
from headway.optimization.search import search
from headway.replayer.replayer import Replayer
from headway.report.plan_page import MAX_PLANS, path_bars, plan_page
from headway.trace.folder import write_trace


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    one = job(forward_ms=20, backward_ms=40, gbps=0.6)
    return Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))


@pytest.fixture(scope="module")
def found(replayer: Replayer) -> SearchResult:
    return search(replayer)


@pytest.fixture(scope="module")
def explained(replayer: Replayer, found: SearchResult) -> Explanation:
    said = explain(replayer, found, found.best("decoupled"), go_further=True)
    assert said is not None
    return said


def test_bars_lead_from_the_recorded_step_to_the_plans(explained: Explanation) -> None:
    bars = path_bars(explained)
    assert [bar.name for bar in bars] == ["as recorded", *(each.name for each in explained.choices)]
    assert bars[0].step_ms == pytest.approx(explained.from_ms)
    for bar, choice in zip(bars[1:], explained.choices, strict=True):
        assert bar.step_ms == pytest.approx(choice.step_ms)
        assert (bar.saved_ms, bar.where) == (choice.saved_ms, choice.where)
    assert bars[-1].parts_ms == pytest.approx(explained.after.parts_ms)


def test_the_page_says_what_the_command_does(found: SearchResult, explained: Explanation) -> None:
    best = found.best("decoupled")
    page = plan_page("trace", best, found, explained, "Use this one.")
    _Whole().feed(page)
    assert "Use this one." in page
    assert explained.next_bottleneck in page
    assert explained.further is not None
    assert explained.further.sentence in page
    assert page.count('class="bar"') == len(explained.choices) + 1
    assert "is the lower bound: no plan can be faster" in page
    plans = page[page.index('id="plans"') :]
    assert plans.count("<tr") == 1 + len(found.candidates)
    assert plans.count('class="best"') == 1


def test_plans_without_an_explanation_or_a_bound_have_a_page(found: SearchResult) -> None:
    best = replace(found.best(), changes=("none",))
    page = plan_page("trace", best, replace(found, bound=None), None, "Keep what you have.")
    assert "Keep what you have" in page
    assert "cannot be explained" in page
    assert "lower bound of all plans" not in page


def test_names_from_outside_are_text(found: SearchResult, explained: Explanation) -> None:
    hostile = replace(found.best(), name=HOSTILE, changes=(HOSTILE, "\x1b[2J"))
    first = replace(explained.choices[0], name=HOSTILE)
    page = plan_page(
        HOSTILE, hostile, replace(found, candidates=(hostile,), for_other_scripts=(hostile,), notes=(HOSTILE,)),
        replace(explained, choices=(first, *explained.choices[1:])), HOSTILE,
    )  # fmt: skip
    _Whole().feed(page)
    assert "Plans that need a change of the script" in page
    assert HOSTILE not in page
    assert "\x1b" not in page
    assert not re.search(r"(?:src|href)=", page), "it loads nothing"


def test_of_many_plans_the_best_are_shown(found: SearchResult) -> None:
    best = found.best()
    many = tuple(replace(best, name=f"plan {number}") for number in range(MAX_PLANS + 3))
    page = plan_page("trace", many[0], replace(found, candidates=many), None, "")
    assert "3 slower plans are left out" in page
    assert f"plan {MAX_PLANS}" not in page


def test_optimize_writes_it(tmp_path: Path) -> None:
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    trace, recorded = tmp_path / "trace", as_bucketed(synthetic_trace(one))
    trace.mkdir()
    write_trace(trace, recorded.manifest, recorded.model, recorded.events)
    cluster_of(one).save(tmp_path / "cluster.yaml")
    given = ("optimize", trace, "--cluster", tmp_path / "cluster.yaml")
    done = headway(*given, "-o", tmp_path / "plan.yaml", "--html", tmp_path / "plan.html", "--json")
    assert done.returncode == 0, done.stderr
    assert "Plans compared" in (tmp_path / "plan.html").read_text()
    done = headway(*given, "-o", tmp_path / "p.yaml", "--html", tmp_path / "none" / "p.html")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


class _Whole(HTMLParser):
    """Fails where an element is closed that was not opened."""

    EMPTY = ("meta", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
