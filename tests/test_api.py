"""The loop in code gives what the command line gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.answers.asked import JOB, written

import headway
from headway.cli.main import cli


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "trace"
    return written(JOB, folder)


def asked(*arguments: object) -> dict[str, Any]:
    found = CliRunner().invoke(cli, [*map(str, arguments), "--json"], catch_exceptions=False)
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def test_diagnose(recorded: Path) -> None:
    found = headway.diagnose(recorded)
    assert found.verdict == asked("diagnose", recorded)["verdict"]
    assert headway.diagnose(headway.load_trace(recorded)).verdict == found.verdict


def test_replay_and_optimize(recorded: Path, tmp_path: Path) -> None:
    found = headway.optimize(recorded)
    said = asked("optimize", recorded, "-o", tmp_path / "plan.yaml")
    assert found.plan == headway.Plan.load(tmp_path / "plan.yaml")
    assert [each.name for each in found.candidates] == [each["name"] for each in said["plans"]]
    for what_if in ((), ("bandwidth=2x", "workers=4")):
        replayed = headway.replay(recorded, found.plan, what_if=what_if)
        options = [option for each in what_if for option in ("--what-if", each)]
        said = asked("replay", recorded, "--plan", tmp_path / "plan.yaml", *options)
        assert (replayed.step_ms, replayed.uncertainty_ms) == (said["predicted_ms"], said["uncertainty_ms"])
        assert replayed.speedup == replayed.recorded_ms / replayed.step_ms
        assert headway.diagnose(replayed.trace).step_ms > 0
    stock = headway.replay(recorded, headway.strategy("ddp", bucket_cap_mb=1))
    assert stock.step_ms != replayed.step_ms
    assert headway.optimize(recorded, strategy="ddp").plan.strategy.name == "ddp"


def test_predict() -> None:
    asks = ("predict", "resnet50", "--cluster", "gloo-10gbe", "--workers", "2,4")
    found = headway.predict("resnet50", "gloo-10gbe", workers=(2, 4))
    said = [each["step_ms"] for each in asked(*asks)["predictions"]]
    assert [each.step_ms for each in found] == said
    (one,) = headway.predict("resnet50", "gloo-10gbe", workers=(2,), strategies=[headway.strategy("ddp")])
    assert one.step_ms == found[0].step_ms
    shared = headway.predict(
        "resnet50",
        "gloo-10gbe",
        workers=(2, 4),
        strategies=[headway.strategy("ddp")],
        precision="bf16",
        global_batch=64,
    )
    assert [each.samples for each in shared] == [32, 16]
    with pytest.raises(headway.UserError, match="does not divide"):
        headway.predict("resnet50", "gloo-10gbe", workers=(3,), global_batch=64)


def test_refusals(recorded: Path) -> None:
    with pytest.raises(headway.UserError, match="unknown strategy; got 'telepathy'"):
        headway.strategy("telepathy")
    with pytest.raises(headway.UserError, match="unknown key caps"):
        headway.strategy("ddp", caps=3)
    with pytest.raises(headway.UserError, match="--what-if cannot be read"):
        headway.replay(recorded, what_if=["luck=2x"])
    with pytest.raises(headway.TraceError):
        headway.diagnose(recorded / "nothing")
