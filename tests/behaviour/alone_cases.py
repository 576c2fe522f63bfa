"""Ranks that train under stock DDP, of which one does more than the others, as scripts do on rank 0."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway

FIRST, STOP = 2, 6


class Job:
    """A model, and another one that is not trained with others."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.01)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.probe = nn.Linear(32, 4)
        self.probe_optimizer = torch.optim.SGD(self.probe.parameters(), lr=0.1)
        self.x = torch.ones(4, 32)


def _reads_gradients(job: Job) -> None:
    float(torch.stack([p.grad.norm() for p in job.model.parameters() if p.grad is not None]).norm())


def _reads_one_gradient(job: Job) -> None:
    float(job.net[2].weight.grad.norm())  # type: ignore[union-attr,operator]


def _evaluates(job: Job) -> None:
    with torch.no_grad():
        for _ in range(3):
            job.model.module(job.x)


def _evaluates_in_inference_mode(job: Job) -> None:
    job.net.eval()
    with torch.inference_mode():
        job.net(job.x)
        job.model.module(job.x.clone())
    job.net.train()


def _saves(job: Job) -> None:
    torch.save(job.model.state_dict(), io.BytesIO())


def _trains_a_probe(job: Job) -> None:
    job.probe(job.x).sum().backward()
    job.probe_optimizer.step()
    job.probe_optimizer.zero_grad()


def _trains_a_probe_on_features(job: Job) -> None:
    features = job.net[0](job.x)
    features.sum().backward()  # gradients of rank 0 alone
    job.net[0].zero_grad()


def _communicates_with_itself(_job: Job) -> None:
    dist.all_reduce(torch.ones(4), group=GROUPS[dist.get_rank()])


def _accumulates(job: Job) -> None:
    with job.model.no_sync():
        job.model(job.x).sum().backward()


GROUPS: list[Any] = []
BEFORE_BACKWARD: dict[str, Callable[[Job], None]] = {
    "evaluates": _evaluates, "evaluates in inference mode": _evaluates_in_inference_mode,
    "accumulates": _accumulates,
}  # fmt: skip
BETWEEN: dict[str, Callable[[Job], None]] = {
    "reads gradients": _reads_gradients, "reads one gradient": _reads_one_gradient,
    "evaluates before the update": _evaluates, "saves before the update": _saves,
}  # fmt: skip
AFTER: dict[str, Callable[[Job], None]] = {
    "evaluates at the end": _evaluates, "saves": _saves, "trains a probe": _trains_a_probe,
    "a backward of its own": _trains_a_probe_on_features, "communicates with itself": _communicates_with_itself,
}  # fmt: skip
CASES = (*BEFORE_BACKWARD, *BETWEEN, *AFTER, "everything", "one step more")


def recordings(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    """One rank's part of a recording of each case, in which rank 0 alone does it; the losses."""
    GROUPS[:] = [dist.new_group([each]) for each in range(world_size)]
    losses = {}
    for case in CASES:
        with headway.record(Path(folder, case), first_step=FIRST, stop_step=STOP):
            losses[case] = _trained(case, alone=rank == 0)
        dist.barrier()
    losses[""] = _trained("", alone=False)
    return losses


def _trained(case: str, *, alone: bool) -> list[float]:
    job, losses = Job(), []

    def act(acts: dict[str, Callable[[Job], None]]) -> None:
        for name, each in acts.items():
            if alone and case in (name, "everything"):
                each(job)

    with torch.inference_mode() if case == "evaluates in inference mode" else nullcontext():
        job.net(job.x)  # a sanity check of a trainer
    for _ in range(STOP + 1):
        job.optimizer.zero_grad()
        act(BEFORE_BACKWARD)
        loss = job.model(job.x).square().mean()
        loss.backward()
        act(BETWEEN)
        job.optimizer.step()
        act(AFTER)
        losses.append(float(loss.detach()))
    if alone and case == "one step more":
        job.optimizer.step()
    return losses
