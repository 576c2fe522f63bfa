"""Cases: ranks with fewer batches than others, under ``join()``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import Job, Share, case, mlp, sgd, state_of, train
from torch import nn

COUNTS: dict[str, tuple[int, ...]] = {
    "first has most": (5, 2, 3),
    "last has most": (1, 4, 4),
    "first has none": (0, 3, 2),
    "even": (3, 3, 3),
}


def _uneven(counts: tuple[int, ...], initial: bool, make: Callable[[Any], Any], job: Job) -> None:
    counts = counts[: job.world_size]
    longest = max(counts)
    model = job.wrap(mlp())
    optimizer = make(model.parameters())

    def loss_of(share: Share) -> torch.Tensor:
        return nn.functional.mse_loss(model(share.x), share.y)

    if job.alone:
        for step in range(longest):
            active = [share for share in job.shares(step) if step < counts[share.rank]]
            optimizer.zero_grad()
            job.backward_by_rank(model, loss_of, active, job.world_size if initial else len(active))
            optimizer.step()
    else:
        with model.join(divide_by_initial_world_size=initial):
            for step in range(counts[job.rank]):
                optimizer.zero_grad()
                job.backward_by_rank(model, loss_of, job.shares(step))
                optimizer.step()
    if job.alone or counts[job.rank] == longest:  # the others' state ends where they did
        job.see("state", state_of(optimizer))
    job.see("values", list(model.parameters()))
    for p in model.parameters():
        p.grad = None


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}
for _name, _counts in COUNTS.items():
    for _initial in (True, False):
        for _optimizer, _make in OPTIMIZERS.items():
            if _optimizer == "Adam" and (_initial or _name == "even"):
                continue  # SGD has it
            case(name=f"join, {_name}, over {'all' if _initial else 'remaining'} ranks, {_optimizer}")(
                partial(_uneven, _counts, _initial, _make)
            )


@case()
def join_with_accumulation(job: Job) -> None:
    counts = (2, 4, 3)[: job.world_size]
    model = job.wrap(mlp())
    optimizer = sgd(model)

    def loss_of(share: Share) -> torch.Tensor:
        return nn.functional.mse_loss(model(share.x), share.y)

    if job.alone:
        for step in range(max(counts)):
            active = [rank for rank, count in enumerate(counts) if step < count]
            optimizer.zero_grad()
            for part in range(2):
                shares = [share for share in job.shares(2 * step + part) if share.rank in active]
                job.backward_by_rank(model, loss_of, shares)
            optimizer.step()
    else:
        with model.join():
            for step in range(counts[job.rank]):
                optimizer.zero_grad()
                with model.no_sync():
                    job.backward_by_rank(model, loss_of, job.shares(2 * step))
                job.backward_by_rank(model, loss_of, job.shares(2 * step + 1))
                optimizer.step()
    for p in model.parameters():
        p.grad = None


@case()
def join_and_then_train_on(job: Job) -> None:
    """Without momentum, since optimizers of ranks that joined early have seen fewer steps."""
    model = job.wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        counts = (2, 3, 1)[: job.world_size]
        start = 10 * epoch

        def loss_of(share: Share) -> torch.Tensor:
            return nn.functional.mse_loss(model(share.x), share.y)

        if job.alone:
            for step in range(max(counts)):
                optimizer.zero_grad()
                active = [share for share in job.shares(start + step) if step < counts[share.rank]]
                job.backward_by_rank(model, loss_of, active)
                optimizer.step()
        else:
            with model.join():
                for step in range(counts[job.rank]):
                    optimizer.zero_grad()
                    job.backward_by_rank(model, loss_of, job.shares(start + step))
                    optimizer.step()
        job.see("values", list(model.parameters()))
        train(job, model, optimizer, 2, start + 5)


@case()
def join_behind_two_optimizers_that_stepped_in_turn(job: Job) -> None:
    model = job.wrap(mlp())
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[start::2], lr=0.1) for start in (0, 1)]

    def loss_of(share: Share) -> torch.Tensor:
        return nn.functional.mse_loss(model(share.x), share.y)

    def trained(shares: list[Share]) -> None:
        model.zero_grad()
        job.backward_by_rank(model, loss_of, shares)
        for optimizer in optimizers:
            optimizer.step()

    trained(job.shares(0))
    counts = (0, 2, 1)[: job.world_size]
    if job.alone:
        for step in range(max(counts)):
            trained([share for share in job.shares(1 + step) if step < counts[share.rank]])
    else:
        with model.join():
            for step in range(counts[job.rank]):
                trained(job.shares(1 + step))
    job.see("values", list(model.parameters()))
    for step in range(5, 8):
        trained(job.shares(step))
    job.see("values later", list(model.parameters()))
