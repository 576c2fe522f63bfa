"""Local SGD and asynchronous servers on the command line, over a time, proposed by nobody; and more workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.answers.asked import JOB, written

from headway.cli.main import run
from headway.plan import Plan
from headway.strategies.base import Strategy
from headway.trace.folder import load_trace
from headway_baselines.asynchronous_servers.policy import AsynchronousServersStrategy
from headway_baselines.local_sgd.policy import LocalSGDStrategy


def replayed(
    strategy: Strategy, tmp_path: Path, capsys: pytest.CaptureFixture[str], *what_if: str
) -> dict[str, Any]:
    trace = tmp_path / "trace"
    if not trace.exists():
        written(JOB, trace)
    plan = tmp_path / "plan.yaml"
    Plan.data_parallel(strategy, 4, load_trace(trace).model).save(plan)
    options = [word for each in what_if for word in ("--what-if", each)]
    assert run(["replay", str(trace), "--plan", str(plan), *options]) == 0
    assert "trains otherwise" in " ".join(capsys.readouterr().out.split())
    assert run(["replay", str(trace), "--plan", str(plan), *options, "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["kind"] == "replay-horizon"
    return said


def test_longer_periods_of_local_sgd_communicate_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    each, tenth = (replayed(LocalSGDStrategy(steps=steps), tmp_path, capsys) for steps in (1, 10))
    assert tenth["iterations_per_s"] > each["iterations_per_s"]
    assert tenth["standing_ms"] < each["standing_ms"] / 5
    assert (each["spread"], tenth["spread"] > 1) == (0.0, True)
    assert set(tenth["group_sizes"]) == {"4"}


def test_a_straggler_holds_local_sgd_up_and_asynchronous_servers_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ("compute:0=4x", "bandwidth=10x")
    together = replayed(LocalSGDStrategy(steps=8), tmp_path, capsys, *slow)
    rates = together["rank_iterations_per_s"]
    assert rates["1"] == pytest.approx(rates["0"])
    apart = replayed(AsynchronousServersStrategy(), tmp_path, capsys, *slow)
    rates = apart["rank_iterations_per_s"]
    assert rates["1"] > 2 * rates["0"]
    assert apart["staleness_mean"] > 0
    bounded = replayed(AsynchronousServersStrategy(staleness=1), tmp_path, capsys, *slow)
    assert bounded["iterations_per_s"] < apart["iterations_per_s"]


def test_both_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("ddp", "local-sgd:steps=16", "local-sgd:outer_optimizer=sgd", "asynchronous-parameter-server")
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
    assert four[names[1]]["step_ms"] < four["ddp"]["step_ms"]
    assert four[names[2]]["peak_bytes"] > four[names[1]]["peak_bytes"]


def test_wrong_options_are_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "resnet50", "--cluster", "gloo-10gbe", "--strategy"]
    for name in (
        "local-sgd:nesterov=true",
        "local-sgd:steps=0",
        "asynchronous-parameter-server:staleness=-1",
    ):
        assert run([*asked, name]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert len(said.strip().splitlines()) <= 2


def test_more_workers_are_compared_by_samples_a_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(JOB, tmp_path / "trace")
    asked = ["replay", str(tmp_path / "trace"), "--what-if", "workers=8"]
    assert run([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workers"] == 8
    assert document["throughput_ratio"] == pytest.approx(8 / JOB.world_size * document["efficiency"])
    assert document["efficiency"] == pytest.approx(document["recorded_step_ms"] / document["predicted_ms"])
    assert run(asked) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert f"{document['throughput_ratio']:.2f} times the samples a second of the recorded" in first
    assert f"efficiency {document['efficiency']:.0%}" in first
