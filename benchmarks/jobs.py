"""Jobs as people write and start them: recorded, planned and run over two lab hosts.

    python benchmarks/jobs.py [--quick] [--only CASE] [--json FILE]

Every case is a script of `strangers/` that knows nothing of Headway, started as its author starts it on two nodes.
It is recorded, diagnosed, optimized from the recording alone, and run under the best plan and the best decoupled one,
in turn with the job as it is. Jobs really compute. A case takes one to two minutes, and is kept as soon as it is done.
Where HEADWAY_JOBS_FOLDER names a folder, runs are kept there too; cases that it holds are predicted again from their
recordings, and run only for the rounds that are missing.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import keep_case, parse_arguments, report, table_page
from job_shapes.catalogue import SHAPES
from job_shapes.rows import rows_of

QUICK = ("gpt-clip",)
ROUNDS = 1
WORDS = (
    "Scripts of `strangers/` on two lab hosts (real Gloo over TCP, 200 Mbit/s each way), one worker each, that really "
    "compute (one thread). `recorded_ms` is the mean step of the one recording that every prediction is made from; "
    "`time_ms` the median over rounds of a job recorded under the plan, `stock_ms` that of the job as it is, in turn "
    "with it. `replay` is the recording's own step replayed. `claimed` and `speedup` are predicted and measured; "
    "`within` says whether the measured step lay within the stated uncertainty (of 90 %). A plan `works` where the "
    "last loss is the unplanned job's, to what the shape's own arithmetic permits."
)


def main() -> None:
    names = [shape.name for shape in SHAPES]
    arguments = parse_arguments(__doc__ or "", names)
    wanted = [arguments.only] if arguments.only else list(QUICK) if arguments.quick else names
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        if shape.name not in wanted:
            continue
        print(f"{shape.name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(os.environ.get("HEADWAY_JOBS_FOLDER", temporary)) / shape.name
            own = rows_of(shape, folder, 1 if arguments.quick else ROUNDS)
        for row in own:
            print(
                {key: row[key] for key in ("method", "outcome", "error") if key in row},
                file=sys.stderr,
                flush=True,
            )
        rows += own
        if not arguments.quick:
            keep_case("jobs", own, names, WORDS, page)
    print(page("jobs", {"rows": rows, "environment": {}}, WORDS))
    if arguments.json is not None:
        report("jobs", rows, arguments, WORDS, page)


def page(name: str, document: dict[str, Any], words: str) -> str:
    """The table, below what it says in all."""
    rows = document["rows"]
    said = [f"{len({row['case'] for row in rows})} shapes; rows that work: "
            f"{sum(row['outcome'] == 'works' for row in rows)} of {len(rows)}."]  # fmt: skip
    planned = [row for row in rows if "within" in row]
    if planned:
        errors = sorted(abs(row["error"]) for row in planned)
        gaps = [abs(row["claimed"] / row["speedup"] - 1) for row in planned]
        inside = sum(row["within"] for row in planned)
        said.append(
            f"{len(planned)} plans run: |error| median {statistics.median(errors):.2%}, 95th percentile "
            f"{errors[min(len(errors) - 1, int(0.95 * len(errors)))]:.2%}; claimed against measured speed-up: median "
            f"difference {statistics.median(gaps):.2%}; within ± {inside} of {len(planned)}."
        )
    return table_page(name, document, words + "\n\n" + " ".join(said))


if __name__ == "__main__":
    main()
