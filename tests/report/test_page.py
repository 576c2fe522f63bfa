"""The HTML page: whole without a network, bounded, and deaf to markup in names."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.report.pages import (
    HOSTILE,
    HOSTILE_JOB,
    MANY_RANKS_JOB,
    detailed_trace,
    part_of,
    served_trace,
)
from tests.synthetic import SyntheticJob, synthetic_trace, with_ranks

from headway.diagnosis import diagnose
from headway.diagnosis.comparison import compare
from headway.diagnosis.findings import Finding
from headway.errors import UserError
from headway.report import decisions, templates
from headway.report.comparison_view import Baseline
from headway.report.drawing import blamed_ranks
from headway.report.page import SCRIPTS, render_html, write_html
from headway.trace.format import Trace

DATA = re.compile(r'<script type="application/json" id="[a-z-]+">([^<]*)</script>')


def rendered(trace: Trace) -> str:
    return render_html(trace, diagnose(trace))


def test_names_cannot_become_markup() -> None:
    html = rendered(synthetic_trace(HOSTILE_JOB))
    assert len(DATA.findall(html)) == 3
    own = DATA.sub("", html)
    assert HOSTILE not in own
    assert "<img" not in own
    assert html.count("alert(1)") == own.count("&lt;script&gt;alert(1)") + "".join(DATA.findall(html)).count(
        "alert(1)"
    )


def test_text_that_cannot_be_shown_does_no_harm(tmp_path: Path) -> None:
    names = ("a\x00b", "half \ud800", "\u202etfel ot thgir", "\x1b]0;title\x07", "z" * 300_000)
    trace = synthetic_trace(SyntheticJob(modules=names))
    ranks = tuple(info.model_copy(update={"host": f"{names[info.rank]}<b>"}) for info in trace.manifest.ranks)
    trace = replace(trace, manifest=trace.manifest.model_copy(update={"ranks": ranks}))
    write_html(trace, diagnose(trace), tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(html) < 2_500_000
    shown = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", shown)
    assert "a\ufffdb&lt;b&gt;" in shown


def test_the_page_names_nothing_elsewhere() -> None:
    html = rendered(synthetic_trace())
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", html)
    assert "default-src 'none'" in html
    assert "unsafe-eval" not in html
    assert len(html) < 2_500_000


def test_own_scripts_can_be_inlined() -> None:
    folder = Path(__file__).parents[2] / "src/headway/report/scripts"
    assert {path.name for path in folder.iterdir()} == {*SCRIPTS, *decisions.SCRIPTS}
    for path in folder.iterdir():
        text = path.read_text()
        assert "</" not in text
        assert "innerHTML" not in text
        assert "eval(" not in text
        assert "new RegExp" not in text


@pytest.mark.parametrize(
    "trace",
    [
        synthetic_trace(SyntheticJob(world_size=1, steps=1)),
        synthetic_trace(SyntheticJob(world_size=70, steps=1)),
        synthetic_trace(SyntheticJob(bucket_bytes=())),
        detailed_trace(SyntheticJob(steps=3), operators=3, messages=2),
        served_trace(SyntheticJob(steps=3)),
        synthetic_trace(
            SyntheticJob(
                input_ms=0, forward_ms=0, backward_ms=0, optimizer_ms=0, rest_ms=0, bucket_bytes=(), steps=3
            )
        ),
    ],
    ids=["one rank", "70 ranks", "no communication", "detail", "server", "no time"],
)
def test_odd_jobs_are_drawn(trace: Trace) -> None:
    html = rendered(trace)
    for rank in trace.events:
        assert f"<td>rank {rank}</td>" in html


def test_many_ranks_stay_small_and_what_matters_comes_first() -> None:
    html = rendered(synthetic_trace(MANY_RANKS_JOB))
    assert len(html) < 6_000_000
    table = html.partition('id="breakdown"')[2]
    assert re.findall(r"<td>rank (\d+)</td>", table)[0] == "37"
    assert "56 more ranks" in table
    assert "Rank 37 and its neighbours" in html


def test_very_many_steps_and_ranks_stay_small() -> None:
    assert len(rendered(synthetic_trace(SyntheticJob(steps=3000, world_size=2)))) < 3_000_000
    html = rendered(synthetic_trace(SyntheticJob(steps=1, world_size=700)))
    assert len(html) < 4_000_000
    assert "more ranks are left out here" in html


def test_ranks_that_the_trace_lacks_are_told() -> None:
    assert "<b>0-3 of 128</b><span>ranks in this trace</span>" in rendered(part_of(synthetic_trace(), 128))
    alone = rendered(part_of(synthetic_trace(SyntheticJob(world_size=1)), 128))
    assert "<b>rank 0</b><span>alone, of 128</span>" in alone
    assert "A trace of one rank does not show which rank it waits for." in alone
    assert "No rank delays the others" not in alone
    few = synthetic_trace(SyntheticJob(world_size=9, bucket_bytes=()))
    for rank in (1, 3, 5, 7):
        del few.events[rank]
    assert "<b>5 of 9</b>" in rendered(few)


def test_findings_besides_the_verdict_are_told_and_their_ranks_marked() -> None:
    trace = synthetic_trace()
    first = Finding("slow_link", 3.0, "The link from <a> to b is slow.", ranks=(1, 77))
    second = Finding("stalls", 2.0, "Rank 2 stops now and then.", ranks=(2,))
    small = Finding("input", 0.1, "Input is nothing.", stands_out=False)
    found = replace(diagnose(trace), verdict=first.sentence, findings=(first, second, small))
    assert blamed_ranks(found) == (1, 2)
    html = render_html(trace, found)
    assert html.count("The link from &lt;a&gt; to b is slow.") == 1
    assert "<li>Rank 2 stops now and then.</li>" in html
    assert small.sentence not in html
    assert "is to blame for 3.00 ms of each step (slow link)" in html
    assert "▸ rank 1<" in html
    assert "▸ rank 2<" in html


def test_the_job_its_buckets_and_modules_are_told() -> None:
    job = replace(HOSTILE_JOB, bucket_bytes=(1_000_000,) * 4)
    trace = synthetic_trace(job)
    buckets = tuple((f"{HOSTILE}{number}", "b") for number in range(3))
    trace = with_ranks(
        trace, {0: {"buckets": buckets, "device": HOSTILE}, 1: {"threads": 64, "cores": ((0, 1),)}}
    )
    trace = replace(trace, model=trace.model.model_copy(update={"class_name": HOSTILE}))
    html = rendered(trace)
    own = DATA.sub("", html)
    assert HOSTILE not in own
    for section in ('id="job"', 'id="not-observed"', 'id="buckets"', 'id="modules"'):
        assert section in own
    assert "<title>Headway diagnosis: synthetic (&lt;script&gt;" in own
    assert "use 64 threads on" in own
    assert "headway optimize synthetic" in own


def test_thousands_of_buckets_and_modules_stay_small() -> None:
    modules = tuple(f"encoder.layer.{number}.attention" for number in range(1500))
    job = SyntheticJob(world_size=2, steps=1, bucket_bytes=(10_000,) * 1500, modules=modules)
    html = rendered(synthetic_trace(job))
    assert len(html) < 5_000_000
    shown = DATA.sub("", html)
    assert "1,460 more buckets are left out here" in shown
    assert "1,488 more modules" in shown
    assert shown.count("encoder.layer.") < 700


def test_two_recordings_are_compared_on_one_page() -> None:
    job = replace(HOSTILE_JOB, bucket_bytes=(1_000_000,) * 4)
    trace, slower = synthetic_trace(job), synthetic_trace(replace(job, forward_ms=25.0))
    slower = with_ranks(slower, {0: {"backend": HOSTILE}})
    before, after = diagnose(trace), diagnose(slower)
    comparison = compare(after, before)
    html = render_html(slower, after, Baseline((HOSTILE,), (before,), comparison))
    own = DATA.sub("", html)
    assert HOSTILE not in own
    assert "<title>Headway comparison: " in own
    for part in ("parts", "steps", "changed", "buckets", "modules"):
        assert f'id="comparison-{part}"' in own
    assert comparison.sentence in re.sub("<[^>]*>", "", own)
    baseline = Baseline.of([Path("some/synthetic"), Path(HOSTILE)], [before, before], comparison)
    again = DATA.sub("", render_html(slower, after, baseline))
    assert HOSTILE not in again
    assert "mean of 2 baselines" in again
    assert Baseline.of([], [], None) is None


def test_numbers_and_their_units_stay_together() -> None:
    html = templates.template("decisions.html.jinja").environment.from_string("{{ text|together }}")
    said = html.render(text="is 14 % of each 120 ms step, <b> 1 switch")
    assert said == (
        'is <span class="nobreak">14 %</span> of each <span class="nobreak">120 ms</span> step, &lt;b&gt; 1 switch'
    )


def test_no_row_of_the_critical_path_is_nothing() -> None:
    own = DATA.sub("", rendered(synthetic_trace(HOSTILE_JOB)))
    table = own.partition('id="path"')[2].partition("</table>")[0]
    assert table.count("data-piece=") >= 3
    assert ">0 %<" not in table


def test_without_bokeh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("bokeh"):
            raise ImportError(name)
        return real(name, *rest, **named)

    trace = synthetic_trace()
    found = diagnose(trace)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'bokeh"):
        write_html(trace, found, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
