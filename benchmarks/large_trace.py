"""A synthetic trace of many ranks, steps and events, and what loading and diagnosing it takes: for trace_loading.py."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from headway.arrays import Ints
from headway.model import ModelSpec
from headway.trace.events import Events, Kind, Stream
from headway.trace.folder import load_trace, write_trace
from headway.trace.format import Manifest, RankInfo

METHODS = ("load", "diagnose")
STEP_NS = 200_000_000
BUCKETS, BUCKET_BYTES = 60, 4_000_000
SLOW_RANK, SLOW_NS = 7, 20_000_000


def write(folder: Path, *, ranks: int, steps: int, events: int) -> int:
    """Write a data-parallel job one of whose ranks is slow; returns how many events it has."""
    folder.mkdir()
    own = {rank: _rank(rank, steps, events) for rank in range(ranks)}
    infos = tuple(
        RankInfo(rank=rank, host=f"host{rank // 8}", world_size=ranks, backend="nccl", version="0")
        for rank in range(ranks)
    )
    manifest = Manifest(world_size=ranks, steps=tuple(range(steps)), ranks=infos)
    write_trace(folder, manifest, ModelSpec(parameters=()), own)
    return sum(map(len, own.values()))


def _rank(rank: int, steps: int, events: int) -> Events:
    """Forward and backward module by module, gradients, buckets that end together, a wait, the optimizer."""
    late_ns = SLOW_NS if rank == SLOW_RANK else 0
    begin = np.arange(steps, dtype=np.int64) * STEP_NS
    modules = (events - 2 * BUCKETS - 5) // 2
    parts = [_spans(Kind.STEP, begin, np.zeros(1, np.int64), STEP_NS, ["step"])]
    names = [f"layers.{number // 3}.{number % 3}" for number in range(modules)]
    forward_ns, backward_ns = 50_000_000 // modules, 100_000_000 // modules
    each = np.arange(modules, dtype=np.int64)
    parts.append(_spans(Kind.FORWARD, begin, 2_000_000 + each * forward_ns, forward_ns - 100, names))
    parts.append(
        _spans(Kind.BACKWARD, begin, 60_000_000 + late_ns + each * backward_ns, backward_ns - 100, names)
    )
    asked = 62_000_000 + np.arange(BUCKETS, dtype=np.int64) * 1_600_000
    gradients = [f"layers.{number}.weight" for number in range(BUCKETS)]
    parts.append(_spans(Kind.GRADIENT_READY, begin, asked + late_ns, 0, gradients))
    ends = (begin[:, None] + asked[None, :] + SLOW_NS + 3_000_000).ravel()
    starts = (begin[:, None] + asked[None, :] + late_ns).ravel()
    parts.append(
        Events.from_columns(
            kind=Kind.COLLECTIVE, stream=Stream.COMMUNICATION, name="all_reduce", group="0", algorithm="gloo",
            start_ns=starts, enqueue_ns=starts, duration_ns=ends - starts, step=np.repeat(np.arange(steps), BUCKETS),
            sequence=np.arange(steps * BUCKETS), size_bytes=np.full(steps * BUCKETS, BUCKET_BYTES),
            bucket=np.tile(np.arange(BUCKETS), steps),
        )
    )  # fmt: skip
    pass_end = 160_000_000 + SLOW_NS + 3_000_000
    parts.append(_spans(Kind.FORWARD_PASS, begin, np.full(1, 2_000_000), 50_000_000, [""]))
    parts.append(_spans(Kind.BACKWARD_PASS, begin, np.full(1, 60_000_000), pass_end - 60_000_000, [""]))
    waits = np.full(1, 160_000_000 + late_ns)
    parts.append(_spans(Kind.WAIT, begin, waits, pass_end - 160_000_000 - late_ns, ["gradients"]))
    parts.append(_spans(Kind.OPTIMIZER, begin, np.full(1, 184_000_000), 15_000_000, ["SGD"]))
    return Events.concatenated(parts)


def _spans(kind: str, begin: Ints, offsets: Ints, duration_ns: int, names: list[str]) -> Events:
    """The same spans in every step."""
    count = len(begin) * len(offsets)
    return Events.from_columns(
        kind=kind, stream=Stream.COMPUTE, name=np.array(names * len(begin), dtype=object),
        start_ns=(begin[:, None] + offsets[None, :]).ravel(), duration_ns=np.full(count, duration_ns),
        step=np.repeat(np.arange(len(begin)), len(offsets)),
    )  # fmt: skip


def _measure(method: str, folder: Path) -> dict[str, Any]:
    import pyarrow.parquet as pq

    from headway.diagnosis import diagnose

    begin = time.perf_counter()
    for path in folder.glob("*.parquet"):
        pq.read_table(path)
    read_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    trace = load_trace(folder)
    verdict = diagnose(trace).verdict if method == "diagnose" else ""
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "read_seconds": read_seconds, "gb": round(_peak_gb(), 2), "verdict": verdict}


def _peak_gb() -> float:
    # Not getrusage's maximum, which a process begins with that of the one that started it.
    status = Path("/proc/self/status").read_text()
    return next(float(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1e6


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], Path(sys.argv[2]))))
