"""Compiled modules: proposed where measurements say so, applied in code and to an unmodified script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from tests import workers
from tests.behaviour.compile_pass_cases import EXPECTED_GRAPHS
from tests.behaviour.pass_cases import STRATEGIES
from tests.behaviour.pass_loop import fast_cluster, recorded
from tests.commands import headway, torchrun

from headway.job import MeasuredEffect
from headway.passes.compile import Compile
from headway.replayer.measured_effects import save_effects
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_it_trains_as_a_single_process_does() -> None:
    results = workers.run(2, "tests.behaviour.compile_pass_cases:trained")
    for found in results:
        for strategy in STRATEGIES:
            assert found[strategy] == pytest.approx(found["alone"], rel=1e-9, abs=1e-12), strategy
            by_name = found[f"{strategy}: by name"]
            assert by_name == pytest.approx(found["alone"], rel=1e-9, abs=1e-12), strategy
            assert found[f"{strategy}: graphs"] == EXPECTED_GRAPHS, strategy


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++ on processors")
def test_an_unmodified_script_goes_round_the_loop(tmp_path: Path) -> None:
    stock, path, cluster = tmp_path / "stock", tmp_path / "plan.yaml", fast_cluster(tmp_path)
    losses = [tmp_path / "stock.json", tmp_path / "compiled.json"]
    script = ("train_small.py", "--width", 400)
    recorded(stock, *script, "--losses", losses[0])
    trace, changed = load_trace(stock), Compile(modules=("0", "3"))
    for factor, taken in ((2.0, False), (0.3, True)):  # as the tests of measuring have it
        effects = {changed.effect_name(part): MeasuredEffect(factor) for part in changed.parts}
        save_effects(trace, effects, "cpu")
        planned = headway("optimize", stock, "-o", path, "--cluster", cluster, "--strategy", "ddp")
        assert planned.returncode == 0, planned.stderr
        passes = yaml.safe_load(path.read_text())["passes"]
        assert passes == ([{"compile": {"modules": ["0", "3"]}}] if taken else [])

    trained = headway("run", "--plan", path, "--", *torchrun(*script, "--losses", losses[1]))
    assert trained.returncode == 0, trained.stderr
    first, second = (json.loads(each.read_text())["losses"] for each in losses)
    assert second == pytest.approx(first, rel=1e-3)
