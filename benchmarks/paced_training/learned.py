"""What a few steps without communication teach: orders of use and readiness, and when each gradient is ready."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.model import ModelSpec
from headway.strategies.data_parallel.module_spec import model_spec
from paced_training.jobs import Job
from paced_training.trainer import alone

_STEPS = 2


@dataclass(frozen=True)
class Learned:
    """The spec with its orders, and for each parameter when, after the start of backward, it was ready (seconds)."""

    spec: ModelSpec
    ready_s: dict[str, float]


def learn(job: Job) -> Learned:
    trainer = alone(job)
    names = {id(p): name for name, p in trainer.inner.named_parameters()}
    used: list[str] = []
    ready_at: dict[str, float] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, __, name=name: _once(used, name))
        for name, module in trainer.inner.named_modules()
        if list(module.parameters(recurse=False))
    ]

    def ready(parameter: torch.Tensor) -> None:
        ready_at[names[id(parameter)]] = time.perf_counter()

    handles += [p.register_post_accumulate_grad_hook(ready) for p in trainer.inner.parameters()]
    for _ in range(_STEPS):
        ready_at.clear()
        taken = trainer.step()
    for handle in handles:
        handle.remove()
    order = sorted(ready_at, key=ready_at.__getitem__)
    start = ready_at[order[-1]] - taken.backward_s
    spec = model_spec(trainer.inner).model_copy(
        update={"forward_order": tuple(used), "ready_order": tuple(order)}
    )
    return Learned(spec, {name: ready_at[name] - start for name in order})


def shared_from_rank_0(learned: Learned) -> Learned:
    """Rank 0's: every rank must decide the same."""
    box = [learned]
    dist.broadcast_object_list(box)
    return box[0]


def _once(used: list[str], name: str) -> None:
    if name not in used:
        used.append(name)
