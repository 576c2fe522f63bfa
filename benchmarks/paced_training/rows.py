"""From what the ranks measured to the rows that are printed: times, bounds, ratios, speedups."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import commit, interval_ms

from paced_training.methods import ALONE, DEFAULT, TUNED

_AGREE = 1e-4


@dataclass(frozen=True)
class Bounds:
    """What no method of a kind can beat, from times measured alone and the volume at the measured goodput."""

    forward_ms: float
    backward_ms: float
    one_way_ms: float

    def of(self, kind: str) -> float:
        """``all-reduce`` overlaps with backward only; ``across steps`` also with the next forward, undivided."""
        f, b, c = self.forward_ms, self.backward_ms, self.one_way_ms
        return {
            "all-reduce": f + max(b, 2 * c),
            "decoupled": max(f, c) + max(b, c),
            "across steps": max(f + b, 2 * c),
            "none": f + b,
        }[kind]


def rows_of(case: str, described: Mapping[str, Any], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a method; those that failed carry ``error``."""
    methods = {method["method"]: method for method in found["methods"]}
    alone = methods[ALONE]["samples"]
    goodput = max(found["goodput_bytes_per_s"])  # the probe that gives the tighter bound
    bounds = Bounds(
        forward_ms=_median_ms(alone["forward_s"]),
        backward_ms=_median_ms(alone["backward_s"]),
        one_way_ms=found["one_way_bytes"] / goodput * 1e3,
    )
    computing_ms = _median_ms(alone["step_s"])
    medians = {name: _median_ms(method["samples"]["step_s"]) for name, method in methods.items()}
    rows, checked_out = [], commit()
    for name, method in methods.items():
        time_ms, bound_ms = medians[name], bounds.of(method["bound"])
        low, _, high = statistics.quantiles(method["samples"]["step_s"], n=4, method="inclusive")
        row: dict[str, Any] = {
            "case": case,
            "method": name,
            "time_ms": time_ms,
            "spread": f"{low * 1e3:.0f} to {high * 1e3:.0f}",
            "interval": interval_ms([each * 1e3 for each in method["samples"]["step_s"]]),
            "bound_ms": bound_ms,
            "ratio": time_ms / bound_ms,
            **_dependency(time_ms, method["bound"], found),
            "speedup_over_tuned": medians.get(TUNED, float("nan")) / time_ms,
            "speedup_over_default": medians[DEFAULT] / time_ms,
            "exposed_ms": max(0.0, time_ms - computing_ms),
        }
        row |= method["memory"]
        row |= tuning_cost(method["tuning_steps_ms"], time_ms, medians[DEFAULT])
        row["cpu"] = f"{sum(method['samples']['cpu_s']) / sum(method['samples']['step_s']) / _cores():.0%}"
        row["stolen"] = statistics.mean(method["samples"]["stolen"])
        row["commit"] = checked_out
        row["busiest_core"] = f"{statistics.median(method['samples']['busiest_core']):.0%}"
        if name != ALONE:
            row["agrees"] = method["disagreement"] < _AGREE
            row["disagreement"] = method["disagreement"]
        rows.append(row | _shared(described, bounds, found, goodput) | {"note": _note(method, found)})
    rows += [{"case": case, "method": name, "error": error} for name, error in found["errors"].items()]
    return rows


def _dependency(time_ms: float, kind: str, found: Mapping[str, Any]) -> dict[str, float]:
    """The bound that respects which gradients are ready and which parameters needed when; of decoupled methods."""
    if kind != "decoupled":
        return {}
    bound_ms = found["dependency_bound_s"] * 1e3
    return {"dependency_bound_ms": bound_ms, "dependency_ratio": time_ms / bound_ms}


def tuning_cost(steps_ms: Sequence[float], time_ms: float, default_ms: float) -> dict[str, float]:
    """What tuning in a running job costs: the steps it took, and by how many of default DDP's they were longer than as
    many of those; where it gains, after how many steps with what was found that is paid back."""
    if not steps_ms:
        return {}
    lost_ms, gain_ms = sum(steps_ms) - len(steps_ms) * default_ms, default_ms - time_ms
    found = {"tuning_steps": len(steps_ms), "tuning_lost_steps": lost_ms / default_ms}
    return found | ({"tuning_paid_back_steps": max(0.0, lost_ms) / gain_ms} if gain_ms > 0 else {})


def _shared(
    described: Mapping[str, Any], bounds: Bounds, found: Mapping[str, Any], goodput: float
) -> dict[str, Any]:
    compute_ms = bounds.forward_ms + bounds.backward_ms
    return {
        "t_f_ms": bounds.forward_ms,
        "t_b_ms": bounds.backward_ms,
        "c_ms": bounds.one_way_ms,
        "ratio_measured": bounds.one_way_ms / compute_ms,
        "ratio_imitated": described.get("ratio", ""),
        "goodput_mbit": goodput * 8e-6,
        "alpha_ms": found["all_reduce"]["alpha_s"] * 1e3,
        "rate_mbit": described["rate_mbit"],
        "size_mib": found["size_bytes"] / 2**20,
        "size_scale": f"1/{described['shrink']}" if "shrink" in described else 1,
        "dilation": described.get("dilation", 1),
        "paced": described["paced"],
    }


def _note(method: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    tried = found["tried_ms"].get(method["method"])
    note = str(method["note"])
    return f"{note}; tried (ms): {', '.join(f'{k}: {v:g}' for k, v in tried.items())}" if tried else note


def _median_ms(values: list[float]) -> float:
    return statistics.median(values) * 1e3


def _cores() -> int:
    return os.cpu_count() or 1
