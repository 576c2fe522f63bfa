"""Whether the ± of predictions covers what was measured, over the rows that two benchmarks have kept.

    python benchmarks/uncertainty.py

Of benchmarks/replay_accuracy.py, whose computation is paced: for every model the half widths are taken from the other
models' rows (nine tenths of their errors lie within) and held against its own. Of benchmarks/jobs.py, whose jobs really
compute on the cores that communicate: the same for other strategies, case by case. Nothing is run; `by all models` and
`by all jobs` have the half widths of all together, which `headway.simulator.expectation` holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from common import RESULTS

from headway.simulator.expectation import expected_ms, half_width_ms

COVERED = 0.9
BUSY = "another strategy on busy cores"
CROWDED, SAME, OTHER = "crowded", "recorded strategy", "other strategy"
Row = dict[str, Any]


def main() -> None:
    rows = json.loads((RESULTS / "replay_accuracy.json").read_text())["rows"]
    bases: dict[str, Row] = {}
    for row in rows:
        if row["class"] == "reproduction":
            bases.setdefault(row["case"], row)  # the recorded run, then the same run again
    asked = [row for row in rows if row["class"] != "reproduction"]
    alone = [abs(_error(row, bases)) <= _width(row, bases, 0.0) for row in asked]
    print(
        f"within the recorded spread and the reproduction error alone: {np.mean(alone):.1%} of {len(asked)}"
    )
    left_out = []
    for model in bases:
        shares = _shares([row for row in asked if row["case"] != model], bases)
        own = [row for row in asked if row["case"] == model]
        left_out += (covered := _covered(own, bases, shares))
        print(f"{model}, by the other models: {np.mean(covered):.1%} of {len(own)}, {_words(shares)}")
    print(f"all, each by the other models: {np.mean(left_out):.1%}")
    shares = _shares(asked, bases)
    for group in shares:
        own = [row for row in asked if _group(row) == group]
        print(f"{group}: {np.mean(_covered(own, bases, shares)):.1%} of {len(own)}")
    print(f"by all models: {np.mean(_covered(asked, bases, shares)):.1%}, {_words(shares)}")
    _jobs(json.loads((RESULTS / "jobs.json").read_text())["rows"])


def _jobs(rows: Sequence[Row]) -> None:
    reproduced = {row["case"]: abs(row["error"]) for row in rows if row["method"] == "replay"}
    asked = [row for row in rows if "within" in row and "decoupled" in row["method"]]

    def covered(row: Row, share: float) -> bool:
        width_ms = half_width_ms(
            row["predicted_ms"],
            recorded_error_ms=row["recorded_error_ms"],
            reproduction_error=reproduced[row["case"]],
            model_share=share,
        )
        return bool(abs(row["predicted_ms"] - row["time_ms"]) <= width_ms)

    def share_of(some: Sequence[Row]) -> float:
        shares = np.arange(0.0, 0.3, 0.001)
        return float(next(s for s in shares if np.mean([covered(row, s) for row in some]) >= COVERED))

    left_out = [
        covered(row, share_of([other for other in asked if other["case"] != row["case"]])) for row in asked
    ]
    print(f"jobs, each by the other jobs: {np.mean(left_out):.1%} of {len(asked)}")
    print(f"by all jobs: {BUSY} ± {share_of(asked):.1%}")


def _group(row: Row) -> str:
    if row["class"] == "crowded":
        return CROWDED
    return SAME if row["method"].startswith("ddp") else OTHER


def _expected_ms(row: Row, bases: dict[str, Row]) -> float:
    base = bases[row["case"]]
    return expected_ms(
        row["predicted_ms"],
        recorded_ms=base["time_ms"],
        reproduced_ms=base["predicted_ms"],
        same_strategy=row["method"].startswith("ddp"),
    )


def _error(row: Row, bases: dict[str, Row]) -> float:
    """What was expected against what was measured, as a share."""
    return float(_expected_ms(row, bases) / row["time_ms"]) - 1


def _width(row: Row, bases: dict[str, Row], share: float) -> float:
    base = bases[row["case"]]
    low, high = base["spread_ms"]
    step_ms = _expected_ms(row, bases)
    width_ms = half_width_ms(
        step_ms,
        recorded_error_ms=(high - low)
        / 1.35
        / math.sqrt(base["steps"]),  # quartiles of a normal distribution
        reproduction_error=abs(base["error"]),
        model_share=share,
    )
    return float(width_ms / row["time_ms"])


def _shares(rows: Iterable[Row], bases: dict[str, Row]) -> dict[str, float]:
    groups: dict[str, list[float]] = {SAME: [], OTHER: [], CROWDED: []}
    for row in rows:
        groups[_group(row)].append(abs(_error(row, bases)))
    return {group: float(np.quantile(errors, COVERED, method="higher")) for group, errors in groups.items()}


def _covered(rows: Iterable[Row], bases: dict[str, Row], shares: dict[str, float]) -> list[bool]:
    return [abs(_error(row, bases)) <= _width(row, bases, shares[_group(row)]) for row in rows]


def _words(shares: dict[str, float]) -> str:
    return ", ".join(f"{group} ± {share:.2%}" for group, share in shares.items())


if __name__ == "__main__":
    main()
