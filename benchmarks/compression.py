"""Compressed gradients on a slow and on a fast link: predicted and measured steps, and losses after as many of them.

    python benchmarks/compression.py [--quick] [--only CASE] [--json FILE]

Two workers that really compute, on a core each, train a network of a million parameters on the digits of scikit-learn.
Predictions are of one recorded run of stock DDP, and of links and cores as they were probed in the same job.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import commit, keep_case, median_interval, parse_arguments, report
from compressed_training.worker import CAP_MB, FOUND, FULL, METHODS, PLAIN, PROBED, QUICK, TRACE, work
from in_lab import run_in_lab

from headway.bound import bound_of
from headway.cluster import Cluster
from headway.lab.spec import LabSpec
from headway.replayer.replayer import Replayer
from headway.trace.folder import load_trace

WORKER = "--worker"
RATES = {"slow-100mbit": "100mbit", "fast-10gbit": "10gbit"}
TIMEOUT_S = 900.0
WORDS = (
    "Median over interleaved rounds of the slowest rank's mean step (`interval_ms`: bootstrap over rounds, 95 %). All "
    f"methods have buckets of {CAP_MB:g} MiB and the same settings of the optimizer. `ratio` is against stock DDP as "
    "it was measured, `predicted_ratio` as it was predicted; `bound_ms` is what no plan that sends whole gradients can "
    "beat. `loss` is that on all digits after `steps` steps. `codec_us_mib` is what encoding and decoding a MiB takes, "
    "as probed. `sent_bytes` are those of a step's collectives, over all ranks. Codecs and training "
    "share two cores: nothing is paced."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(RATES))
    rows: list[dict[str, Any]] = []
    for case in [arguments.only] if arguments.only else list(RATES):
        print(f"{case} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, WORKER, folder, str(int(arguments.quick))]
            run_in_lab(case, LabSpec(hosts=2, rate=RATES[case]), command, TIMEOUT_S)
            own = _rows(case, Path(folder), quick=arguments.quick)
        if not arguments.quick:
            keep_case("compression", own, list(RATES), WORDS)
        rows += own
    report("compression", rows, arguments, WORDS)


def _rows(case: str, folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    replayer = Replayer(load_trace(folder / TRACE), Cluster.load(folder / PROBED))
    found: dict[str, Any] = json.loads((folder / FOUND).read_text())
    predicted = {name: replayer.replay(strategy).step_ms for name, strategy in METHODS.items()}
    measured = {name: statistics.median(each["times_ms"]) for name, each in found.items()}
    costs = replayer.cluster.codecs
    bound_ms = bound_of(replayer.job, "all-reduce").step_ms
    rows = []
    for name, strategy in METHODS.items():
        rows.append(
            {
                "case": case,
                "method": name,
                "time_ms": measured[name],
                "interval_ms": [round(each, 1) for each in median_interval(found[name]["times_ms"])],
                "predicted_ms": predicted[name],
                "error": predicted[name] / measured[name] - 1,
                "ratio": measured[name] / measured[PLAIN],
                "predicted_ratio": predicted[name] / predicted[PLAIN],
                "bound_ms": bound_ms,
                "loss": found[name]["loss"],
                "steps": (QUICK if quick else FULL).all_steps,
                "codec_us_mib": sum(sum(costs[codec.cost_name].mib_us) for codec in strategy.wire if codec),
                "sent_bytes": sum(bucket.wire_bytes for bucket in strategy.decide(replayer.job).buckets),
                "commit": commit(),
            }
        )
    return rows


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(Path(sys.argv[2]), QUICK if int(sys.argv[3]) else FULL)
    else:
        main()
