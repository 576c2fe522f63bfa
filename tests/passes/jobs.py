"""Jobs of live models that compute for as long as is asked, and hold what is watched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headway.cluster import Cluster, Host
from headway.graph.computation import Computation, Timeline
from headway.graph.step_layout import StepProfile
from headway.job import Job
from headway.memory.pass_watch import PassMemoryWatch
from headway.model import ModelSpec, PassMemory
from headway.simulator.memory import peak_bytes
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.module_spec import model_spec

DDP = DistributedDataParallelStrategy()
MS = 1_000_000
WIDTH, BATCH = 48, 96


def watched(model: nn.Module, batch: int = BATCH) -> PassMemory:
    watch = PassMemoryWatch()
    handles: list[Any] = []
    for name, parameter in model.named_parameters():
        handles.append(
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: watch.gradient_done(name, p))
        )
    for name, module in model.named_modules():
        if name:
            handles += [
                module.register_forward_pre_hook(
                    lambda _m, given, name=name: watch.module_begins(name, given)
                ),
                module.register_forward_hook(lambda _m, _i, out, name=name: watch.module_ends(name, out)),
            ]
    given = torch.randn(batch, WIDTH)
    watch.begin((given,))
    out = model(given)
    watch.forward_done()
    out.square().mean().backward()
    del out
    watch.update_begins()
    found = watch.end()
    assert found is not None
    return found


def job(
    model: nn.Module,
    *,
    forward_ms: float = 80,
    backward_ms: float = 160,
    gbps: float = 10,
    batch: int = BATCH,
) -> Job:
    """Every module with parameters computes equally long."""
    names = [
        name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    ]
    parameters = [name for name, _ in reversed(list(model.named_parameters()))]
    profile = StepProfile(
        forward_ns=round(forward_ms * MS),
        backward_ns=round(backward_ms * MS),
        needs_ns={name: round(forward_ms * MS * at / len(names)) for at, name in enumerate(names)},
        ready_ns={
            name: round(backward_ms * MS * (at + 1) / len(parameters)) for at, name in enumerate(parameters)
        },
    )
    spec: ModelSpec = model_spec(model).model_copy(
        update={
            "pass_memory": watched(model, batch),
            "forward_order": tuple(names),
            "ready_order": tuple(parameters),
        }
    )
    whole = Job.of(spec, 2)
    return replace(
        whole,
        cluster=Cluster(
            hosts=tuple(Host(name=f"h{i}", workers=1, up_gbps=gbps, down_gbps=gbps) for i in range(2))
        ),
        computation=Computation({0: (profile.timeline(),)}),
    )


def predicted_peak(of: Job) -> int:
    return peak_bytes(of, DDP, DDP.decide(of))


def time_ns(timeline: Timeline, part: str) -> int:
    return sum(item.duration_ns for item in timeline.items if item.kind == part)
