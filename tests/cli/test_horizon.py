"""Partial all-reduce on the command line: replayed and predicted over a time, refused where it cannot be run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.answers.asked import JOB, written

from headway.cli.main import run
from headway.plan import Plan
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.trace.folder import load_trace

SLOW_TURNS = replace(JOB, gbps=0.3)
"""Links that all-reduces do not fit under the passes of."""


def plan_for(trace: Path, target: Path, **options: Any) -> Path:
    model = load_trace(trace).model
    Plan.data_parallel(PartialAllReduceStrategy(**options), 4, model).save(target)
    return target


def test_replay_says_how_much_ranks_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(JOB, tmp_path / "trace")
    plan = plan_for(trace, tmp_path / "plan.yaml", group_size=2, staleness=1)
    options = ["--what-if", "compute:0=4x", "--what-if", "bandwidth=10x"]
    assert run(["replay", str(trace), "--plan", str(plan), *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kind"] == "replay-horizon"
    rates = said["rank_iterations_per_s"]
    assert said["iterations_per_s"] == pytest.approx(sum(rates.values()))
    assert min(rates, key=lambda rank: rates[rank]) == "0"
    assert rates["1"] > 2 * rates["0"]
    assert said["speedup"] > 2
    assert set(said["group_sizes"]) == {"2"}
    assert run(["replay", str(trace), "--plan", str(plan), *options]) == 0
    text = capsys.readouterr().out
    assert "iterations/s of all ranks together" in text
    assert "trains otherwise" in " ".join(text.split())


def test_static_groups_on_hosts_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(replace(JOB, ranks_a_host=2), tmp_path / "trace")
    plan = plan_for(trace, tmp_path / "plan.yaml", groups="static")
    assert run(["replay", str(trace), "--plan", str(plan), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["iterations_apart_most"] == 0
    assert said["group_sizes"].keys() == {"2"}
    assert 0 < said["spread"] < 3


def test_hosts_as_workers_are_replayed_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(replace(JOB, ranks_a_host=2), tmp_path / "trace")
    plan = plan_for(trace, tmp_path / "plan.yaml", groups="all", within_hosts="all-reduce")
    assert run(["replay", str(trace), "--plan", str(plan), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["group_sizes"].keys() == {"2"}
    assert said["rank_iterations_per_s"].keys() == {"0", "1", "2", "3"}
    assert "all groups of hosts" in said["strategy"]
    name = "partial-all-reduce:within_hosts=all-reduce,groups=pairs,staleness=1"
    asked = [
        "predict",
        "resnet50",
        "--cluster",
        "edr-100g-pcie",
        "--strategy",
        name,
        "--allow",
        "asynchronous",
    ]
    assert run([*asked, "--workers", "16", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["predictions"]
    assert "every host trains one model on all of its ranks" in found["changes_training"]
    assert sum(found["breakdown_ms"].values()) == pytest.approx(found["step_ms"], rel=0.03)
    assert run([*asked, "--workers", "4", "--json"]) == 2
    assert "all ranks are on one host" in capsys.readouterr().err
    best = ["optimize", str(trace), "-o", str(tmp_path / "best.yaml"), "--allow", "asynchronous", "--json"]
    assert run(best) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert sum("static groups of hosts" in each["name"] for each in plans) == 2


def test_it_is_predicted_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("ddp", "partial-all-reduce:groups=all", "partial-all-reduce:groups=pairs,staleness=1")
    options = [option for name in names for option in ("--strategy", name)]
    assert (
        run(["predict", "resnet50", "--cluster", "gloo-10gbe", "--workers", "1,4", *options, "--json"]) == 0
    )
    said = json.loads(capsys.readouterr().out)["predictions"]
    alone = {each["strategy"]: each for each in said if each["workers"] == 1}
    four = {each["strategy"]: each for each in said if each["workers"] == 4}
    for name in names[1:]:
        assert alone[name]["step_ms"] == pytest.approx(alone["ddp"]["step_ms"], rel=0.03)
        assert "trains otherwise" in four[name]["notes"][0]
        assert sum(four[name]["breakdown_ms"].values()) == pytest.approx(four[name]["step_ms"], rel=0.03)
    assert four[names[1]]["step_ms"] > four["ddp"]["step_ms"], "nothing overlaps backward"
    assert four[names[2]]["step_ms"] < four["ddp"]["step_ms"]


def test_optimize_proposes_nothing_of_it_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(SLOW_TURNS, tmp_path / "trace")
    asked = ["optimize", str(trace), "-o", str(tmp_path / "best.yaml"), "--json"]
    assert run(asked) == 0
    out = capsys.readouterr().out
    assert "partial" not in out
    assert json.loads(out)["changes_training"] == ""
    assert run([*asked, "--strategy", "partial-all-reduce"]) == 2
    assert "--allow asynchronous" in capsys.readouterr().err
    assert Plan.load(tmp_path / "best.yaml").changes_training is None


def test_optimize_proposes_it_where_allowed_and_says_what_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(SLOW_TURNS, tmp_path / "trace")
    asked = ["optimize", str(trace), "-o", str(tmp_path / "best.yaml"), "--allow", "asynchronous"]
    assert run([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    of_groups = [each for each in said["plans"] if each["changes_training"]]
    assert 5 <= len(of_groups) <= 12
    assert len({each["name"] for each in of_groups}) == len(of_groups)
    assert any("static" in each["name"] for each in of_groups)
    assert any("late" in each["changes_training"] for each in of_groups)
    assert "model of its own" in said["changes_training"], "the links are slow, so groups win"
    plan = Plan.load(tmp_path / "best.yaml")
    assert plan.changes_training == said["changes_training"]
    assert plan.strategy.name == "partial-all-reduce"
    assert plan.prediction is not None
    assert run(["replay", str(trace), "--plan", str(tmp_path / "best.yaml"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    (taken,) = (each for each in said["plans"] if each["name"] == said["taken"])
    assert again["step_ms"] == pytest.approx(taken["predicted_ms"], rel=0.05)
    assert run(asked) == 0
    assert "This plan changes what is trained: every rank" in " ".join(capsys.readouterr().out.split())


def test_it_is_recommended_only_where_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = "partial-all-reduce:groups=pairs,staleness=1"
    asked = ["predict", "resnet50", "--cluster", "gloo-10gbe", "--workers", "4", "--strategy"]
    assert run([*asked, "ddp", "--strategy", pairs, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["strategy"], said["recommended"], said["changes_training"]) == ("ddp", True, "")
    assert [bool(each["changes_training"]) for each in said["predictions"]] == [False, True]
    assert run([*asked, "ddp", "--strategy", pairs]) == 0
    assert "recommended only with --allow asynchronous" in " ".join(capsys.readouterr().out.split())
    assert run([*asked, "ddp", "--strategy", pairs, "--allow", "asynchronous", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["strategy"], said["recommended"]) == (pairs, True)
    assert "two runs differ" in said["changes_training"]
    assert run([*asked, pairs, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["strategy"], said["recommended"]) == (pairs, False)
    assert run([*asked, pairs]) == 0
    assert "This is not a recommendation" in " ".join(capsys.readouterr().out.split())
    assert run([*asked, pairs, "--allow", "anything"]) == 2


def test_ranks_die_and_join_under_groups_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(JOB, tmp_path / "trace")
    plan = plan_for(trace, tmp_path / "plan.yaml", group_size=2)
    asked = ["replay", str(trace), "--plan", str(plan)]
    assert run([*asked, "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    happens = ["--what-if", "dies:3@50ms", "--what-if", "joins:2@60ms"]
    assert run([*asked, *happens, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rates, before = said["rank_iterations_per_s"], without["rank_iterations_per_s"]
    assert rates["3"] == 0, "it dies before the warm-up is over"
    assert said["recorded_strategy_iterations_per_s"] == without["recorded_strategy_iterations_per_s"]
    assert rates["0"] > 0.8 * before["0"]
    assert "rank 3 dies after 0.05 s" in said["what_if"]
    late = ["--what-if", "dies:3@1h"]
    assert run([*asked, *late]) == 2
    assert run([*asked, *happens]) == 0
    assert "if no rank died" in " ".join(capsys.readouterr().out.split())
    assert run(["replay", str(trace), *happens]) == 2
    assert "cannot lose or gain ranks" in capsys.readouterr().err
    everybody = [option for rank in range(4) for option in ("--what-if", f"dies:{rank}@1s")]
    assert run([*asked, *everybody]) == 2
    assert "no rank is left" in capsys.readouterr().err
    static = plan_for(trace, tmp_path / "static.yaml", groups="static")
    assert run(["replay", str(trace), "--plan", str(static), *happens]) == 2
    assert "static groups cannot continue when ranks die" in capsys.readouterr().err


def test_random_slowdowns_hold_up_all_reduces_more_than_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(replace(JOB, gbps=20.0), tmp_path / "trace")
    plan = plan_for(trace, tmp_path / "plan.yaml", group_size=2, staleness=1)
    slow = ["--what-if", "random-slowdown:10%=4x", "--json"]
    assert run(["replay", str(trace), *slow]) == 0
    together = json.loads(capsys.readouterr().out)
    assert together["step_ms"] > 1.3 * together["recorded_step_ms"], (
        "one of four is slow in a third of the steps"
    )
    assert run(["replay", str(trace), "--plan", str(plan), *slow]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recorded_strategy_iterations_per_s"] == pytest.approx(4e3 / together["step_ms"])
    assert said["speedup"] > 1.1
    asked = ["predict", "resnet50", "--cluster", "gloo-25gbe", "--workers", "4", "--strategy", "ddp"]
    assert run([*asked, "--json"]) == 0
    even = json.loads(capsys.readouterr().out)
    asked += ["--strategy", "partial-all-reduce:staleness=1,group_size=2"]
    assert run([*asked, *slow]) == 0
    said = json.loads(capsys.readouterr().out)
    ddp, groups = said["predictions"]
    assert ddp["step_ms"] > 1.3 * even["step_ms"]
    assert groups["step_ms"] < ddp["step_ms"]
    assert said["strategy"] == "ddp"
    assert run([*asked, "--what-if", "dies:3@50ms"]) == 2
    assert "cannot lose or gain ranks" in capsys.readouterr().err
    assert run([*asked, "--what-if", "workers=4"]) == 2
