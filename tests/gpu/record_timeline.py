"""Record a timeline of streams on a GPU, to be kept under benchmarks/results.

    python -m tests.gpu.record_timeline benchmarks/results/gpu_timeline.json.gz

One rank trains over NCCL with collectives that are imitated to take as long as over a network (a kernel that spins on
the collective's stream: with one rank NCCL itself moves nothing). The trace of the last two steps opens in
https://ui.perfetto.dev; what is printed says on which streams kernels ran and how much of the collectives' time other
kernels were running, too.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

STEPS, RECORDED = 8, 2
WIDTH, DEPTH, BATCH = 2048, 8, 2048
SPIN = "spin"


def record(target: Path) -> dict[str, Any]:
    """Train and write the trace to ``target``, a gzipped JSON file; return a summary of it."""
    import torch
    import torch.distributed as dist
    from tests.gpu import slow_collectives
    from torch import nn
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    from headway.strategies.decoupled.wrapper import DecoupledDataParallel

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    slow_collectives.slow_down()
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DecoupledDataParallel(nn.Sequential(*layers).cuda(), bucket_cap_mb=16, device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, WIDTH, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(STEPS - RECORDED):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(RECORDED):
            step()
        model.flush()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        events = json.loads(plain.read_text())
        target.write_bytes(gzip.compress(plain.read_bytes()))
    dist.destroy_process_group()
    return {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, **summary(events)}


def summary(trace: dict[str, Any]) -> dict[str, Any]:
    """Which kernels ran on which streams, and the share of the spinning in which other kernels ran, too."""
    kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    streams: dict[str, set[int]] = defaultdict(set)
    for event in kernels:
        streams[kind_of(event["name"])].add(int(event["args"]["stream"]))
    spinning = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if kind_of(e["name"]) == SPIN]
    computing = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if kind_of(e["name"]) == "compute"]
    whole = sum(end - start for start, end in spinning)
    hidden = sum(_covered(start, end, computing) for start, end in spinning)
    return {
        "streams": {kind: sorted(found) for kind, found in streams.items()},
        "collectives_us": whole,
        "hidden_share": hidden / whole if whole else 0.0,
    }


def kind_of(name: str) -> str:
    """What a kernel is for, by its name."""
    lowered = name.lower()
    if "spin" in lowered or "nccl" in lowered:
        return SPIN
    if "gemm" in lowered or "cutlass" in lowered or "nvjet" in lowered or "xmma" in lowered:
        return "compute"
    if "multi_tensor" in lowered and "copy" in lowered:  # gradients into buckets, values out of them
        return "copy"
    return "update" if "multi_tensor" in lowered or "adam" in lowered else "other"


def _covered(start: float, end: float, others: list[tuple[float, float]]) -> float:
    """How much of ``start`` to ``end`` lies in the union of ``others``."""
    covered, place = 0.0, start
    for low, high in sorted(others):
        low, high = max(low, place), min(high, end)
        if low < high:
            covered += high - low
            place = high
    return covered


if __name__ == "__main__":
    print(json.dumps(record(Path(sys.argv[1])), indent=2))
