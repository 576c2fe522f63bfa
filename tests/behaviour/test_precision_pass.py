"""Mixed precision goes round the loop: measured, proposed, applied in code and to an unmodified script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from tests import workers
from tests.behaviour.pass_cases import STRATEGIES
from tests.behaviour.pass_loop import fast_cluster, recorded
from tests.commands import headway, run, torchrun

from headway.replayer.measured_effects import FILE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_it_trains_as_a_single_process_under_autocast_does() -> None:
    results = workers.run(2, "tests.behaviour.precision_pass_cases:trained")
    for found in results:
        reference = found["alone"]
        distance = max(abs(a - b) for a, b in zip(reference, found["float32"], strict=True))
        assert distance > 1e-4, "something is rounded"
        for strategy in STRATEGIES:
            assert found[strategy] == pytest.approx(reference, rel=1e-6, abs=distance / 50), strategy


def test_in_float16_it_trains_as_a_single_process_with_a_scaler_does() -> None:
    """All ranks leave out the step in which the gradients of one overflow."""
    results = workers.run(2, "tests.behaviour.float16_pass_cases:trained")
    for found in results:
        reference, scale = found["alone"]
        assert scale == 2.0**15
        assert reference != pytest.approx(found["untrained"], abs=1e-2)
        for strategy in STRATEGIES:
            values, own_scale = found[strategy]
            assert own_scale == scale, strategy
            assert values == pytest.approx(reference, rel=1e-5, abs=1e-6), strategy


def test_an_unmodified_script_trains_in_float16(tmp_path: Path) -> None:
    losses = [tmp_path / "stock.json", tmp_path / "lower.json"]
    script = ("train_small.py", "--width", 400)
    recorded(tmp_path / "stock", *script, "--losses", losses[0])
    planned = headway("optimize", tmp_path / "stock", "-o", tmp_path / "plan.yaml", "--strategy", "ddp")
    assert planned.returncode == 0, planned.stderr
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    plan["passes"] = [{"precision": {"dtype": "float16"}}]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    trained = headway(
        "run", "--plan", tmp_path / "plan.yaml", "--", *torchrun(*script, "--losses", losses[1])
    )
    assert trained.returncode == 0, trained.stderr
    first, second = (json.loads(each.read_text())["losses"] for each in losses)
    assert second != first
    assert second == pytest.approx(first, rel=0.1)


def test_an_unmodified_script_goes_round_the_loop(tmp_path: Path) -> None:
    stock, path, cluster = tmp_path / "stock", tmp_path / "plan.yaml", fast_cluster(tmp_path)
    losses = [tmp_path / "stock.json", tmp_path / "lower.json"]
    script = ("train_small.py", "--width", 400)
    recorded(stock, *script, "--losses", losses[0])
    measuring = [
        sys.executable,
        "-m",
        "headway",
        "measure",
        "precision",
        str(stock),
        "--",
        *torchrun(*script),
    ]
    measured = run(measuring, 300)
    assert measured.returncode == 0, measured.stderr
    written = json.loads((stock / FILE).read_text())
    assert len(written["effects"]) == 2
    assert any(each["memory"] for each in written["effects"].values()), "the watched memory is kept"

    for factor, taken in ((2.0, False), (0.3, True)):  # in the place of what this machine happens to do
        for each in written["effects"].values():
            each["factor"] = factor
        (stock / FILE).write_text(json.dumps(written))
        planned = headway(
            "optimize", stock, "-o", path, "--cluster", cluster, "--strategy", "ddp", "--allow", "precision"
        )
        assert planned.returncode == 0, planned.stderr
        plan = yaml.safe_load(path.read_text())
        assert ("bfloat16" in str(plan.get("passes"))) == taken
        assert ("the model computes in bfloat16" in (plan.get("changes_training") or "")) == taken

    trained = headway("run", "--plan", path, "--", *torchrun(*script, "--losses", losses[1]))
    assert trained.returncode == 0, trained.stderr
    first, second = (json.loads(each.read_text())["losses"] for each in losses)
    assert second != first
    assert second == pytest.approx(first, rel=0.1)
