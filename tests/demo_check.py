"""The whole loop on this machine, checked: python -m tests.demo_check FOLDER

Runs ``headway demo --quick`` and checks its document: every stage was reached, losses are equal under all plans, the
report opens, the plan can be read, and predictions are within 20 %. A machine that others use changes its speed from
minute to minute: so the step of the chosen plan, or how many times as fast as stock DDP it was in the same rounds, has
to be within, of the median or of the best round. Where neither is, the demo runs once more, and both are printed. Where
replay does not even reproduce the recording, both times, predictions cannot be judged, which is said.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import headway

FIELDS = {
    "baseline_ms",
    "predicted_ms",
    "measured_ms",
    "speedup",
    "plan",
    "report",
    "runs",
    "loss_difference",
}
LARGEST_ERROR = 0.20
LARGEST_LOSS_DIFFERENCE = 1e-4
ATTEMPTS = 2


def main(folder: Path) -> int:
    """Run and check; returns the exit status."""
    judged = False
    for _ in range(ATTEMPTS):
        document = demo(folder)
        check(document, folder)
        errors = prediction_errors(document)
        said = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items())
        print(
            f"{document['plan']}: {document['speedup']:.2f} times as fast as stock DDP; errors: {said}",
            flush=True,
        )
        if min(map(abs, errors.values())) <= LARGEST_ERROR:
            return 0
        judged |= document["can_rank_plans"]
    if not judged:
        print("The machine was too busy to judge predictions: replay did not reproduce what was recorded.")
        return 0
    print(f"No prediction was within {LARGEST_ERROR:.0%} in {ATTEMPTS} demos.", file=sys.stderr)
    return 1


def demo(folder: Path) -> dict[str, Any]:
    """One demo's document."""
    command = [sys.executable, "-m", "headway", "demo", "--quick", "--json", "-o", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def check(document: dict[str, Any], folder: Path) -> None:
    """What has to hold on any machine, however busy."""
    assert document["complete"]
    assert set(document) >= FIELDS, FIELDS - set(document)
    assert document["loss_difference"] <= LARGEST_LOSS_DIFFERENCE, document["loss_difference"]
    assert len(document["runs"]) == 2
    assert all(len(run["measured_ms"]) == 2 for run in document["runs"])
    page = Path(document["report"]).read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert headway.Plan.load(folder / "plan.yaml").world_size == 2


def prediction_errors(document: dict[str, Any]) -> dict[str, float]:
    """By how much predictions of the plan that was run besides stock DDP are off, whether it was chosen or not."""
    stock, plan = document["runs"]
    predicted = stock["predicted_ms"] / plan["predicted_ms"]
    rounds = [before / after for before, after in zip(stock["measured_ms"], plan["measured_ms"], strict=True)]
    return {
        "of its step": plan["predicted_ms"] / plan["median_ms"] - 1,
        "of its best round": plan["predicted_ms"] / min(plan["measured_ms"]) - 1,
        "of its gain": predicted / (sum(rounds) / len(rounds)) - 1,
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
