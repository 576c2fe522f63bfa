"""Workers of data loaders go round the loop: measured, proposed, and given to an unmodified script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from tests.commands import headway, run, torchrun

from headway.replayer.measured_effects import FILE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_an_unmodified_script_goes_round_the_loop(tmp_path: Path) -> None:
    stock, path, script = tmp_path / "stock", tmp_path / "plan.yaml", ("train_loading.py",)
    found = [tmp_path / "stock.json", tmp_path / "loaded.json"]
    recording = headway("record", "-o", stock, "--steps", "3:8", "--", *torchrun(*script, "--out", found[0]))
    assert recording.returncode == 0, recording.stderr
    measuring = [sys.executable, "-m", "headway.measuring.loading", str(stock), "1", "--", *torchrun(*script)]
    measured = run(measuring, 300)
    assert measured.returncode == 0, measured.stderr
    written = json.loads((stock / FILE).read_text())
    parts = {name.rpartition(" ")[2]: name for name in written["effects"]}
    assert set(parts) == {"input", "forward", "backward"}

    for factor, taken in ((2.0, False), (0.1, True)):  # in the place of what this machine happens to do
        for part, name in parts.items():
            written["effects"][name]["factor"] = factor if part == "input" else 1.0
        (stock / FILE).write_text(json.dumps(written))
        planned = headway("optimize", stock, "-o", path, "--strategy", "ddp")
        assert planned.returncode == 0, planned.stderr
        passes = yaml.safe_load(path.read_text())["passes"]
        assert passes == ([{"input": {"workers": 1, "prefetch": 2}}] if taken else [])

    trained = headway("run", "--plan", path, "--", *torchrun(*script, "--out", found[1]))
    assert trained.returncode == 0, trained.stderr
    before, after = (json.loads(each.read_text()) for each in found)
    assert (before["elsewhere"], after["elsewhere"]) == (False, True)
    assert after["loaded"] == before["loaded"], "the same samples in the same order"
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
