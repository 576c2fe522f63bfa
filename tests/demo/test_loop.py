"""The demo's choice and what it keeps, with made-up runs in the place of a lab."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.cli.main import run
from headway.demo import loop
from headway.demo.loop import DemoOptions, DemoResult, PlanRuns, run_demo
from headway.errors import HeadwayError
from headway.lab.spec import LabSpec
from headway.optimization.result import SearchResult
from headway.optimization.search import search
from headway.plan import Plan
from headway.replayer.replayer import Replayer
from headway.trace.format import Trace

Measure = Callable[[PlanRuns], float]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return as_bucketed(synthetic_trace(job(forward_ms=20, backward_ms=40, gbps=1.0)))


@pytest.fixture(scope="module")
def found(trace: Trace) -> SearchResult:
    """A search in which a pipeline, which the script cannot run, is predicted to be the fastest."""
    replayer = Replayer(trace, cluster_of(job(forward_ms=20, backward_ms=40, gbps=1.0)))
    result = search(replayer)
    best = result.candidates[0]
    ahead = replace(best.expected, step_ms=1.0)
    pipeline = replace(best, name="2 stages", recut=replayer.job, expected=ahead)
    return replace(result, for_other_scripts=(pipeline,))


@pytest.fixture
def demo(
    tmp_path: Path, trace: Trace, found: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Measure], DemoResult]:
    """A demo whose runs take as long as a function says."""

    def of(step_ms: Measure) -> DemoResult:
        class Lab:
            notices: list[str] = []

            def __init__(self, options: DemoOptions) -> None:
                pass

            def record(self, _out: Path, *, measure: bool) -> Trace:
                assert measure
                return trace

            def measure(self, each: PlanRuns) -> None:
                each.steps_ms.append([step_ms(each)] * 10)
                each.losses = [2.0, 1.0]

        monkeypatch.setattr(loop, "_Lab", Lab)
        monkeypatch.setattr(loop, "search", lambda _replayer: found)
        monkeypatch.setattr(loop, "write_html", lambda _trace, _diagnosis, path: path.write_text("<html>"))
        options = DemoOptions(tmp_path, LabSpec(hosts=4), probes=False)
        return run_demo(options, lambda _stage: None)

    return of


def test_a_plan_that_the_script_cannot_run_is_never_chosen(
    demo: Callable[[Measure], DemoResult], found: SearchResult, tmp_path: Path
) -> None:
    result = demo(lambda each: 50.0 if each.plan_path is None else 40.0)
    assert result.chosen in result.runs[1:]
    assert all(each.candidate.is_runnable for each in result.runs)
    assert len({each.candidate.strategy.name for each in result.runs[1:]}) == len(result.runs) - 1 > 0
    assert result.speedup == pytest.approx(1.25)
    assert result.chosen is not None
    assert Plan.load(tmp_path / "plan.yaml").strategy == result.chosen.candidate.strategy
    document = json.loads((tmp_path / "demo.json").read_text())
    assert document["complete"]
    assert {"baseline_ms", "predicted_ms", "measured_ms", "speedup", "plan", "report"} <= set(document)


def test_a_machine_that_has_changed_since_the_recording_is_told(
    demo: Callable[[Measure], DemoResult], found: SearchResult
) -> None:
    assert found.recorded is not None
    recorded_ms = found.recorded.predicted_ms
    assert demo(lambda _: 0.85 * recorded_ms).has_machine_changed
    assert not demo(lambda _: 0.95 * recorded_ms).has_machine_changed


def test_stock_ddp_is_kept_unless_a_plan_is_faster_in_every_round(
    demo: Callable[[Measure], DemoResult], found: SearchResult, tmp_path: Path
) -> None:
    result = demo(lambda each: 50.0 if each.plan_path is None else 49.0 - 9 * len(each.steps_ms))
    assert result.keeps_recorded
    assert result.speedup == 1.0
    assert found.recorded is not None
    assert Plan.load(tmp_path / "plan.yaml").strategy.name == found.recorded.strategy.name
    assert json.loads((tmp_path / "demo.json").read_text())["plan"] == "stock DDP"


def test_what_was_measured_is_kept_when_a_later_stage_fails(
    demo: Callable[[Measure], DemoResult], tmp_path: Path
) -> None:
    def fails_late(each: PlanRuns) -> float:
        if each.plan_path is not None and each.steps_ms:
            raise RuntimeError("the network is gone")
        return 50.0

    with pytest.raises(HeadwayError, match=r"failed while training with .*the network is gone.*demo\.json"):
        demo(fails_late)
    document = json.loads((tmp_path / "demo.json").read_text())
    assert not document["complete"]
    assert [len(each["measured_ms"]) for each in document["runs"] if "measured_ms" in each]
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("rate", ["fast", "0mbit", "-1gbit"])
def test_a_bad_rate_is_refused_before_an_earlier_demo_is_removed(
    rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "demo.json").write_text("{}")
    assert run(["demo", "-o", str(folder), "--rate", rate]) == 2
    said = capsys.readouterr().err
    assert said.startswith("headway: the demo's lab: rate: ")
    assert said.count("\n") == 1
    assert (folder / "demo.json").read_text() == "{}"
