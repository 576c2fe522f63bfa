"""Pipelines side by side: every product predicted from a recording of one, against its measured step.

    python benchmarks/pipeline_products.py [--quick] [--only CASE] [--json FILE]

Two pipelines of two stages on the lab's shaped links, the replicas of each stage in DDP or the decoupled all-reduce.
One run is recorded, under torch's own 1F1B with DDP, and its links are probed; all else is predicted from these alone,
and timed in the same job.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import commit, interval_ms, keep_case, parse_arguments, report
from in_lab import run_in_lab
from pipeline_training.products import CASES, FOUND, PROBED, RECORDED, TRACE, ProductCase

from headway.cluster import Cluster
from headway.lab.spec import parse_spec
from headway.replayer.replayer import Replayer
from headway.trace.folder import load_trace

WORKER = "--worker"
TIMEOUT_S = 600.0
QUICK = ("quiet-one-bucket",)
WORDS = (
    "Two pipelines of two stages on four hosts of the lab; the replicas of a stage are in DDP, or in the decoupled "
    "all-reduce where that is said, gathering parameters or gradients. `time_ms` is the median "
    "over interleaved rounds of the mean of three consecutive steps, `interval` its 95 % (bootstrap over rounds), "
    "without a recorder. `predicted_ms` is what replay says from ONE recording of torch's own 1F1B in the same job "
    "(`torch-1f1b` is that recording itself) and from the links as `headway probe --idle-cores` measured them. Layers "
    "are paced: they sleep, messages and gradients (8 MiB a stage) are real. `cpu` is what all ranks used of all cores."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else QUICK if arguments.quick else tuple(CASES):
        print(f"{name} …", file=sys.stderr, flush=True)
        own = _of_case(CASES[name], quick=arguments.quick)
        if not arguments.quick:
            keep_case("pipeline_products", own, list(CASES), WORDS)
        rows += own
    report("pipeline_products", rows, arguments, WORDS)


def _of_case(case: ProductCase, *, quick: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_in_lab(
            case.name,
            parse_spec(case.lab),
            [sys.executable, __file__, WORKER, case.name, str(int(quick)), str(folder)],
            TIMEOUT_S,
        )
        found = json.loads((folder / FOUND).read_text())
        replayer = Replayer(load_trace(folder / TRACE), Cluster.load(folder / PROBED))
        predicted_ms = {RECORDED: replayer.replay().step_ms}
        predicted_ms |= {
            each: replayer.replay(strategy).step_ms for each, strategy in case.strategies().items()
        }
    return [
        {
            "case": case.name, "method": method, "time_ms": median(taken_ms), "interval": interval_ms(taken_ms),
            "predicted_ms": predicted_ms[method],
            "error": f"{predicted_ms[method] / median(taken_ms) - 1:+.1%}",
            "recorded_ms": replayer.recorded_step_ms if method == RECORDED else "",
            "rounds": len(taken_ms), "rate_mbit": case.rate_mbit, "bucket_cap_mb": case.bucket_cap_mb,
            "cpu": f"{found['cpu']:.0%}", "commit": commit(),
        }
        for method, taken_ms in found["taken_ms"].items()
    ]  # fmt: skip


if __name__ == "__main__":
    if WORKER in sys.argv:
        from pipeline_training.products import work

        work(sys.argv[2], Path(sys.argv[4]), quick=bool(int(sys.argv[3])))
    else:
        main()
