"""Passes of plans where each helps and where it hurts: the step as replay predicts it, and as it is measured.

    python benchmarks/passes.py [--quick] [--only CASE] [--json FILE]

Two workers on lab hosts, a core each, that really compute. A job is recorded once, the pass is measured on it as
`headway measure` does, replay predicts the step with it, and the job runs with the pass and without, in
turn. A case takes two minutes, and is kept as soon as it is done.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import commit, keep_case, median_interval, parse_arguments, report, table_page
from measured_passes.catalogue import CASES, Case
from measured_passes.running import AS_IT_IS, PLANNED, RATE, case_of

QUICK = ("fused-many-small",)
ROUNDS, QUICK_ROUNDS = 5, 2
WORDS = (
    f"Two workers on lab hosts (real Gloo over TCP, {RATE} each way), a core each, that really compute. `predicted_ms` "
    "is the step with the pass as replay has it from one recording of the job as it is, and from what the pass does as "
    "`headway measure` measures it in runs of its own (recomputation and accumulation are predicted from "
    "the recording alone); `time_ms` the median over rounds of runs with the pass, `stock_ms` of runs without it, in "
    "turn with them. `predicted_ratio` and `ratio` are of a step with the pass to one without; `ratio_interval` is of "
    "rounds (bootstrap, 95 %). `expected` was said before anything was measured. `sign` says whether the ratios lie on "
    "the same side of 1; where the interval of the measured one holds 1, nothing is told."
)


def main() -> None:
    names = [case.name for case in CASES]
    arguments = parse_arguments(__doc__ or "", names)
    wanted = [arguments.only] if arguments.only else list(QUICK) if arguments.quick else names
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if case.name not in wanted:
            continue
        print(f"{case.name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="headway-passes-") as folder:
            row = _row(case, case_of(case, Path(folder), QUICK_ROUNDS if arguments.quick else ROUNDS))
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
        if not arguments.quick:
            keep_case("passes", [row], names, WORDS, page)
    report("passes", rows, arguments, WORDS, page)


def page(name: str, document: dict[str, Any], words: str) -> str:
    """The table, behind how many signs are right."""
    rows = document["rows"]
    told = [row for row in rows if row["sign"] != "not told"]
    right = sum(row["sign"] == "right" for row in told)
    unexpected = [row["case"] for row in told if (row["ratio"] < 1) != (row["expected"] == "helps")]
    summary = (
        f"{words}\n\nOf {len(rows)} signs {len(told)} can be told, and {right} of them are predicted. "
        f"Measured against what was expected: {', '.join(unexpected) or 'none'}."
    )
    return table_page(name, document, summary)


def _row(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    answer, taken_ms = found["answer"], found["taken_ms"]
    time_ms, stock_ms = (statistics.median(taken_ms[name]) for name in (PLANNED, AS_IT_IS))
    predicted_ms, uncertainty_ms = answer["predicted_ms"], answer["uncertainty_ms"]
    ratios = [ours / stock for ours, stock in zip(taken_ms[PLANNED], taken_ms[AS_IT_IS], strict=True)]
    low, high = median_interval(ratios)
    ratio, predicted_ratio = statistics.median(ratios), 1 / answer["speedup"]
    return {
        "case": case.name,
        "method": case.changed.describe(),
        "expected": case.expected,
        "predicted_ratio": predicted_ratio,
        "ratio": ratio,
        "ratio_interval": f"{low:.3g} to {high:.3g}",
        "sign": sign_of(predicted_ratio, low, high),
        "time_ms": time_ms,
        "predicted_ms": predicted_ms,
        "error": predicted_ms / time_ms - 1,
        "uncertainty_ms": uncertainty_ms,
        "within": abs(predicted_ms - time_ms) <= uncertainty_ms,
        "stock_ms": stock_ms,
        "recorded_ms": answer["recorded_step_ms"],
        "rounds": len(ratios),
        "commit": commit(),
    }


def sign_of(predicted_ratio: float, low: float, high: float) -> str:
    """Whether a predicted ratio lies on the side of 1 on which a measured one lies, as its interval has it.

    Of one that is 1 nothing is told.
    """
    if low <= 1 <= high or predicted_ratio == 1:
        return "not told"
    return "right" if (predicted_ratio < 1) == (high < 1) else "wrong"


if __name__ == "__main__":
    main()
