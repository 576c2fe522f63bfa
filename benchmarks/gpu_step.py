"""What the decoupled runtime and passes cost or save where a fast device computes: one GPU, NCCL with a single rank.

    python benchmarks/gpu_step.py [--quick] [--only CASE] [--json FILE]

Nothing is communicated, so a step can be no faster than stock DDP's but by a pass; what it takes more is what the host
does besides, where that no longer keeps ahead of the device. Methods are trained in turn. Without a GPU a small model
is trained on the CPU over Gloo, which says nothing but that this file works.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import commit, interval_ms, keep_case, parse_arguments, report
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy

import headway
from headway.demo.train_gpt import CONTEXT, GPT
from headway.passes.base import Pass
from headway.passes.compile import Compile
from headway.passes.optimizer import OptimizerImplementation
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.plan import Plan
from headway.plan.plan import PlannedModel
from headway.strategies.live.module_spec import model_spec

ON_GPU = torch.cuda.is_available()
WIDTH, DEPTH, HEADS, BATCH = (768, 8, 12, 128) if ON_GPU else (64, 2, 2, 4)
BLOCKS = tuple(f"blocks.{index}" for index in range(DEPTH))
ROUNDS, STEPS, WARM_STEPS = 7, 15, 4
CASES = ("as-it-is", "clipped")
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("ddp", {}),
    "decoupled 4 MiB": ("decoupled", {}),
    "decoupled 25 MiB": ("decoupled", {"bucket_cap_bytes": 25 * 2**20}),
    "decoupled 4 MiB, gradients": ("decoupled", {"gather": "gradients"}),
    "decoupled 25 MiB, gradients": ("decoupled", {"gather": "gradients", "bucket_cap_bytes": 25 * 2**20}),
}
PASSES: dict[str, Pass] = {
    "fused": OptimizerImplementation(implementation="fused"),
    "bfloat16": Precision(dtype="bfloat16"),
    "float16": Precision(dtype="float16"),
    "recompute": Recompute(modules=BLOCKS),
    "compile": Compile(modules=BLOCKS),
}
WORDS = (
    f"Milliseconds a step of a GPT of width {WIDTH} and depth {DEPTH}, {BATCH} windows of {CONTEXT} bytes, float32, "
    "AdamW; median over interleaved rounds, `interval`: bootstrap over rounds, 95 %. `host_ms` is when the host has "
    "given the device all of a round's work: as long as the step where the device waits for the host. `peak_mib` is "
    "what a step allocates on the device at most besides what lies there between steps."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", CASES)
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    torch.set_default_device("cuda" if ON_GPU else "cpu")
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else CASES:
        own = _measured(name, clips=name == "clipped", rounds=2 if arguments.quick else ROUNDS)
        if ON_GPU and not arguments.quick:
            keep_case("gpu_step", own, CASES, WORDS)
        rows += own
    report("gpu_step", rows, arguments, WORDS)
    dist.destroy_process_group()


def _measured(name: str, *, clips: bool, rounds: int) -> list[dict[str, Any]]:
    methods = {each: _stepper(*planned, (), clips=clips) for each, planned in STRATEGIES.items()}
    methods |= {each: _stepper("ddp", {}, (one,), clips=clips) for each, one in PASSES.items()}
    peaks = {each: _peak_mib(step) for each, step in methods.items()}
    step_ms: dict[str, list[float]] = {each: [] for each in methods}
    host_ms: dict[str, list[float]] = {each: [] for each in methods}
    for number in range(rounds):
        print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for each, step in methods.items():
            whole, host = _round(step)
            step_ms[each].append(whole)
            host_ms[each].append(host)
    stock = statistics.median(step_ms["stock"])
    return [
        {
            "case": name, "method": each, "time_ms": statistics.median(step_ms[each]),
            "interval": interval_ms(step_ms[each]), "over_stock": stock / statistics.median(step_ms[each]),
            "host_ms": statistics.median(host_ms[each]), "peak_mib": peaks[each], "rounds": rounds, "commit": commit(),
            "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        }
        for each in methods
    ]  # fmt: skip


def _stepper(
    strategy: str, options: dict[str, Any], passes: tuple[Pass, ...], *, clips: bool
) -> Callable[[], None]:
    torch.manual_seed(0)
    model = GPT(WIDTH, DEPTH, HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    plan = Plan(
        mesh={"data": 1}, parallel={"data": headway.strategy(strategy, **options)}, passes=passes,
        model=PlannedModel.of(model_spec(model)),
    )  # fmt: skip
    wrapped: Any = headway.parallelize(model, optimizer, plan)
    tokens = torch.randint(256, (BATCH, CONTEXT + 1))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        if clips:
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()

    return step


def _round(step: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds a step, and of the host alone."""
    for _ in range(WARM_STEPS):
        step()
    _synchronise()
    begin_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    given_s = time.perf_counter()
    _synchronise()
    return (time.perf_counter() - begin_s) / STEPS * 1e3, (given_s - begin_s) / STEPS * 1e3


def _peak_mib(step: Callable[[], None]) -> float:
    for _ in range(WARM_STEPS):
        step()
    if not ON_GPU:
        return 0.0
    _synchronise()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    _synchronise()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def _synchronise() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
