"""Imports of harmed recordings, in thousands: whether anything but a trace or one line of error comes out, and when.

    python benchmarks/fuzz_readers.py [--quick] [--only JOB] [--json FILE]

Ten thousand cases (300 with --quick) by two processes. Each takes the fixtures of one job of tests/interop/readers or
contrib/headway-readers, harms one or two of its documents (bytes, JSON values, fields of messages, what is stored of a
compressed file), imports the whole strictly or leniently, and diagnoses what came of it. Case N of JOB is the same each
time: `run_case(make_case(random.Random(N), JOB))` of tests.interop.readers.fuzzing.cases.
"""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

from common import parse_arguments, report

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "contrib/headway-readers/tests"))

from tests.interop.readers.fuzzing.cases import CRASHED, GOOD, JOBS, Outcome, make_case, run_case

import fuzz_jobs

JOBS.update(fuzz_jobs.JOBS)

CASES, QUICK_CASES, WORKERS, TOGETHER = 10_000, 300, 2, 25
PATIENCE_S = 60.0  # after which a case is given up
NO_OUTCOME = Outcome(CRASHED, f"no end after {PATIENCE_S:.0f} s", PATIENCE_S, 0)


@dataclass(frozen=True)
class Done:
    """One case that was run."""

    job: str
    seed: int
    lenient: bool
    outcome: Outcome


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(JOBS))
    count = QUICK_CASES if arguments.quick else CASES
    jobs = [arguments.only] if arguments.only else list(JOBS)
    todo = [(jobs[seed % len(jobs)], seed) for seed in range(count)]
    batches = [todo[begin : begin + TOGETHER] for begin in range(0, count, TOGETHER)]
    found: dict[str, list[Done]] = defaultdict(list)
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for number, batch in enumerate(pool.map(_run, batches)):
            for done in batch:
                found[done.job].append(done)
                if done.outcome.kind not in GOOD:
                    print(
                        f"{done.job}, case {done.seed}: {done.outcome.kind}\n{done.outcome.said}", flush=True
                    )
            if number % 40 == 39:
                print(f"{(number + 1) * TOGETHER} of {count} cases", file=sys.stderr, flush=True)
    every = [done for job in found.values() for done in job]
    slowest = max(every, key=lambda done: done.outcome.seconds)
    bad = sum(done.outcome.kind not in GOOD for done in every)
    words = (
        f"{len(every)} imports of harmed recordings by {WORKERS} processes: {bad} ended otherwise than in a trace or "
        f"one line of error. The slowest took {slowest.outcome.seconds:.2f} s ({slowest.job}, case {slowest.seed}). "
        "Seconds are the processor's. `growth_mb` is how much more memory a case needed at its peak than the process "
        "had."
    )
    report("fuzz_readers", [_row(job, found[job]) for job in jobs if found[job]], arguments, words)
    sys.exit(bad > 0)


def _row(job: str, done: list[Done]) -> dict[str, Any]:
    kinds = Counter(one.outcome.kind for one in done)
    return {
        "case": job,
        "runs": len(done),
        "lenient": sum(one.lenient for one in done),
        **{kind: kinds.get(kind, 0) for kind in GOOD},
        "otherwise": sum(count for kind, count in kinds.items() if kind not in GOOD),
        "mean_s": sum(one.outcome.seconds for one in done) / len(done),
        "slowest_s": max(one.outcome.seconds for one in done),
        "growth_mb": max(one.outcome.growth_bytes for one in done) / 1e6,
    }


def _run(batch: list[tuple[str, int]]) -> list[Done]:
    signal.signal(signal.SIGALRM, _give_up)
    return [_one(job, seed) for job, seed in batch]


def _one(job: str, seed: int) -> Done:
    case = make_case(random.Random(seed), job)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        return Done(job, seed, case.lenient, run_case(case))
    except _GivenUp:
        return Done(job, seed, case.lenient, NO_OUTCOME)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _GivenUp(BaseException):
    """A case took too long. No ``except Exception`` takes it for a failure of its own."""


def _give_up(_signal: int, _frame: FrameType | None) -> None:
    raise _GivenUp


if __name__ == "__main__":
    main()
