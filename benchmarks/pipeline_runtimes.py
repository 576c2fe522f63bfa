"""Orders of pipelines, on torch's runtimes and on ours, over shaped links, against a bound and what replay predicts.

    python benchmarks/pipeline_runtimes.py [--quick] [--only CASE] [--json FILE]

Stages are paced: they sleep for the time of a forward and of a backward; messages are real. All methods run in the same
processes, in turn, each on a stage object of its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import commit, interval_ms, keep_case, parse_arguments, report
from pipeline_training.runtime_cases import CASES, QUICK, PipelineCase

from headway.cluster import Cluster, Host
from headway.graph.computation import Computation, Item, Part, Timeline
from headway.job import Job
from headway.lab import launch
from headway.lab.spec import LabSpec
from headway.model import ModelSpec
from headway.simulator.simulate import simulate

WORKER = "--worker"
TIMEOUT_S = 1800.0
WORDS = (
    "Median step over interleaved rounds (ms), `interval` its 95 % (bootstrap over rounds). `bound_ms`, for all of "
    "these methods: the last stage begins when a micro-batch has come through the others, works on all of them, and "
    "its last gradient goes back: (S-1)(f + b + 2c) + M(f + b), of f, b and c measured alone (`forward_ms`, "
    "`backward_ms`, `message_ms`; over links that have rested, whose bursts make c smaller than it is between others). "
    "`predicted_ms` is the replay of the same order on links of that rate. `torch 1F1B` and `torch GPipe` are torch's "
    "schedules as they stand; `torch runtime` is torch's own runtime of schedules, given the same orders as ours. "
    "Forwards and backwards sleep: the CPU is free for messages, which with computation on the same cores it would "
    "not be. `cpu` is what all ranks used of all cores, taken from rank 0. The lab's links are token buckets without "
    "other traffic."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else QUICK if arguments.quick else tuple(CASES):
        case = CASES[name]
        print(f"{name} …", file=sys.stderr, flush=True)
        own = _rows(case, _measure(case, quick=arguments.quick))
        if not arguments.quick:
            keep_case("pipeline_runtimes", own, list(CASES), WORDS)
        rows += own
    report("pipeline_runtimes", rows, arguments, WORDS)


def _measure(case: PipelineCase, *, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        status = launch.run(
            LabSpec(hosts=case.stages, rate=f"{case.rate_mbit:g}mbit"),
            [sys.executable, __file__, WORKER, case.name, str(int(quick)), str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout_s=TIMEOUT_S,
            on_line=lambda rank, _, line: print(f"[{rank}] {line}", file=sys.stderr, flush=True),
        )
        if status != 0:
            raise SystemExit(f"{case.name}: the job ended with status {status}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _rows(case: PipelineCase, found: dict[str, Any]) -> list[dict[str, Any]]:
    from pipeline_training.runtime_worker import strategies

    (forward_ms, backward_ms), message_ms = found["passes_ms"], found["message_ms"]
    others, count = case.stages - 1, case.micro_batches
    bound_ms = others * (forward_ms + backward_ms + 2 * message_ms) + count * (forward_ms + backward_ms)
    job = _job(case, forward_ms, backward_ms, message_ms)
    predicted = {name: simulate(job, strategy).step_ms for name, strategy in strategies(case).items()}
    rows = []
    for method, taken in found["taken_ms"].items():
        time_ms = median(taken)
        expected = predicted.get(method)
        rows.append(
            {
                "case": case.name, "method": method, "time_ms": time_ms, "interval": interval_ms(taken),
                "bound_ms": bound_ms, "ratio": time_ms / bound_ms,
                "predicted_ms": "" if expected is None else expected,
                "error": "" if expected is None else f"{100 * (expected / time_ms - 1):+.1f} %",
                "forward_ms": forward_ms, "backward_ms": backward_ms, "message_ms": message_ms, "stages": case.stages,
                "micro_batches": count, "size_bytes": case.size_bytes, "rate_mbit": case.rate_mbit, "paced": True,
                "rounds": len(taken), "cpu": f"{found['cpu']:.0%}", "commit": commit(),
            }
        )  # fmt: skip
    return rows


def _job(case: PipelineCase, forward_ms: float, backward_ms: float, message_ms: float) -> Job:
    """The case as replay knows it: passes and messages as they were measured alone."""
    gbps = case.size_bytes * 8 / (message_ms * 1e6)
    hosts = tuple(Host(name=f"host{n}", workers=1, up_gbps=gbps, down_gbps=gbps) for n in range(case.stages))
    parts = ((Part.FORWARD, forward_ms), (Part.BACKWARD, backward_ms))
    timelines = {
        stage: (
            Timeline(
                stage, 0,
                tuple(
                    Item(part, duration_ns=round(took_ms * 1e6), stage=stage, micro_batch=number)
                    for part, took_ms in parts
                    for number in range(case.micro_batches)
                ),
            ),
        )
        for stage in range(case.stages)
    }  # fmt: skip
    return Job(
        stages=(ModelSpec(parameters=()),) * case.stages,
        world_size=case.stages,
        cluster=Cluster(hosts=hosts, latency_us=100),
        computation=Computation(timelines),
        boundary_bytes=(case.size_bytes,) * (case.stages - 1),
    )


if __name__ == "__main__":
    if WORKER in sys.argv:
        from pipeline_training.runtime_worker import work

        work(sys.argv[2], Path(sys.argv[4]), quick=bool(int(sys.argv[3])))
    else:
        main()
