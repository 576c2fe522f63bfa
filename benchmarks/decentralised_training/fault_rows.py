"""Rows of faults: one a schedule, and what they come to together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import commit

from decentralised_training.statistics_of import percentile

SCHEDULES, BATCH = 200, 20
CASES = {f"faults-{first}": tuple(range(first, first + BATCH)) for first in range(0, SCHEDULES, BATCH)}
KINDS = ("kill", "stop", "cut", "join", "coordinator")
PARTS = ("first_s", "all_s", "back_s")
Row = dict[str, Any]


def rows_of(case: str, found: Sequence[Mapping[str, Any]], folder: str) -> list[Row]:
    """A row a schedule; ``folder`` has the logs of those that did not end well."""
    made_by = commit()
    return [
        {
            "case": case, "method": f"{each['generator']}, staleness {each['staleness']}", "seed": each["seed"],
            "faults": "; ".join(_told(fault) for fault in each["faults"]), "survivors": len(each["survivors"]),
            "committed": each["rounds"], "hung": each["hung"], "ended_well": not each["wrong"],
            "wrong": "; ".join(each["wrong"])[:500],
            "logs": f"{folder}/seed-{each['seed']}" if each["wrong"] else "",
            "recoveries": each["recoveries"], "reached_s": each["reached_s"], "commit": made_by,
        }
        for each in found
    ]  # fmt: skip


def _told(fault: Mapping[str, Any]) -> str:
    target = "" if fault["kind"] == "coordinator" else f" {fault['target']}"
    lasts = f" for {fault['until_s'] - fault['at_s']:.1f} s" if fault["until_s"] > fault["at_s"] else ""
    return f"{fault['at_s']:.1f} s: {fault['kind']}{target}{lasts}"


def summary(rows: Sequence[Row]) -> list[Row]:
    """For each kind of fault how many there were, and how long until workers averaged again, as percentiles."""
    lines = []
    for kind in KINDS:
        own = [one for row in rows for one in row["recoveries"] if one["kind"] == kind]
        line: Row = {"fault": kind, "count": len(own)}
        for part in PARTS:
            values = [one[part] for one in own if one[part] is not None]
            for name, share in (("median", 0.5), ("p95", 0.95), ("most", 1.0)):
                line[f"{part[:-2]} {name}"] = f"{percentile(values, share):.2f}" if values else ""
        lines.append(line)
    return lines
