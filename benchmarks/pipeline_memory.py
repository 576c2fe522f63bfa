"""Peak memory of pipelines in every order, predicted from a recording of one order, against that of the processes.

    python benchmarks/pipeline_memory.py [--quick] [--only CASE] [--json FILE]

Real models train on one machine, a process a stage. Each is recorded ONCE, under torch's own 1F1B; from that the peak
of every rank is predicted for every order, and measured in a run of its own in that order. Once more it is predicted
without that recording, from two of half and of twice as many micro-batches.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import commit, keep_case, parse_arguments, report
from memory.job import TRACE
from memory.pipelines import MICRO_BATCHES, ORDERS, STOCK, SUBJECTS, work
from memory.running import run

from headway.job import Job
from headway.replayer.replayer import Replayer
from headway.simulator.memory import rank_peaks_bytes
from headway.strategies.pipeline.micro_batch_sizes import interpolated
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.trace.folder import load_trace

WORKER = "--worker"
STAGES = (2, 4)
CASES = {f"{subject}-s{stages}": (subject, stages) for subject in SUBJECTS for stages in STAGES}
QUICK = ("transformer-s2",)
AROUND = (MICRO_BATCHES // 2, 2 * MICRO_BATCHES)
WORDS = (
    f"Peak memory of the rank that needs most, in bytes ({MICRO_BATCHES} micro-batches). `peak_bytes` is by how much a "
    "process's anonymous resident memory grew at most, seen from outside every half millisecond from before its stage "
    "was built until after the third step (memory that is freed is returned to the system at once, "
    "MALLOC_MMAP_THRESHOLD_=65536; buffers of messages are written to when they are allocated, for the system counts "
    "memory only then). `predicted_bytes` is what replay says of that order, from one recording under "
    "torch's own 1F1B. `worst_error` is that of the rank with the largest error, `errors` are those of all ranks. "
    f"`errors_between` are those of predictions from two other recordings, of {AROUND[0]} and {AROUND[1]} "
    "micro-batches. "
    f"`{STOCK}` is torch's schedule as it stands, the others are orders on Headway's runtime. Stages really compute."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else QUICK if arguments.quick else tuple(CASES):
        own = _rows(name)
        rows += own
        if not arguments.quick:
            keep_case("pipeline_memory", own, list(CASES), WORDS)
    report("pipeline_memory", rows, arguments, WORDS)


def _rows(case: str) -> list[dict[str, Any]]:
    subject, stages = CASES[case]
    replayer, fewer, more = (_recorded(subject, stages, count) for count in (MICRO_BATCHES, *AROUND))
    inside = interpolated(fewer.job, more.job, MICRO_BATCHES).job
    rows = []
    for method, strategy in ORDERS.items():
        print(f"{case} {method} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            grown = _run(subject, method, stages, Path(folder), record=False)
        predicted = replayer.replay(strategy).peaks_bytes
        assert predicted is not None
        errors = _errors(predicted, grown)
        inside_errors = [] if strategy is None else _errors(_peaks_bytes(inside, strategy), grown)
        rows.append(
            {
                "case": case, "method": method, "predicted_bytes": max(predicted), "peak_bytes": max(grown),
                "ratio": max(predicted) / max(grown), "error": max(predicted) / max(grown) - 1,
                "worst_error": max(errors, key=abs), "errors": _said(errors),
                "errors_between": _said(inside_errors),
                "stages": stages, "micro_batches": MICRO_BATCHES, "commit": commit(),
            }
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _recorded(subject: str, stages: int, count: int) -> Replayer:
    with tempfile.TemporaryDirectory() as folder:
        _run(subject, STOCK, stages, Path(folder), record=True, count=count)
        return Replayer(load_trace(Path(folder) / TRACE))


def _peaks_bytes(job: Job, strategy: PipelineStrategy) -> Sequence[int]:
    return rank_peaks_bytes(job, strategy, strategy.decide(job))


def _errors(predicted: Sequence[int], grown: Sequence[int]) -> list[float]:
    return [ours / real - 1 for ours, real in zip(predicted, grown, strict=True)]


def _said(errors: Sequence[float]) -> str:
    return " ".join(f"{error:+.1%}" for error in errors)


def _run(
    subject: str, order: str, stages: int, folder: Path, *, record: bool, count: int = MICRO_BATCHES
) -> list[int]:
    command = [sys.executable, __file__, WORKER, subject, order, str(folder), str(int(record)), str(count)]
    return run(command, stages, folder, f"{subject} {order}", watched=not record)


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(
            sys.argv[2], sys.argv[3], Path(sys.argv[4]), record=bool(int(sys.argv[5])), count=int(sys.argv[6])
        )
    else:
        main()
