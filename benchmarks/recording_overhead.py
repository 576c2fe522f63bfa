"""What recording costs: one job, two workers, blocks of steps recorded and unrecorded in turn.

    python benchmarks/recording_overhead.py [--quick] [--only CASE] [--json FILE]

Both kinds of blocks run in the same processes, in the order A B B A, with every hook taken off in between, so
that a drift of the machine hits both alike. The first two steps of a block are left out. Computation is real, one
thread a worker; the links are a lab's. The step before the recorded ones, in which memory is watched, is timed apart,
between two that are not watched. What `finish` costs once at the end of a recording (clocks, Parquet) is outside every
block, and so not in the figure.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import keep_case, parse_arguments, report
from scipy import stats  # type: ignore[import-untyped]

from headway.cli.record import FIRST_STEP, LAST_STEP
from headway.lab import launch
from headway.lab.spec import LabSpec

CASES = {"gpt-400mbit": "400mbit", "gpt-2gbit": "2gbit"}
BLOCK_STEPS, SKIPPED_STEPS = 10, 2
RECORDED_STEPS = LAST_STEP - FIRST_STEP
WORKER = "--worker"


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    pairs = 2 if arguments.quick else 60
    rows = []
    for case in [arguments.only] if arguments.only else list(CASES):
        rows += _rows(case, *_measure(CASES[case], pairs))
    words = (
        "Steps (ms) in blocks of 8, recorded and unrecorded in one interleaved job; ratio to unrecorded. `time_ms` is "
        "the median of the blocks' median steps, `overhead` the median over pairs of neighbouring blocks of the "
        "ratio of their median steps, `spread` the quartiles of that, `interval` its 95 % (bootstrap); "
        "`overhead_of_means` is the same of mean steps, in which one interruption of the machine moves a block. "
        "`memory watched` is the one step that a recording watches memory in, next to its two neighbours; "
        f"`of_a_recording` adds its cost to {RECORDED_STEPS} recorded steps. "
        "What the end of a recording costs once (clocks, writing Parquet) is not in it. "
        "Real computation on two workers, links shaped by the lab."
    )
    report("recording_overhead", rows, arguments, words)
    if arguments.only and not arguments.quick:
        keep_case("recording_overhead", rows, list(CASES), words)


def _measure(rate: str, pairs: int) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """The blocks, and of each watched step its time between those of its neighbours."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "blocks.json"
        command = [sys.executable, __file__, WORKER, str(pairs), str(out)]
        status = launch.run(LabSpec(hosts=2, rate=rate), command, timeout_s=1800, on_line=lambda *_: None)
        if status != 0:
            raise SystemExit(f"the job ended with status {status}")
        measured: dict[str, Any] = json.loads(out.read_text())
        return measured["blocks"], measured["watched"]


def _rows(case: str, blocks: list[dict[str, Any]], watched: list[list[float]]) -> list[dict[str, Any]]:
    recorded, plain = _steps(blocks, statistics.median)
    overheads = [r / p - 1 for r, p in zip(recorded, plain, strict=True)]
    of_means = [r / p - 1 for r, p in zip(*_steps(blocks, statistics.fmean), strict=True)]
    low, _, high = statistics.quantiles(overheads, n=4)
    bound_ms = statistics.median(plain)
    rows = []
    for method, times in (("unrecorded", plain), ("recorded", recorded)):
        time_ms = statistics.median(times)
        row = {
            "case": case,
            "method": method,
            "time_ms": time_ms,
            "bound_ms": bound_ms,
            "ratio": time_ms / bound_ms,
        }
        rows.append(row | {"blocks": len(times)})
    rows[1] |= {
        "overhead": f"{statistics.median(overheads):+.2%}",
        "spread": f"{low:+.2%} to {high:+.2%}",
        "interval": _interval(overheads),
        "overhead_of_means": f"{statistics.median(of_means):+.2%}",
        "bytes_a_rank_and_step": blocks[0]["bytes_a_rank_and_step"],
    }
    longer_ms = [step - (before + after) / 2 for before, step, after in watched]
    once = [ms / bound_ms for ms in longer_ms]
    low, middle, high = statistics.quantiles(once, n=4)
    time_ms = statistics.median(step for _, step, _ in watched)
    rows.append(
        {
            "case": case,
            "method": "memory watched",
            "time_ms": time_ms,
            "bound_ms": bound_ms,
            "ratio": time_ms / bound_ms,
            "blocks": len(watched),
            "overhead": f"{middle:+.2%}",
            "spread": f"{low:+.2%} to {high:+.2%}",
            "of_a_recording": f"{statistics.median(overheads) + middle / RECORDED_STEPS:+.2%}",
        }
    )
    return rows


def _interval(values: list[float]) -> str:
    found: Any = stats.bootstrap((values,), np.median, rng=0).confidence_interval
    return f"{found.low:+.2%} to {found.high:+.2%}"


def _steps(
    blocks: list[dict[str, Any]], of: Callable[[list[float]], float]
) -> tuple[list[float], list[float]]:
    """What ``of`` makes of the steps of each recorded block, and of each unrecorded one."""
    recorded, plain = (
        [of(block["steps_ms"]) for block in blocks if block["recorded"] is on] for on in (True, False)
    )
    return recorded, plain


def _pattern(pairs: int) -> Iterator[bool]:
    for pair in range(pairs):
        yield from (True, False) if pair % 2 == 0 else (False, True)


def work(pairs: int, out: Path) -> None:
    """One rank of the measured job."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    from headway.demo.train_gpt import GPT, Sources
    from headway.recording.recorder import Recorder, RecordOptions
    from headway.trace.folder import rank_file

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = iter(torch.utils.data.DataLoader(Sources(dist.get_rank(), 16 * (3 * pairs + 2) * BLOCK_STEPS), 16))
    staging = out.parent / "staging"
    staging.mkdir(exist_ok=True)
    recorder = Recorder(RecordOptions(folder=staging, first_step=1, stop_step=10**6))

    def steps(count: int) -> list[float]:
        ends = []
        for _ in range(count):
            window = next(data)
            loss = cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ends.append(time.perf_counter())
        return ends

    steps(BLOCK_STEPS)
    recorder.attach()
    recorder.watch(model, model.module)
    recorder.detach()
    blocks = []
    for recorded in _pattern(pairs):
        if recorded:
            recorder.resume()
        ends = steps(BLOCK_STEPS)
        if recorded:
            recorder.detach()
        dist.barrier()
        steps_ms = [1e3 * (end - begin) for begin, end in itertools.pairwise(ends[SKIPPED_STEPS - 1 :])]
        blocks.append({"recorded": recorded, "steps_ms": steps_ms})
    count = recorder.step
    recorder.finish()
    watched = _watched(model, steps, pairs)
    blocks[0]["bytes_a_rank_and_step"] = round(
        (staging / rank_file(dist.get_rank())).stat().st_size / (count - 1)
    )
    dist.barrier()
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"blocks": blocks, "watched": watched}))
    dist.destroy_process_group()


def _watched(model: Any, steps: Callable[[int], list[float]], pairs: int) -> list[list[float]]:
    """The times (ms) of a step, of one in which memory is watched, and of a third, ``pairs`` times."""
    from headway.recording.memory import MemoryWatch

    times = []
    for _ in range(pairs):
        begins = [*steps(2)]
        watch = MemoryWatch()
        watch.arm(model, model.module)
        begins += steps(1)
        watch.end()
        assert watch.found is not None
        begins += steps(1)
        times.append([1e3 * (end - begin) for begin, end in itertools.pairwise(begins)])
    return times


if __name__ == "__main__":
    if WORKER in sys.argv:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        work(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
