"""Headway's own passes go round the loop: predicted, applied in code and to an unmodified script, and recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from tests import workers
from tests.commands import headway, torchrun

from headway.replayer.replayer import Replayer
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
DOCS = Path(__file__).parents[2] / "docs" / "passes.md"


def ran(*arguments: object) -> str:
    done = headway(*arguments, timeout_s=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The passes as the page shows them, of the modules of this script.
SHOWN = [
    yaml.safe_load(each.replace("[blocks.0, blocks.1]", "['1', '3']"))
    for each in DOCS.read_text().split("\n\n")
    if each.startswith("    passes:")
]


@pytest.mark.parametrize(
    ("number", "norm", "batch"), [(0, "batch", 16), (1, "layer", 512)], ids=["recompute", "accumulate"]
)
def test_round_the_loop(number: int, norm: str, batch: int, tmp_path: Path) -> None:
    stock, again, path = tmp_path / "stock", tmp_path / "again", tmp_path / "plan.yaml"
    losses = [tmp_path / "stock.json", tmp_path / "again.json"]
    script = ("train_small.py", "--width", 400, "--norm", norm, "--batch", batch, "--losses")
    ran("record", "-o", stock, "--steps", "3:8", "--", *torchrun(*script, losses[0]))
    ran("optimize", stock, "-o", path, "--strategy", "ddp")
    before = json.loads(ran("replay", stock, "--plan", path, "--json"))
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | SHOWN[number]))
    after = json.loads(ran("replay", stock, "--plan", path, "--json"))
    assert after["step_ms"] >= before["step_ms"]
    assert after["peak_bytes"]["0"] <= before["peak_bytes"]["0"]

    run = (sys.executable, "-m", "headway", "run", "--plan", path, "--")
    ran("record", "-o", again, "--steps", "3:8", "--", *run, *torchrun(*script, losses[1]))
    first, second = (json.loads(each.read_text()) for each in losses)
    if norm == "batch":
        assert second == first, "not one bit differs"
    else:
        assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
    measured = Replayer(load_trace(again)).replay().peak_bytes
    assert after["peak_bytes"]["0"] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("named", ["recompute", "accumulate"])
def test_a_pass_trains_the_same_under_every_strategy(named: str) -> None:
    results = workers.run(2, "tests.behaviour.pass_cases:both", named)
    assert results[0] == results[1]
    for strategy, (plain, changed) in results[0].items():
        expected = plain if named == "recompute" else pytest.approx(plain, rel=1e-9)
        assert changed == expected, strategy
