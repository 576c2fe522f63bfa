"""What one shape gives: whether each command works on it, and its predictions against what was measured."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from headway.replayer.replayer import Replayer
from headway.trace.folder import load_trace
from job_shapes.catalogue import Shape
from job_shapes.measuring import UNPLANNED, headway, measured
from job_shapes.running import step_ms

Run = dict[str, Any]


def rows_of(shape: Shape, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Run the shape in ``folder``, or take what is there from before, and predict its plans from the recording."""
    found = measured(shape, folder, rounds)
    case: dict[str, Any] = {"case": shape.name}
    if not found["recorded"]:
        return [{**case, "method": "record", "outcome": f"not recorded: {found['last_line'][:200]}"}]
    trace = load_trace(folder / "base")
    verdict, _ = headway("diagnose", str(folder / "base"))
    case |= {"recorded_ms": step_ms(trace), "verdict": verdict.get("verdict", "")[:160]}
    if "plans" not in found:
        why = f"refused: {found['refused'][:200]}"
        return [{**case, "method": "optimize", "outcome": why, "expected": shape.refused}]
    case["recorded_error_ms"] = Replayer(trace).recorded_error_ms
    stock: list[Run] = found["runs"][UNPLANNED]
    rows: list[dict[str, Any]] = []
    for name, words in found["plans"].items():
        answer, why = headway("replay", str(folder / "base"), "--plan", str(folder / f"{name}.yaml"))
        if not rows and answer:
            rows.append(_reproduction(answer))
        rows.append(_row(f"{name}: {words}", answer, why, found["runs"][name], stock, shape))
    return [case | row for row in rows]


def _reproduction(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": "replay", "outcome": "works", "predicted_ms": answer["reproduced_step_ms"],
        "time_ms": answer["recorded_step_ms"], "error": answer["error"],
    }  # fmt: skip


def _row(
    method: str, answer: dict[str, Any], why: str, runs: list[Run], stock: list[Run], shape: Shape
) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method}
    if not answer:
        return {**row, "outcome": f"not predicted: {why[:200]}"}
    failed = next((run for run in runs if run["status"] != 0 or run["time_ms"] is None), None)
    if failed is not None:
        return {**row, "outcome": f"failed with {failed['status']}: {failed['last_line'][:200]}"}
    predicted_ms = answer["predicted_ms"]
    measured_ms = statistics.median(run["time_ms"] for run in runs)
    stock_ms = statistics.median(run["time_ms"] for run in stock)
    wrong = next((run["loss"] for run in runs if not _equal(run["loss"], stock[0]["loss"], shape)), None)
    return {
        **row,
        "outcome": "works" if wrong is None else f"loss {wrong} instead of {stock[0]['loss']}",
        "predicted_ms": predicted_ms,
        "uncertainty_ms": answer["uncertainty_ms"],
        "time_ms": measured_ms,
        "error": predicted_ms / measured_ms - 1,
        "within": abs(predicted_ms - measured_ms) <= answer["uncertainty_ms"],
        "stock_ms": stock_ms,
        "claimed": answer["speedup"],
        "speedup": stock_ms / measured_ms,
    }


def _equal(loss: float | None, expected: float | None, shape: Shape) -> bool:
    if loss is None or expected is None:
        return False
    return abs(loss - expected) <= shape.tolerance * abs(expected)
