"""Data-parallel methods against each other and against their bounds, on paced models and on real ones.

    python benchmarks/data_parallel.py [--quick] [--only CASE] [--json FILE]

A paced case has a published model's true parameter tensors, scaled in size and not in number, on workers whose layers
sleep for their modelled time, stretched (`paced_training.paced`). Link rates of the lab are chosen so that the time
of one way's volume against that of computation is that of 64 GPUs on the network named. Latency is the lab's own:
it is neither scaled nor imitated. All methods run in the same processes, in turn. A case takes about six minutes in
full, and is kept under ``benchmarks/results`` as soon as it is done, so that cases may be run one by one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import keep_case, parse_arguments, report
from paced_training import cases
from paced_training.cases import NETWORKS, PacedCase, RealCase
from paced_training.page import page
from paced_training.rows import rows_of
from paced_training.worker import work

from headway.lab import launch
from headway.lab.spec import LabSpec

WORKER = "--worker"
TIMEOUT_S = 3600.0
WORDS = (
    "Median step over interleaved rounds (ms; slowest rank), `spread` their quartiles, `interval` of the median "
    "(bootstrap, 95 %), `bound_ms` what no method of that kind can beat whose halves stay apart: "
    "all-reduce t_f + max(t_b, 2c); decoupled or sharded "
    "max(t_f, c) + max(t_b, c); "
    "bytescheduler max(t_f + t_b, 2c); t_f and t_b measured alone, c the volume of one way at the measured goodput. "
    "Paced rows: parameters, gradients and messages are real, computation is asleep for a modelled time "
    "(RTX 2080 Ti, headway.models.roofline) stretched by `dilation`; sizes are scaled by `size_scale`, and "
    "c / (t_f + t_b) is that of 64 GPUs on the network (`ratio_imitated`, `ratio_measured`): "
    f"{'; '.join(f'{n.name} is {n.words}' for n in NETWORKS.values())}. Bucket sizes are of the unscaled model and "
    "scaled as it is. `exposed_ms` is the step less the same step alone. Memory is one rank's, counted from tensors. "
    "`cpu` is what the ranks used of all cores, `stolen` what the machine under this one took of them; rows without "
    "`commit` are older than that column. `disagreement`: of parameters at the end with those of stock DDP after "
    "as many steps, against the largest; more than 1e-4 is marked. A ratio below 1 says that the probe of goodput, "
    "which the bound is from, got a little less than the method did, or that gathers began within backward."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(cases.ALL))
    chosen = cases.QUICK_CASES if arguments.quick else tuple(cases.ALL)
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else chosen:
        case = cases.ALL[name]
        print(f"{name} …", file=sys.stderr, flush=True)
        described = cases.describe(case, quick=arguments.quick)
        rows_of_case = rows_of(name, described, _measure(case, quick=arguments.quick))
        if not arguments.quick:
            keep_case("data_parallel", rows_of_case, list(cases.ALL), WORDS, page)
        rows += rows_of_case
    report("data_parallel", rows, arguments, WORDS, page)


def _measure(case: PacedCase | RealCase, *, quick: bool) -> dict[str, Any]:
    rate_mbit = case.rate_mbit if isinstance(case, RealCase) else case.plan(quick=quick).rate_mbit
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, WORKER, case.name, str(int(quick)), str(out)]
        status = launch.run(
            LabSpec(hosts=case.world_size, rate=f"{rate_mbit:g}mbit"),
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout_s=TIMEOUT_S,
            on_line=lambda rank, _, line: _say(rank, line),
        )
        if status != 0:
            raise SystemExit(f"{case.name}: the job ended with status {status}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(sys.argv[2], bool(int(sys.argv[3])), Path(sys.argv[4]))
    else:
        main()
