"""The explanation on the command line: in JSON and in text, the same numbers from the recorded step to the plan's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.answers.asked import JOB, written

from headway.cli.main import run

SLOW = replace(JOB, gbps=0.3)


def test_a_plan_is_explained_choice_by_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plan = written(SLOW, tmp_path / "trace"), tmp_path / "plan.yaml"
    asked = ["optimize", str(trace), "-o", str(plan), "--strategy", "decoupled", "--explain"]
    assert run([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    explained = said["explanation"]
    assert explained["choices"][0]["name"] == "decoupled instead of ddp"
    assert explained["choices"][-1]["step_ms"] == explained["to_ms"]
    saved_ms = [each["saved_ms"] for each in explained["choices"]]
    assert sum(saved_ms) == pytest.approx(explained["from_ms"] - explained["to_ms"])
    for each in explained["choices"]:
        assert sum(each["saved_parts_ms"].values()) == pytest.approx(each["saved_ms"], abs=1e-6)
    assert sum(explained["critical_path_ms"].values()) == pytest.approx(explained["to_ms"])
    assert explained["further"]["target_ms"] < explained["to_ms"]
    assert explained["further"]["bandwidth"] > 1

    assert run(asked) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Best plan: ")
    assert explained["next_bottleneck"] in text
    assert "times the bandwidth" in text
    assert "each choice upon those above it" in text
