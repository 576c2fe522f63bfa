"""Where the fixed costs of a short step go: CPU time, wake-ups and calls of each thread of a rank, by method.

    python benchmarks/fixed_costs.py [--quick] [--only CASE] [--json FILE]

The jobs of `data_parallel.py --quick`: short steps, as fast accelerators have them, on paced workers that compute
nothing, so that all CPU time but that of messages is cost. Every method trains alone for some steps and is looked at
from outside (`/proc/self/task`); then for as many again under a profiler that counts CPU time of the main thread, on
which forward, backward and update run. Not a race: `data_parallel.py` times methods against each other.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import commit, keep_case, parse_arguments, report
from in_lab import run_in_lab
from paced_training import cases, stock
from paced_training.cases import PacedCase
from paced_training.dear import Dear
from paced_training.jobs import PacedJob, paced_job
from paced_training.ours import ours
from paced_training.trainer import Trainer, alone
from paced_training.worker import SWITCH_INTERVAL_S

from headway.lab.spec import LabSpec

CASES = ("resnet50-balanced-p4", "densenet201-10gbe-p4")
CAP_MB = 10.0  # of DDP and of DeAR, of the unscaled model
STEPS, QUICK_STEPS = 40, 8
LISTED = 20  # of a method
WORKER = "--worker"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
WORDS = (
    "One rank of four (rank 0), a step in the mean. `thread` rows: CPU time of its threads and how often they woke "
    "up (voluntary context switches); `gloo` are those of the process groups, `channels` Headway's own, which send and "
    "add up. `code` rows: what the main thread spends its CPU time in, by a profiler, with which all of it takes about "
    "twice as long. `step_ms` is the median step without the profiler."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", CASES)
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else CASES:
        found = _measured(name, QUICK_STEPS if arguments.quick else STEPS)
        if not arguments.quick:
            keep_case("fixed_costs", found, CASES, WORDS)
        rows += found
    report("fixed_costs", rows, arguments, WORDS)


def _measured(name: str, steps: int) -> list[dict[str, Any]]:
    case = cases.ALL[name]
    assert isinstance(case, PacedCase)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        lab = LabSpec(hosts=case.world_size, rate=f"{case.plan(quick=True).rate_mbit:g}mbit")
        run_in_lab(name, lab, [sys.executable, __file__, WORKER, name, str(steps), str(out)], 1800)
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    return [{"case": name, **row, "commit": commit()} for row in rows]


def work(name: str, steps: int, out: Path) -> None:
    """One rank: all methods, one after the other."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    dist.init_process_group("gloo")
    case = cases.ALL[name]
    assert isinstance(case, PacedCase)
    job = paced_job(case.plan(quick=True), dist.get_rank())
    makers: dict[str, Callable[[PacedJob], Trainer]] = {
        "alone": alone,
        "ddp": lambda job: stock.ddp_capped(job, (CAP_MB,)),
        "dear": lambda job: Dear(job, CAP_MB),
        "headway": lambda job: ours(job, cases.QUICK)[0],
    }
    rows: list[dict[str, Any]] = []
    for method, make in makers.items():
        trainer = make(job)
        for _ in range(3):
            trainer.step()
        step_ms, threads = _watched(trainer, steps)
        of_method = {"method": method, "step_ms": step_ms, "note": trainer.note[:80]}
        rows += [{**of_method, "kind": "thread", **each} for each in threads]
        rows += [{**of_method, "kind": "code", **each} for each in _profiled(trainer, steps)]
        trainer.finish()
        trainer.close()
        dist.barrier()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def _watched(trainer: Trainer, steps: int) -> tuple[float, list[dict[str, Any]]]:
    """The median step (ms), and of each kind of thread what a step takes of it."""
    dist.barrier()
    trainer.restart()
    before, times_s = _threads(), []
    for _ in range(steps):
        begun_s = time.perf_counter()
        trainer.step()
        times_s.append(time.perf_counter() - begun_s)
    after = _threads()
    of_kind: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for thread, (kind, cpu_s, switches) in after.items():
        _, cpu_before_s, switches_before = before.get(thread, (kind, 0.0, 0))
        of_kind[kind].append((cpu_s - cpu_before_s, switches - switches_before))
    rows = [
        {
            "part": f"{kind} ({len(own)})",
            "cpu_ms": 1e3 * sum(cpu_s for cpu_s, _ in own) / steps,
            "times": sum(switches for _, switches in own) / steps,
        }
        for kind, own in sorted(of_kind.items())
    ]
    return 1e3 * statistics.median(times_s), rows


def _threads() -> dict[int, tuple[str, float, int]]:
    """Of each thread of this process its kind, its CPU time (s) and how often it gave up its core to wait."""
    ours_by_number = {each.native_id: each.name for each in threading.enumerate()}
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            status = (folder / "status").read_text()
            name = (folder / "comm").read_text().strip()
        except OSError:
            continue  # it has ended
        number = int(folder.name)
        if number == os.getpid():
            kind = "main"
        elif number in ours_by_number:
            kind = "channels" if "headway" in ours_by_number[number].lower() else "python"
        else:
            kind = "gloo" if "gloo" in name else "torch"
        switches = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary"))
        found[number] = kind, (int(fields[11]) + int(fields[12])) * TICK_S, switches
    return found


def _profiled(trainer: Trainer, steps: int) -> list[dict[str, Any]]:
    """What the main thread spends its CPU time in."""
    dist.barrier()
    trainer.restart()
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(steps):
        trainer.step()
    profiler.disable()
    calls: Counter[str] = Counter()
    spent_s: dict[str, float] = defaultdict(float)
    for (file, _, function), (_, count, own_s, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        name = _part(file, function)
        calls[name] += count
        spent_s[name] += own_s
    first = sorted(spent_s, key=lambda name: -spent_s[name])[:LISTED]
    rest_s = sum(spent_s.values()) - sum(spent_s[name] for name in first)
    rows = [
        {"part": name, "cpu_ms": 1e3 * spent_s[name] / steps, "times": calls[name] / steps} for name in first
    ]
    return [*rows, {"part": "all others", "cpu_ms": 1e3 * rest_s / steps, "times": 0.0}]


def _part(file: str, function: str) -> str:
    """What a function is part of: one of Headway's files, the job, torch's Python, or itself where it is built in."""
    if file == "~":
        return function.strip("<>").removeprefix("built-in method ")
    path = Path(file)
    if "headway" in path.parts and "models" not in path.parts:
        return f"headway {path.parent.name}/{path.stem}"
    if {"paced_training", "models"} & set(path.parts):
        return "the paced job and its methods"
    return f"{'torch' if 'torch' in path.parts else 'Python'}'s {path.stem}"


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
