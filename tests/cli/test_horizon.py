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
from headway.strategies.decentralised.policy import PartialAllReduceStrategy
from headway.trace.folder import load_trace


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


def test_optimize_proposes_nothing_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(JOB, tmp_path / "trace")
    asked = ["optimize", str(trace), "-o", str(tmp_path / "best.yaml"), "--json"]
    assert run(asked) == 0
    assert "partial" not in capsys.readouterr().out
    assert run([*asked, "--strategy", "partial-all-reduce"]) == 2
    assert "Traceback" not in capsys.readouterr().err
