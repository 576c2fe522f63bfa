"""Workers of data loaders: proposed where measurements say so, and given to an unmodified script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.behaviour.pass_loop import recorded
from tests.commands import headway, torchrun

from headway.graph.computation import Part
from headway.job import MeasuredEffect
from headway.passes.input_workers import InputWorkers
from headway.replayer.measured_effects import save_effects
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_an_unmodified_script_goes_round_the_loop(tmp_path: Path) -> None:
    stock, path, script = tmp_path / "stock", tmp_path / "plan.yaml", ("train_loading.py",)
    found = [tmp_path / "stock.json", tmp_path / "loaded.json"]
    recorded(stock, *script, "--out", found[0])
    trace, changed = load_trace(stock), InputWorkers(workers=1)
    for factor, taken in ((2.0, False), (0.1, True)):  # as the tests of measuring have it
        effects = {
            changed.effect_name(part): MeasuredEffect(factor if part == Part.INPUT else 1.0)
            for part in changed.parts
        }
        save_effects(trace, effects, "cpu")
        planned = headway("optimize", stock, "-o", path, "--strategy", "ddp", "--allow", "randomness")
        assert planned.returncode == 0, planned.stderr
        passes = yaml.safe_load(path.read_text())["passes"]
        assert passes == ([{"input": {"workers": 1, "prefetch": 2}}] if taken else [])

    trained = headway("run", "--plan", path, "--", *torchrun(*script, "--out", found[1]))
    assert trained.returncode == 0, trained.stderr
    before, after = (json.loads(each.read_text()) for each in found)
    assert (before["elsewhere"], after["elsewhere"]) == (False, True)
    assert after["loaded"] == before["loaded"], "the same samples in the same order"
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
