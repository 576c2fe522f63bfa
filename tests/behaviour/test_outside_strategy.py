"""A strategy that another package brings goes round the whole loop, and nothing of Headway knows its name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from tests.commands import headway, torchrun

from headway.replayer.replayer import Replayer
from headway.strategies import registry
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

OUTSIDE = Path(__file__).parents[1] / "strategies" / "outside"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The package is installed, here and in every process that is started, and so is one that is broken."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headway.strategies]\nsteep = gone:PLUGIN\n")
    known = os.environ.get("PYTHONPATH", "")
    paths = filter(None, [str(OUTSIDE), str(tmp_path), known])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(sys, "path", [*sys.path, str(OUTSIDE)])
    registry.plugins.cache_clear()
    yield
    registry.plugins.cache_clear()


def ran(*arguments: object) -> str:
    """The output of a command, which says once, whatever ranks it starts, that one package is broken."""
    done = headway(*arguments, timeout_s=300, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("steep (headway.strategies) of the package broken 1.0 is left out") == 1
    return done.stdout


def test_round_the_loop(tmp_path: Path) -> None:
    stock, flat, plan = tmp_path / "stock", tmp_path / "flat", tmp_path / "plan.yaml"
    losses = [tmp_path / "stock.json", tmp_path / "flat.json"]
    ran("record", "-o", stock, "--steps", "3:8", "--", *torchrun("train_small.py", "--losses", losses[0]))

    # Searched, explained, and written to a plan.
    found = json.loads(ran("optimize", stock, "-o", plan, "--strategy", "flat", "--json"))
    (offered,) = (each for each in found["plans"] if each["name"] == "flat")
    assert offered["changes"][0] == "flat instead of ddp"
    assert offered["changes"][-1] == "nothing overlaps any more"
    assert "flat was thought of" in found["note"]
    assert yaml.safe_load(plan.read_text())["parallel"] == {"data": {"flat": {}}}
    assert offered["predicted_ms"] == yaml.safe_load(plan.read_text())["prediction"]["step_ms"]

    # Predicted, of what was recorded and of what was not.
    replayed = json.loads(ran("replay", stock, "--plan", plan, "--json"))
    assert replayed["predicted_ms"] == pytest.approx(offered["predicted_ms"])
    predicted = json.loads(
        ran(
            "predict",
            "resnet50",
            "--cluster",
            "edr-100g-pcie",
            "--workers",
            "4",
            "--strategy",
            "flat",
            "--json",
        )
    )
    assert [each["strategy"] for each in predicted["predictions"]] == ["flat"]

    # Injected into a script that knows nothing of it, run, and recorded.
    run = (
        sys.executable,
        "-m",
        "headway",
        "run",
        "--plan",
        plan,
        "--",
        *torchrun("train_small.py", "--losses", losses[1]),
    )
    ran("record", "-o", flat, "--steps", "3:8", "--", *run)
    first, second = (json.loads(path.read_text())["losses"] for path in losses)
    assert second == pytest.approx(first, rel=1e-5)

    # Recognised in the recording, whose replay communicates what was recorded.
    trace = load_trace(flat)
    assert trace.manifest.ranks[0].strategy == {"flat": {}}
    (bucket,) = trace.manifest.ranks[0].buckets
    assert sorted(bucket) == sorted(trace.model.by_name)
    assert Replayer(trace).replay().strategy.name == "flat"


def test_passes_of_a_plan_are_predicted_and_applied(tmp_path: Path) -> None:
    stock, path = tmp_path / "stock", tmp_path / "plan.yaml"
    ran("record", "-o", stock, "--steps", "3:8", "--", *torchrun("train_small.py"))
    ran("optimize", stock, "-o", path, "--strategy", "flat")
    before = json.loads(ran("replay", stock, "--plan", path, "--json"))["step_ms"]
    plan = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**plan, "passes": [{"laboured": {"times": 50}}]}))
    assert json.loads(ran("replay", stock, "--plan", path, "--json"))["step_ms"] > 10 * before
    said = ran("run", "--plan", path, "--", *torchrun("train_small.py"))
    assert said.count("computes 50.0 times as long") == 2
