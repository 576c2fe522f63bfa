"""Peak memory as it is predicted, from a recording and from the model alone, against that of the processes.

    python benchmarks/peak_memory.py [--quick] [--only CASE] [--json FILE]

Real models train on one machine, a process a rank. Every plan's peak is predicted twice: by replay from ONE recording
of the model (stock DDP, two workers), and by `headway predict --device here` from the function that builds it. A case
takes three minutes, and is kept as soon as it is done.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from common import keep_case, parse_arguments, report
from memory.job import TRACE, work
from memory.running import run
from memory.subjects import BASE_WORKERS, PLANS, SUBJECTS

from headway.cluster import Cluster, Host
from headway.prediction.models import HERE, workload_named
from headway.prediction.replayed import predict
from headway.prediction.workload import Workload
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.trace.folder import load_trace

WORKER = "--worker"
WORKERS = (2, 4)
WORDS = (
    "Peak memory of a rank, in MB, measured as by how much a process's anonymous resident memory grew at most, seen "
    "from outside every half millisecond from before the model was built until after the fifth step (mean over "
    "ranks; memory that is freed is returned to the system at once, MALLOC_MMAP_THRESHOLD_=65536). Predicted from "
    "one recording of stock DDP on two workers (`replayed_mb`), and from the function that builds the model, on one "
    "pass of this device (`predicted_mb`). `error` is the recording's, `error_of_predict` the other's. Optimizers "
    "update all at once (foreach), as they do on accelerators. Buckets: DDP's default, 5 MiB elsewhere. What tensors "
    "do not show is measured and not predicted, such as process groups of one's own (decoupled and servers)."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(SUBJECTS))
    names = [arguments.only] if arguments.only else list(SUBJECTS)
    rows: list[dict[str, Any]] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            _run(name, "ddp", BASE_WORKERS, Path(folder), record=True)
            replayer = Replayer(load_trace(Path(folder) / TRACE))
        counts = WORKERS[:1] if arguments.quick else WORKERS
        subject = SUBJECTS[name]
        workload = workload_named(f"memory.subjects:{subject.make.__name__}", HERE, subject.optimizer)
        own = [_row(name, plan, workers, replayer, workload) for workers in counts for plan in PLANS]
        rows += own
        if not arguments.quick:
            keep_case("peak_memory", own, list(SUBJECTS), WORDS)
    report("peak_memory", rows, arguments, WORDS)


def _row(name: str, plan: str, workers: int, replayer: Replayer, workload: Workload) -> dict[str, Any]:
    print(f"{name} {plan} on {workers} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        grown = _run(name, plan, workers, Path(folder), record=False)
    measured = sum(grown) / len(grown)
    replayed = replayer.replay(PLANS[plan], WhatIf.parse([f"workers={workers}"])).peak_bytes
    assert replayed is not None
    cluster = Cluster(
        hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=10, down_gbps=10) for i in range(workers))
    )
    predicted = predict(workload, cluster, plan, PLANS[plan]).peak_bytes
    return {
        "case": name,
        "method": plan,
        "workers": workers,
        "measured_mb": round(measured / 1e6, 1),
        "replayed_mb": round(replayed / 1e6, 1),
        "predicted_mb": round(predicted / 1e6, 1),
        "ratio": replayed / measured,
        "error": replayed / measured - 1,
        "error_of_predict": predicted / measured - 1,
    }


def _run(name: str, plan: str, workers: int, folder: Path, *, record: bool) -> list[int]:
    """Run a job; by how much each rank grew, unless it is recorded."""
    command = [sys.executable, __file__, WORKER, name, plan, str(folder), str(int(record))]
    return run(command, workers, folder, f"{name} {plan}", watched=not record)


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(sys.argv[2], sys.argv[3], Path(sys.argv[4]), record=bool(int(sys.argv[5])))
    else:
        main()
