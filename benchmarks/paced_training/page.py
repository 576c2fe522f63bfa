"""The page of kept rows: a summary of all cases, then each case with its methods and what was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paced_training.methods import DEFAULT, OURS, PUBLISHED, TUNED

Row = dict[str, Any]
SUMMARY = (
    "case", "c / compute", "DDP ms", "tuned DDP ms", "DeAR ms", "ours ms", "/ bound", "/ dependency bound",
    "over tuned", "over default", "over DeAR", "at most", "optimizer MiB (DDP's)",
)  # fmt: skip
METHODS = (
    ("ms", "time_ms", "{:.0f}"),
    ("quartiles", "spread", "{}"),
    ("interval", "interval", "{}"),
    ("bound", "bound_ms", "{:.0f}"),
    ("/ bound", "ratio", "{:.3f}"),
    ("/ dependency bound", "dependency_ratio", "{:.3f}"),
    ("over tuned", "speedup_over_tuned", "{:.3f}"),
    ("over default", "speedup_over_default", "{:.3f}"),
    ("exposed ms", "exposed_ms", "{:.0f}"),
    ("peak MiB", "peak_mib", "{:.2f}"),
    ("optimizer MiB", "optimizer_mib", "{:.2f}"),
    ("cpu", "cpu", "{}"),
    ("stolen", "stolen", "{:.1%}"),
    ("disagreement", "disagreement", "{:.0e}"),
    ("commit", "commit", "{}"),
)


def page(name: str, document: dict[str, Any], words: str) -> str:
    """The whole page, in Markdown."""
    by_case: dict[str, list[Row]] = {}
    for row in document["rows"]:
        by_case.setdefault(row["case"], []).append(row)
    lines = [
        f"# {name}",
        "",
        words,
        "",
        *_table(SUMMARY, [_summary(case, rows) for case, rows in by_case.items()]),
    ]
    for case, rows in by_case.items():
        lines += ["", f"## {case}", "", *_case(rows)]
    lines += ["", ", ".join(f"{key} {value}" for key, value in document["environment"].items()), ""]
    return "\n".join(lines)


def most(row: Row) -> float:
    """The largest possible speedup of decoupling over an ideal all-reduce, from a row's measured times."""
    f, b, c = row["t_f_ms"], row["t_b_ms"], row["c_ms"]
    return float((f + max(b, 2 * c)) / (max(f, c) + max(b, c)))


def _summary(case: str, rows: Sequence[Row]) -> list[str]:
    methods = {row["method"]: row for row in rows if "time_ms" in row}
    ours, dear, stock = (methods.get(name) for name in (OURS, PUBLISHED, DEFAULT))
    if ours is None or stock is None:
        return [case]
    times = [
        f"{methods[name]['time_ms']:.0f}" if name in methods else ""
        for name in (DEFAULT, TUNED, PUBLISHED, OURS)
    ]
    over_dear = f"{dear['time_ms'] / ours['time_ms']:.3f}" if dear else ""
    return [
        case,
        f"{ours['ratio_measured']:.2f}",
        *times,
        f"{ours['ratio']:.3f}",
        _text("{:.3f}", ours.get("dependency_ratio")),
        f"**{ours['speedup_over_tuned']:.3f}**",
        f"{ours['speedup_over_default']:.3f}",
        over_dear,
        f"{most(ours):.3f}",
        f"{ours['optimizer_mib']:.2f} ({stock['optimizer_mib']:.2f})",
    ]


def _case(rows: Sequence[Row]) -> list[str]:
    shared = next(row for row in rows if "t_f_ms" in row)
    facts = [
        f"t_f {shared['t_f_ms']:.0f} ms, t_b {shared['t_b_ms']:.0f} ms, c {shared['c_ms']:.0f} ms",
        f"{shared['size_mib']:.2f} MiB of parameters on links of {shared['rate_mbit']:g} Mbit/s, "
        f"goodput {shared['goodput_mbit']:.1f}",
    ]
    if shared["paced"]:
        facts.append(
            f"paced: sizes times {shared['size_scale']}, times times {shared['dilation']:.2f}; c / compute "
            f"{shared['ratio_measured']:.3f}, that imitated {shared['ratio_imitated']:.3f}"
        )
    table = [
        [
            _method(row),
            *(_text(form, row.get(key)) for _, key, form in METHODS),
        ]
        for row in rows
        if "time_ms" in row
    ]
    lines = ["; ".join(facts) + ".", "", *_table(["method", *(title for title, _, _ in METHODS)], table), ""]
    lines += [
        f"- {row['method']}: {row.get('error') or row['note']}"
        for row in rows
        if row.get("error") or row.get("note")
    ]
    lines += [f"- {row['method']}: {tuning_words(row)}" for row in rows if "tuning_steps" in row]
    return lines


def tuning_words(row: Row) -> str:
    """What a row says of the cost of tuning."""
    steps, paid = (
        row["tuning_steps"],
        _text("; paid back {:.0f} steps later", row.get("tuning_paid_back_steps")),
    )
    return f"{steps} steps until tuned took as long as {steps + row['tuning_lost_steps']:.1f} of default DDP's{paid}"


def _method(row: Row) -> str:
    return str(row["method"]) if row.get("agrees", True) else f"{row['method']} (DISAGREES)"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _text(form: str, value: Any) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else form.format(value)
