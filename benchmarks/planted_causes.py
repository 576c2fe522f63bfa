"""Whether the diagnosis names what was planted: one job in the lab, a cause planted in it, recorded and diagnosed.

    python benchmarks/planted_causes.py [--quick] [--only CASE] [--json FILE]

Four hosts of one rank on links of 2 Gbit/s, real Gloo, DistributedDataParallel but where its absence is the cause;
layers hold the step for their planned time asleep. A cause counts as named where the first sentence of the verdict has
the words, and the rank, that `planting/causes.py` asks for, and nothing else is accused in the whole paragraph. What is
planted costs what it adds to a step: as planned where that is a time on one rank, otherwise what the mean step is
longer than the healthy job's of the same round. Healthy jobs, on the four hosts and of two ranks that compute on
loopback, are recorded and diagnosed twenty times.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import parse_arguments, report
from planting.causes import CAUSES, HEALTHY, LOOPBACK, Cause
from planting.running import record

from headway.diagnosis import Diagnosis, diagnose
from headway.trace.folder import load_trace

ROUNDS = 3
HEALTHY_ROUNDS = 20


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CAUSES))
    names = list(dict.fromkeys([HEALTHY, arguments.only])) if arguments.only else list(CAUSES)
    rows: list[dict[str, Any]] = []
    rounds, healthy_rounds = (1, 1) if arguments.quick else (ROUNDS, HEALTHY_ROUNDS)
    for number in range(healthy_rounds):
        healthy_ms = 0.0
        for name in names if not arguments.quick or arguments.only else names[:10]:
            if number >= rounds and not CAUSES[name].healthy:
                continue
            found = _diagnosed(CAUSES[name])
            healthy_ms = found.step_ms if name == HEALTHY else healthy_ms
            rows.append(
                _row(name, number + 1, CAUSES[name], found, found.step_ms if name == LOOPBACK else healthy_ms)
            )
            print(f"{name}: {rows[-1]['verdict']}", flush=True)
    words = (
        f"{_count(rows)} "
        "Each cause planted in the lab, all causes of a round one after the other. `time_ms` is the mean recorded "
        "step, `bound_ms` the healthy job's of the same round. `estimated_ms` is what the diagnosis says the "
        "cause costs a step, `planted_ms` what it costs by plan, or else by the difference of the two steps. "
        "Layers are paced (asleep for their planned time), those on loopback compute; messages, links and clocks "
        "are real. `accused wrongly` is what the whole paragraph blames that was not planted."
    )
    report("planted_causes", rows, arguments, words)


def _count(rows: list[dict[str, Any]]) -> str:
    healthy = [row for row in rows if CAUSES[row["case"]].healthy]
    planted = [row for row in rows if not CAUSES[row["case"]].healthy]
    of = [f"{sum(row['named'] == 'yes' for row in some)} of {len(some)}" for some in (planted, healthy)]
    return f"Causes named, and nothing else accused: {of[0]}; healthy jobs called healthy: {of[1]}."


def _diagnosed(cause: Cause) -> Diagnosis:
    with tempfile.TemporaryDirectory() as folder:
        return diagnose(load_trace(record(cause, Path(folder) / "trace")))


def _row(name: str, number: int, cause: Cause, found: Diagnosis, healthy_ms: float) -> dict[str, Any]:
    first = found.verdict.split(". ")[0]
    named = all(word in first for word in cause.words)
    chief = found.findings[0] if found.findings else None
    blamed = chief.ranks if chief is not None and chief.stands_out else ()
    planted_ms = found.step_ms - healthy_ms if cause.planted_ms is None else cause.planted_ms
    costs = not cause.healthy and not cause.skewed
    wrong = cause.accused_wrongly(found.verdict)
    return {
        "case": name,
        "method": f"round {number}",
        "time_ms": round(found.step_ms, 2),
        "bound_ms": round(healthy_ms, 2),
        "ratio": round(found.step_ms / healthy_ms, 3),
        "named": "yes" if named and not wrong and (cause.rank is None or cause.rank in blamed) else "NO",
        "accused wrongly": wrong,
        "blamed": ", ".join(map(str, blamed)),
        "estimated_ms": round(chief.cost_ms, 1) if chief is not None and costs else "",
        "planted_ms": round(planted_ms, 1) if costs else "",
        "verdict": found.verdict,
    }


if __name__ == "__main__":
    main()
