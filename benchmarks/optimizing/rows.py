"""From what was found and measured to rows, and to a page that says how often they are what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from common import commit, interval_ms, table_page

from optimizing.cases import DEFAULT, EXHAUSTIVE, HEADWAY, MEASURED, STOCK

Row = dict[str, Any]
LONGEST_SEARCH_S, LARGEST_ERROR, LEAST_OVER_STOCK, BEST_OVER_STOCK, OF_OPTIMUM = 60.0, 0.05, 0.99, 1.26, 0.01


def rows_of(
    case: str,
    samples: dict[str, dict[str, list[float]]],
    known: dict[str, Row],
    shared: Row,
) -> list[Row]:
    """A row a method; ``known`` is what is known of each besides its times, ``shared`` of all."""
    times_ms = {method: [1e3 * each for each in own["step_s"]] for method, own in samples.items()}
    medians = {method: median(own) for method, own in times_ms.items()}
    best_stock = min(medians[DEFAULT], medians[STOCK])
    rows = []
    for method, own in samples.items():
        time_ms, told = medians[method], known[method]
        row: Row = {
            "case": case, "method": method, "time_ms": time_ms, "interval": interval_ms(times_ms[method]),
            **{name: told.get(name, "") for name in ("predicted_ms", "uncertainty_ms")}, "error": "", "within": "",
            "bound_ms": shared["bound_ms"], **{name: told.get(name, "") for name in ("search_s", "replays")},
            "over_default": medians[DEFAULT] / time_ms, "over_stock": best_stock / time_ms,
            "rounds": len(own["step_s"]), "commit": commit(), "busy_cores": round(median(own["busy_cores"]), 2),
        }  # fmt: skip
        if "predicted_ms" in told:
            off_ms = told["predicted_ms"] - time_ms
            row |= {"error": off_ms / time_ms, "within": abs(off_ms) <= told["uncertainty_ms"]}
        rows.append({**row, **told, **shared})
    return rows


def page(name: str, document: dict[str, Any], words: str) -> str:
    """The table, below what it says in all."""
    return table_page(name, document, "\n\n".join((words, *_said(document["rows"]))))


def _said(rows: Sequence[Row]) -> list[str]:
    ours = {row["case"]: row for row in rows if row["method"] == HEADWAY}
    if not ours:
        return []
    by_runs = {row["case"]: row["over_stock"] for row in rows if row["method"] == MEASURED}
    optimum = {row["case"]: row for row in rows if row["method"] == EXHAUSTIVE}
    over = {case: row["over_stock"] for case, row in ours.items()}
    off = {case: row["error"] for case, row in ours.items()}
    worst_off = max(off, key=lambda case: abs(off[case]))
    above = {
        case: ours[case]["predicted_ms"] / row["predicted_ms"] - 1
        for case, row in optimum.items()
        if case in ours
    }
    best, worst, slowest = max(over, key=over.__getitem__), min(over, key=over.__getitem__), _slowest(ours)
    predicted = [row for row in rows if row["within"] != ""]
    good = sum(each >= LEAST_OVER_STOCK for each in over.values())
    near = sum(abs(each) <= LARGEST_ERROR for each in off.values())
    quick = sum(row["search_s"] < LONGEST_SEARCH_S for row in ours.values())
    count = len(ours)
    return [
        f"Over the better of default and tuned stock: {over[best]:.2f}x at best ({best}; aim {BEST_OVER_STOCK:g}x), "
        f"{over[worst]:.2f}x at worst ({worst}); no less than {LEAST_OVER_STOCK:g}x in {good} of {count} cases.",
        *_decided_said(by_runs),
        f"The measured plan is within {LARGEST_ERROR:.0%} of its prediction in {near} of {count} cases, and off by "
        f"{off[worst_off]:+.1%} at most ({worst_off}). Of all {len(predicted)} predictions "
        f"{sum(row['within'] for row in predicted)} hold within their ±.",
        f"A search takes {ours[slowest]['search_s']:.0f} s at most ({slowest}), less than {LONGEST_SEARCH_S:.0f} s in "
        f"{quick} of {count} cases.",
        "As predicted, the plan that the search finds takes so many times as long as the best of the space: "
        + ", ".join(f"{1 + each:.3f} ({case})" for case, each in above.items())
        + f"; the aim is {1 + OF_OPTIMUM:g} at most.",
        "Recording lengthens steps, and with them `bound_ms`. Where the default was faster when it was measured than "
        "when it was recorded, the bound is shorter by as much; of that our plan takes, as measured, "
        + ", ".join(f"{each:.3f} times ({case})" for case, each in _over_bound(rows, ours).items())
        + ".",
    ]


def _over_bound(rows: Sequence[Row], ours: dict[str, Row]) -> dict[str, float]:
    """By case what our plan takes as measured, in bounds on the clock of the job that measured."""
    unrecorded = {
        row["case"]: min(1.0, row["time_ms"] / row["recorded_ms"]) for row in rows if row["method"] == DEFAULT
    }
    return {case: row["time_ms"] / (row["bound_ms"] * unrecorded[case]) for case, row in ours.items()}


def _decided_said(over: dict[str, float]) -> list[str]:
    if not over:
        return []
    worst = min(over, key=over.__getitem__)
    good = sum(each >= LEAST_OVER_STOCK for each in over.values())
    return [
        f"What short runs decided for (`{MEASURED}`, {len(over)} cases) is {over[worst]:.2f}x at worst ({worst}), and "
        f"no less than {LEAST_OVER_STOCK:g}x in {good}."
    ]


def _slowest(rows: dict[str, Row]) -> str:
    return max(rows, key=lambda case: float(rows[case]["search_s"]))
