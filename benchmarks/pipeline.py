"""Orders of pipelines on networks that are quiet, slow or shared, against one that follows the network.

    python benchmarks/pipeline.py [--quick] [--only CASE] [--json FILE]

Most stages are paced: they sleep for the time of a forward and of a backward; messages are real, and so is other
tenants' traffic. All methods run in the same processes, in turn, each on a stage object of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import commit, interval_ms, keep_case, parse_arguments, report
from in_lab import run_in_lab
from pipeline_training.network_cases import CASES, PHASE_S, QUICK, NetworkCase
from pipeline_training.network_predictions import Predictions, Steps, mixed_ms

from headway.lab.spec import parse_spec
from headway.strategies.pipeline.tuning.tuner import candidates_of

WORKER = "--worker"
TIMEOUT_S = 1750.0
KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""What keeps glibc from returning memory to the system, so that steps do not fault it in again."""
OWN, OTHERS = "headway", ("torch-1f1b", "torch-gpipe")
WORDS = (
    "`time_ms` is the median over interleaved rounds of the mean step of a block (three consecutive steps; in "
    "`phases-` those of 40 s, half of them with tenants, in phases of 20 s), `interval` its 95 % (bootstrap over "
    "rounds). `seen_ms` leaves out steps in which the network changes phase. `headway` begins as `1f1b` and goes over"
    " between k = 1, 2, 4 and 8, eager and zero-bubble (in `phases-`: k = 1, 2, 4); it keeps what it has learnt from "
    "block to block, and has trained six steps before the first, the others two, all of which but `torch-` run on its"
    " runtime. `oracle` is the best fixed order of each phase (`best`), not run by itself. `bound_ms` is what no "
    "order of these stages can beat, were messages to take no time. `predicted_ms` is the replay on links of the "
    "lab's rates, with tenants' traffic as it was meant to be in each block; that of `headway` is that of the best of"
    " its orders. `peak_bytes` is by how much the resident memory of the rank with most of it grew in a block, the "
    "largest of all rounds: paced stages keep only what they send and are given; `-computing` cases have none, for "
    "there every method keeps the memory that it had once (glibc's thresholds), as an allocator that caches does: "
    "orders with more micro-batches in flight would fault more of it in again in each step. Paced forwards and "
    "backwards sleep, so that CPUs are free for messages and for the tuner, which they are not in `-computing` cases,"
    " of one stage a core. `cpu` is what all ranks used of all cores. Links are token buckets; tenants are four TCP "
    "connections a direction, up to `tenant_mbit` together. Replay has tenants hold back as a queue that is first "
    "come, first served makes them (`window_bytes`: 128 KiB, which messages of 0.5 to 2 MiB between two hosts with "
    "one tenant agree with). Passes are as long as they were in `1f1b`'s steps, as in a recording of it; rows of "
    "commits before e660489 have them as timed alone, and tenants that take their share immediately."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else QUICK if arguments.quick else tuple(CASES):
        case = CASES[name]
        print(f"{name} …", file=sys.stderr, flush=True)
        own = _rows(case, _measure(case, quick=arguments.quick))
        if not arguments.quick:
            keep_case("pipeline", own, list(CASES), WORDS)
        rows += own
    report("pipeline", rows, arguments, WORDS)


def _measure(case: NetworkCase, *, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        run_in_lab(
            case.name,
            parse_spec(case.lab),
            [sys.executable, __file__, WORKER, case.name, str(int(quick)), str(out)],
            TIMEOUT_S,
            {} if case.model.is_paced else KEPT,
        )
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _rows(case: NetworkCase, found: dict[str, Any]) -> list[dict[str, Any]]:
    from pipeline_training.network_worker import strategies

    planned = strategies(case)
    predictions = Predictions(case, found)
    fixed = [name for name in planned if name != OWN]
    blocks = {name: _blocks(found["methods"][name]) for name in found["methods"]}
    predicted_ms = {name: predictions.of(planned[name], blocks[name]) for name in fixed}
    predicted_ms[OWN] = min(predictions.of(each, blocks[OWN]) for each in candidates_of(planned[OWN]))
    oracle = _oracle(case, {name: blocks[name] for name in fixed})
    common = {
        "bound_ms": predictions.bound_ms, "stages": case.stages, "micro_batches": case.micro_batches,
        "forward_ms": found["passes_ms"][0][0], "message_ms": found["stream_ms"],
        "boundary_bytes": " ".join(map(str, case.model.boundary_bytes)), "rate_mbit": case.rate_mbit,
        "tenants": len(case.tenants), "tenant_mbit": case.tenant_mbit if case.tenants else "",
        "slow_up_mbit": " ".join(f"host{n}={rate:g}" for n, rate in case.slow_up_mbit.items()),
        "model": case.model.words, "paced": case.model.is_paced, "cpu": f"{found['cpu']:.0%}",
        "commit": commit(),
    }  # fmt: skip
    rows = []
    for method, own in blocks.items():
        each_ms, seen_ms = [_mean_ms(block) for block in own], [_mean_ms(_seen(case, block)) for block in own]
        expected = predicted_ms.get(method)
        row = {
            "case": case.name,
            "method": method,
            "time_ms": median(each_ms),
            "interval": interval_ms(each_ms),
        }
        row |= {"seen_ms": median(seen_ms) if case.is_phases else "", "predicted_ms": expected or ""}
        error = "" if expected is None else f"{100 * (expected / median(seen_ms) - 1):+.1f} %"
        peak_bytes = max(b["peak_bytes"] for b in found["methods"][method]) if case.model.is_paced else ""
        decided = found["decisions"] if method == OWN else []
        switches = sum(each["before"] != each["candidate"] for each in decided)
        row |= {"error": error, "peak_bytes": peak_bytes, "switches": switches if method == OWN else ""}
        rows.append({**row, "rounds": len(own), "best": "", **common})
    best_ms, best = oracle
    column = "seen_ms" if case.is_phases else "time_ms"
    rows.append(
        {"case": case.name, "method": "oracle", "time_ms": best_ms, column: best_ms, "best": best, **common}
    )
    for row in rows:
        row["ratio"] = row["time_ms"] / row["bound_ms"]
    return rows


def _blocks(measured: Sequence[dict[str, Any]]) -> list[Steps]:
    return [list(zip(block["begins_s"], block["took_ms"], strict=True)) for block in measured]


def _mean_ms(steps: Steps) -> float:
    return sum(took_ms for _, took_ms in steps) / len(steps)


def _seen(case: NetworkCase, steps: Steps) -> Steps:
    """Without those in which the network changes phase."""
    if not case.is_phases:
        return steps
    return [(at, took) for at, took in steps if at // PHASE_S == (at + took / 1e3) // PHASE_S]


def _oracle(case: NetworkCase, fixed: dict[str, list[Steps]]) -> tuple[float, str]:
    """The mean step of who is in the best fixed order at any time, and these orders."""
    phases = [lambda at: at // PHASE_S % 2 == 0, lambda at: at // PHASE_S % 2 == 1]
    wanted: list[Callable[[float], bool]] = phases if case.is_phases else [lambda _: True]
    times_ms, names = [], []
    for is_in in wanted:
        found = {
            name: median(_mean_ms([one for one in _seen(case, steps) if is_in(one[0])]) for steps in blocks)
            for name, blocks in fixed.items()
        }
        names.append(min(found, key=found.__getitem__))
        times_ms.append(found[names[-1]])
    return mixed_ms(times_ms), ", ".join(names)


if __name__ == "__main__":
    if WORKER in sys.argv:
        from pipeline_training.network_worker import work

        work(sys.argv[2], Path(sys.argv[4]), quick=bool(int(sys.argv[3])))
    else:
        main()
