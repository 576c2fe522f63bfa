"""Decentralised training against all-reduce, parameter servers and AD-PSGD: throughput, losses, mixing, faults.

    python benchmarks/decentralised.py [--quick] [--only CASE] [--json FILE]

Cases `homogeneous-…`, `slow2-…`, `slow5-…`, `slowlink-…`, `random-…` measure throughput (15 to 20 minutes each),
`loss-…` the time to a loss with real gradients (8 to 25 minutes each), `rates-…` which learning rates those methods
have, `causes-…` what of those losses is the algorithm's (5 minutes each, in one process), `contraction` how fast models
mix, and `faults-N` play the schedules of the seeds N to N + 19 (some 5 minutes each). Each is kept as soon as it is
done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import keep_case, parse_arguments, report
from decentralised_training import contraction, fault_rows, loss_causes, losses, throughput
from decentralised_training.cases import QUICK_THROUGHPUT, THROUGHPUT
from decentralised_training.page import WORDS, page

from headway.lab import launch

THROUGHPUT_WORKER, LOSS_WORKER = "--throughput-worker", "--loss-worker"
CONTRACTION = "contraction"
ROUNDS, QUICK_ROUNDS = 60, 12
QUICK_SEEDS, QUICK_METHODS = 4, 2
CASES = (*THROUGHPUT, *losses.CASES, *loss_causes.CASES, CONTRACTION, *fault_rows.CASES)
QUICK = (QUICK_THROUGHPUT, losses.QUICK, CONTRACTION, next(iter(fault_rows.CASES)))
KEPT = Path(tempfile.gettempdir()) / "headway-faults"


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else QUICK if arguments.quick else CASES:
        print(f"{name} …", file=sys.stderr, flush=True)
        own = _measure(name, quick=arguments.quick)
        if not arguments.quick:
            keep_case("decentralised", own, list(CASES), WORDS, page)
        rows += own
    report("decentralised", rows, arguments, WORDS, page)


def _measure(name: str, *, quick: bool) -> list[dict[str, Any]]:
    if name in THROUGHPUT:
        return throughput.measure(
            THROUGHPUT[name], [sys.executable, __file__, THROUGHPUT_WORKER], quick=quick
        )
    if name in losses.CASES:
        return losses.measure(losses.CASES[name], [sys.executable, __file__, LOSS_WORKER], quick=quick)
    if name in loss_causes.CASES:
        return loss_causes.measure(name, quick=quick)
    if name == CONTRACTION:
        methods = contraction.METHODS[: QUICK_METHODS if quick else None]
        with tempfile.TemporaryDirectory() as temporary:
            rounds = QUICK_ROUNDS if quick else ROUNDS
            return list(_in_lab("contraction", Path(temporary), [str(rounds), *methods]))
    seeds = fault_rows.CASES[name][: QUICK_SEEDS if quick else None]
    KEPT.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="", dir=KEPT))
    found = list(_in_lab("fault_lab", folder, [str(seed) for seed in seeds]))
    if not any(folder.iterdir()):
        folder.rmdir()
    return fault_rows.rows_of(name, found, str(folder))


def _in_lab(module: str, folder: Path, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What a module that makes namespaces of its own says, a line of JSON for each thing that it did."""
    mode = launch.best_mode()
    if mode == "loopback":
        raise SystemExit("network namespaces are not permitted here: links cannot be cut")
    paths = [str(Path(__file__).parent), str(Path(throughput.__file__).parents[2] / "src")]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, "-m", f"decentralised_training.{module}", mode, str(folder), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line[:300].rstrip(), file=sys.stderr, flush=True)
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"{module} ended with status {process.returncode}")


if __name__ == "__main__":
    if THROUGHPUT_WORKER in sys.argv:
        from decentralised_training.throughput_worker import work as work_throughput

        work_throughput(sys.argv[2], Path(sys.argv[3]), quick=bool(int(sys.argv[4])))
    elif LOSS_WORKER in sys.argv:
        from decentralised_training.loss_worker import work as work_loss

        work_loss(sys.argv[2], Path(sys.argv[3]), quick=bool(int(sys.argv[4])))
    else:
        main()
