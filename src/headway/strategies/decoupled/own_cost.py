"""What the decoupled runtime costs the thread that trains, compared with stock DDP: measured on a small model.

It is work in Python for each parameter: hooks that notice its use and its gradient, and putting its update off. It is
counted in the thread's processor time, which waiting and other threads hardly change.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.network.halting import stop_if_asked
from headway.strategies.decoupled import lifecycle
from headway.strategies.decoupled.wrapper import DecoupledDataParallel

LAYERS, WIDTH = 24, 8
LAYERS_A_BUCKET = 5  # ten parameters, as plans mostly have it
ROUNDS, STEPS, WARM_UP_STEPS = 2, 16, 4
COPIED_BYTES, COPIES = 2**25, 5  # more than caches hold


class OwnCost(NamedTuple):
    """Microseconds of the main thread for each parameter in a forward, a backward and a step; and to copy one MiB."""

    forward_us: float
    backward_us: float
    step_us: float
    copy_us: float


def own_cost() -> OwnCost:
    """Measure it. Every rank calls it, with the default process group initialised on Gloo."""
    cap_mb = LAYERS_A_BUCKET * 4 * (WIDTH + 1) * WIDTH / 2**20
    for _ in range(ROUNDS):  # the last one counts: the first passes of a process take longer
        stop_if_asked()
        stock = _passes_s(DistributedDataParallel(_model(), bucket_cap_mb=cap_mb))
        planned = DecoupledDataParallel(_model(), bucket_cap_mb=cap_mb)
        own = _passes_s(planned)
        assert planned.engine is not None
        lifecycle.release_everywhere(planned.engine)  # a job that goes on keeps nothing of it
    # Under stock DDP the step is the optimizer's own work.
    extra_s = (own[0] - stock[0], own[1] - stock[1], own[2])
    forward_us, backward_us, step_us = (max(0.0, each) / (2 * LAYERS) * 1e6 for each in extra_s)
    return OwnCost(forward_us, backward_us, step_us, _copy_s() * 1e6)


class _ProbeModel(nn.Sequential):
    """Layers of this probe, which a plan in force leaves alone without a word."""


def _model() -> nn.Module:
    return _ProbeModel(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _passes_s(model: nn.Module) -> list[float]:
    """Processor seconds of this thread in a forward, a backward and a step of AdamW, in the median."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.ones(2, WIDTH)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        moments = [time.thread_time()]
        loss = model(batch).sum()
        moments.append(time.thread_time())
        loss.backward()
        moments.append(time.thread_time())
        optimizer.step()
        moments.append(time.thread_time())
        found.append([after - before for before, after in pairwise(moments)])
    return [statistics.median(each) for each in zip(*found[WARM_UP_STEPS:], strict=True)]


def _copy_s() -> float:
    """Processor seconds of this thread to copy a MiB."""
    source, target = torch.ones(COPIED_BYTES // 4), torch.zeros(COPIED_BYTES // 4)
    found = []
    for _ in range(COPIES):
        begun = time.thread_time()
        target.copy_(source)
        found.append(time.thread_time() - begun)
    return statistics.median(found) * 2**20 / COPIED_BYTES
