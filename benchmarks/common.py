"""What benchmarks share: their arguments, the machine they ran on, and how rows become a page and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headway import files
from headway.version import __version__

RESULTS = Path(__file__).parent / "results"
Page = Callable[[str, dict[str, Any], str], str]
"""(name, document, words) to Markdown."""


@dataclass(frozen=True)
class BenchmarkArguments:
    """``quick`` stays under three minutes; ``only`` names one case; ``json`` is where rows go besides."""

    quick: bool
    only: str | None
    json: Path | None


def parse_arguments(description: str, cases: Sequence[str]) -> BenchmarkArguments:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a short run, under three minutes")
    parser.add_argument("--only", choices=cases, metavar="CASE", help=f"one of: {', '.join(cases)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    arguments = parser.parse_args()
    return BenchmarkArguments(arguments.quick, arguments.only, arguments.json)


def commit() -> str:
    """What is checked out, and whether anything but kept results was changed."""

    def said(*command: str) -> str:
        return subprocess.run(["git", *command], capture_output=True, text=True, check=False).stdout.strip()

    changed = said(
        "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results"
    )
    return said("describe", "--always") + ("-dirty" if changed else "")


def interval_ms(values: Sequence[float]) -> str:
    """``median_interval`` in whole milliseconds, as pages show it."""
    low, high = median_interval(values)
    return f"{low:.0f} to {high:.0f}"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of ``values`` drawn anew."""
    import numpy as np
    from scipy import stats  # type: ignore[import-untyped]  # ranks import this file too, and do not need it

    found: Any = stats.bootstrap((values,), np.median, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def order_of(round_number: int, count: int) -> list[int]:
    """Whose turn it is in a round: the order turns by one every two rounds, and every other round goes backwards.

    So nobody always follows upon the same other one, which leaves links and caches in its own way, and within twice as
    many rounds as there are methods everyone begins one.
    """
    order = [(offset + round_number // 2) % count for offset in range(count)]
    return order[::-1] if round_number % 2 else order


def environment() -> dict[str, Any]:
    return {
        "headway": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def table_page(name: str, document: dict[str, Any], words: str) -> str:
    """A page of one table."""
    rows = document["rows"]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"# {name}", "", words, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(row.get(column, '')) for column in columns)} |" for row in rows]
    lines += ["", ", ".join(f"{key} {value}" for key, value in document["environment"].items()), ""]
    return "\n".join(lines)


def report(
    name: str, rows: list[dict[str, Any]], arguments: BenchmarkArguments, words: str, page: Page = table_page
) -> None:
    """Print the rows; a full run also keeps its page and JSON under ``benchmarks/results``."""
    document = {"benchmark": name, "environment": environment(), "rows": rows}
    print(page(name, document, words))
    if arguments.json is not None:
        files.write_text(arguments.json, files.dump_json(document))
    if not arguments.quick and arguments.only is None:
        _keep(name, document, page(name, document, words))


def keep_case(
    name: str, rows: list[dict[str, Any]], cases: Sequence[str], words: str, page: Page = table_page
) -> None:
    """Keep a case that was run in full next to the cases kept before, in the order of ``cases``.

    For benchmarks whose cases take so long together that they are run one by one.
    """
    path = RESULTS / f"{name}.json"
    new = {row["case"] for row in rows}
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = [row for row in kept if row["case"] not in new and row["case"] in cases] + rows
    merged.sort(key=lambda row: cases.index(row["case"]))
    document = {"benchmark": name, "environment": environment(), "rows": merged}
    _keep(name, document, page(name, document, words))


def _keep(name: str, document: dict[str, Any], page: str) -> None:
    files.write_text(RESULTS / f"{name}.json", files.dump_json(document))
    files.write_text(RESULTS / f"{name}.md", page)


def _cell(value: Any) -> str:
    return (f"{value:.4g}" if isinstance(value, float) else str(value)).replace("|", "\\|")


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
