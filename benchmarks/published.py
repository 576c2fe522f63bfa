"""Published logs of nccl-tests against NCCL's own model, and published training rates against predictions.

    python benchmarks/published.py [--quick] [--only CASE] [--json FILE]

Each case says what was fitted, and on which rows; all other rows of its logs are judged, from 1 MiB on. ``ring`` is the
same fabric with every collective taken for a ring with the protocol Simple.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import published_training
from common import parse_arguments, report

from headway.collectives.nccl import Fabric, channels_of, time_us
from headway.network.nccl_tests import INSIDE_GB_S, LEAST_BYTES, Timing, errors, fitted, stated_error
from headway.simulator.expectation import UNMEASURED

ROWS = Path(__file__).with_name("published_rows") / "nccl_tests.csv"
H100, A100 = "xxrjun nccl_N10_G{}.log", "Echo nccl_{}.log"


class Case(NamedTuple):
    """What is fitted on, and what is judged; nothing is fitted where ``on`` is empty."""

    name: str
    on: tuple[str, ...]
    judged: tuple[str, ...]
    fabric: Fabric
    cards_gb_s: float = 0.0


_HOPPER = Fabric(
    "hopper", "intel", INSIDE_GB_S["hopper"], nvls=True, passing_gb_s=INSIDE_GB_S["hopper"], version=(2, 29)
)
_AMPERE = Fabric("ampere", "amd", INSIDE_GB_S["ampere"], passing_gb_s=INSIDE_GB_S["ampere"], version=(2, 18))
_ALL_H100 = tuple(H100.format(gpus) for gpus in (1, 2, 4, 8))
CASES = (
    Case("h100 as NCCL has it", (), _ALL_H100, _HOPPER, 48.0),
    *(
        Case(f"h100 as NCCL has it, {gpus} a host", (), (H100.format(gpus),), _HOPPER, 48.0)
        for gpus in (1, 2, 4, 8)
    ),
    Case("h100 from 1 a host to 2 and 4", (H100.format(1),), (H100.format(2), H100.format(4)), _HOPPER),
    Case("h100 from 1 a host to 8", (H100.format(1),), (H100.format(8),), _HOPPER),
    Case(
        "a100 from 2 and 4 hosts to 8 and 16",
        (A100.format(16), A100.format(32)),
        (A100.format(64), A100.format(128)),
        _AMPERE,
    ),
    Case(
        "a100 from 2 and 4 hosts to 8 and 16, as on Intel",
        (A100.format(16), A100.format(32)),
        (A100.format(64), A100.format(128)),
        replace(_AMPERE, cpu="intel"),
    ),
)
WORDS = (
    "Errors of predicted times of collectives, of NCCL's model and of rings alone. H100: ten hosts with a card of 400 "
    "Gbit/s for each GPU (github.com/xxrjun/nccl-tests-cluster, example-cluster01, run 20260129-180219: all-reduce, "
    "all-gather, reduce-scatter of 32 MiB to 16 GiB). A100: Azure ND A100 v4, eight cards of 200 Gbit/s a host "
    "(github.com/NetX-lab/Echo, nccl-test-log: all-reduce). `fitted on` are the logs from which the card's speed, the "
    "share of it that is reached and the factors of latencies and of trees' latencies were taken; where it is empty "
    "the card is taken for 48 GB/s, as NCCL does with 400 Gbit/s, and a GPU's links for 320 GB/s. `within ±` is the "
    "share of rows that lie within the uncertainty that `headway predict --collective` states. Whether the A100 "
    "hosts' processors are AMD's or Intel's matters to NCCL's protocol LL and to rings' latencies; Azure says AMD. "
    "With eight GPUs a host, tensors below 512 MiB over 80 H100 take longer than any protocol's latency says."
)  # fmt: skip


def main() -> None:
    names = [case.name for case in CASES]
    arguments = parse_arguments(__doc__ or "", [*names, *published_training.CASES])
    logs: dict[str, list[Timing]] = {}
    for row in csv.DictReader(ROWS.read_text().splitlines()):
        source = row.pop("source")
        timing: dict[str, Any] = {
            "kind": row["kind"],
            "device": row["device"],
            "time_us": float(row["time_us"]),
        }
        timing |= {name: int(row[name]) for name in ("size_bytes", "ranks", "hosts")}
        logs.setdefault(source, []).append(Timing(**timing))
    chosen = [case for case in CASES if arguments.only in (None, case.name)]
    rows = [_row(case, logs) for case in chosen]
    rows += [
        published_training.training_row(case)
        for case in published_training.CASES
        if arguments.only in (None, case)
    ]
    report("published", rows, arguments, f"{WORDS} {published_training.WORDS}")


def _row(case: Case, logs: dict[str, list[Timing]]) -> dict[str, Any]:
    fabric, speed = case.fabric, case.cards_gb_s
    if case.on:
        fabric, speed = fitted([row for name in case.on for row in logs[name]], fabric)
    judged = [row for name in case.judged for row in logs[name] if row.size_bytes >= LEAST_BYTES]
    off, rings = errors(judged, fabric, speed), [_of_ring(row, fabric, speed) for row in judged]
    return {
        "case": case.name,
        "fitted on": ", ".join(case.on),
        "card GB/s": speed,
        "reached": round(fabric.reached, 3),
        "latencies": round(fabric.network_factor, 2),
        "trees": round(fabric.tree_factor, 2),
        "rows": len(judged),
        "within ±": f"{_covered(case, off, fabric, speed, logs):.0%}",
        **_quantiles("", off),
        **_quantiles("ring ", rings),
    }


def _covered(
    case: Case, off: Sequence[float], fabric: Fabric, speed: float, logs: dict[str, list[Timing]]
) -> float:
    """The share of rows that the uncertainty of a cluster file holds that is fitted on these logs, or on none."""
    share = UNMEASURED
    if case.on:
        share = stated_error([row for name in case.on for row in logs[name]], fabric, speed)
    return sum(abs(error) <= share * (1 + error) for error in off) / len(off)


def _of_ring(row: Timing, fabric: Fabric, speed: float) -> float:
    a_host = row.ranks // row.hosts
    own = replace(fabric, outside_gb_s=speed * a_host, channels=channels_of(a_host))
    return (
        time_us(row.kind, "ring", "simple", row.size_bytes, row.ranks, row.hosts, own) or 0.0
    ) / row.time_us - 1


def _quantiles(prefix: str, off: Sequence[float]) -> dict[str, str]:
    far = sorted(map(abs, off))
    return {
        f"{prefix}median error": f"{median(far):.1%}",
        f"{prefix}p90": f"{far[int(0.9 * (len(far) - 1))]:.1%}",
        f"{prefix}bias": f"{median(off):+.1%}",
    }


if __name__ == "__main__":
    main()
