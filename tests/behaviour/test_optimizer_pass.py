"""The pass of the optimizer goes round the loop: measured, predicted, applied in code and to an unmodified script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests import workers
from tests.behaviour.pass_loop import recorded
from tests.commands import headway, torchrun

from headway.replayer.measured_effects import FILE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
DOCS = Path(__file__).parents[2] / "docs" / "passes.md"


def test_it_trains_the_same_under_every_strategy() -> None:
    results = workers.run(2, "tests.behaviour.optimizer_pass_cases:switched")
    assert results[0] == results[1]
    for strategy, ((stock, chosen), (foreach, in_foreach), (fused, in_fused)) in results[0].items():
        assert (chosen, in_foreach, in_fused) == ([None, None], [True, None], [None, True]), strategy
        assert foreach == pytest.approx(stock, rel=1e-12), strategy
        assert fused == pytest.approx(stock, rel=1e-12), strategy


def test_an_unmodified_script_goes_round_the_loop(tmp_path: Path) -> None:
    stock, path = tmp_path / "stock", tmp_path / "plan.yaml"
    losses = [tmp_path / "stock.json", tmp_path / "fused.json"]
    recorded(stock, "train_small.py", "--losses", losses[0])
    written = headway("optimize", stock, "-o", path, "--strategy", "ddp")
    assert written.returncode == 0, written.stderr
    # The pass as the page shows it.
    (shown,) = [each for each in DOCS.read_text().split("\n\n") if "    - optimizer:" in each]
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | yaml.safe_load(shown)))

    unknown = headway("replay", stock, "--plan", path, "--json")
    assert unknown.returncode == 2
    assert "headway measure optimizer TRACE" in unknown.stderr
    measured = headway("measure", "optimizer", stock)
    assert measured.returncode == 0, measured.stderr
    assert "optimizer fused SGD" in measured.stdout
    replayed = headway("replay", stock, "--plan", path, "--json")
    assert replayed.returncode == 0, replayed.stderr
    factor = json.loads((stock / FILE).read_text())["effects"]["optimizer fused SGD"]["factor"]
    plain = json.loads(headway("replay", stock, "--json").stdout)
    assert (json.loads(replayed.stdout)["step_ms"] < plain["step_ms"]) == (factor < 1)

    trained = headway("run", "--plan", path, "--", *torchrun("train_small.py", "--losses", losses[1]))
    assert trained.returncode == 0, trained.stderr
    first, second = (json.loads(each.read_text()) for each in losses)
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
    assert second["checksum"] == pytest.approx(first["checksum"], rel=1e-4)
