"""What one shape gives: whether each command works on it, and its predictions against what was measured."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from job_shapes.catalogue import Shape
from job_shapes.running import Ran, run, step_ms

STEPS = 30


def rows_of(shape: Shape, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Record the shape, plan it, and run the plans and the unplanned job in turn, ``rounds`` times."""
    base = run(shape.name, STEPS, folder, hosts=shape.hosts, record="base")
    case: dict[str, Any] = {"case": shape.name}
    if base.trace is None:
        return [{**case, "method": "record", "outcome": f"not recorded: {base.last_line[:200]}"}]
    verdict, _ = _headway("diagnose", str(folder / "base"))
    case |= {"recorded_ms": step_ms(base.trace), "verdict": verdict.get("verdict", "")[:160]}
    found, why = _headway("optimize", str(folder / "base"), "-o", str(folder / "best.yaml"))
    if not found:
        return [{**case, "method": "optimize", "outcome": f"refused: {why[:200]}", "expected": shape.refused}]
    plans = {"best": found["plans"][0]}
    decoupled, _ = _headway(
        "optimize", str(folder / "base"), "-o", str(folder / "decoupled.yaml"), "--strategy", "decoupled"
    )
    if decoupled and decoupled["plan"] and not plans["best"]["name"].startswith("decoupled"):
        plans["decoupled"] = next(p for p in found["plans"] if p["name"].startswith("decoupled"))
    return [case | row for row in _measured(shape, folder, base, plans, found["replayed_ms"], rounds)]


def _measured(
    shape: Shape, folder: Path, base: Ran, plans: dict[str, dict[str, Any]], replayed_ms: float, rounds: int
) -> list[dict[str, Any]]:
    assert base.trace is not None
    times: dict[str, list[float]] = {"unplanned": [], **{name: [] for name in plans}}
    ends: dict[str, Ran] = {"unplanned": base}
    for number in range(rounds):
        order = list(times) if number % 2 else list(reversed(times))
        for name in order:
            path = None if name == "unplanned" else folder / f"{name}.yaml"
            ended = run(shape.name, STEPS, folder, hosts=shape.hosts, plan=path, record=f"{name}-{number}")
            if ended.trace is not None:
                times[name].append(step_ms(ended.trace))
            if name not in ends or ended.status != 0:
                ends[name] = ended
    stock_ms = statistics.median([step_ms(base.trace), *times["unplanned"]])
    rows = [
        {
            "method": "replay", "outcome": "works", "predicted_ms": replayed_ms, "time_ms": step_ms(base.trace),
            "error": replayed_ms / step_ms(base.trace) - 1,
        }
    ]  # fmt: skip
    for name, plan in plans.items():
        rows.append(_row(name, plan, times[name], stock_ms, base, ends[name], shape))
    return rows


def _row(
    name: str,
    plan: dict[str, Any],
    times_ms: list[float],
    stock_ms: float,
    base: Ran,
    ended: Ran,
    shape: Shape,
) -> dict[str, Any]:
    row: dict[str, Any] = {"method": f"{name}: {plan['name']}", "claimed": plan["speedup"]}
    if not times_ms or ended.status != 0:
        return {**row, "outcome": f"failed with {ended.status}: {ended.last_line[:200]}"}
    measured_ms = statistics.median(times_ms)
    equal = (
        base.loss is not None
        and ended.loss is not None
        and abs(ended.loss - base.loss) <= shape.tolerance * abs(base.loss)
    )
    return {
        **row,
        "outcome": "works" if equal else f"loss {ended.loss} instead of {base.loss}",
        "predicted_ms": plan["predicted_ms"],
        "uncertainty_ms": plan["uncertainty_ms"],
        "time_ms": measured_ms,
        "error": plan["predicted_ms"] / measured_ms - 1,
        "within": abs(plan["predicted_ms"] - measured_ms) <= plan["uncertainty_ms"],
        "stock_ms": stock_ms,
        "speedup": stock_ms / measured_ms,
    }


def _headway(*arguments: str) -> tuple[dict[str, Any], str]:
    """The document that a command prints, or nothing and the line it refused with."""
    ended = subprocess.run(
        [sys.executable, "-m", "headway", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return {}, lines[-1] if lines else f"status {ended.returncode}"
    document: dict[str, Any] = json.loads(ended.stdout)
    return document, ""
