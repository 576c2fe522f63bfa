"""What averaging in groups costs in loss, apart from networks and clocks: one ingredient after the other.

All workers are models in one process that go through their iterations together. No code of the runtime takes part: this
is the reference that says how much of a loss at equal samples is the algorithm's, and which part of it.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from common import commit
from torch import nn
from torch.optim import Optimizer

from decentralised_training import learning_rates
from decentralised_training.losses import SEEDS
from decentralised_training.tasks import TASKS, Task, held_out_loss, loss_of, tensors_of

WORKERS = 8
LOOKS = (60, 120)  # iterations; cases of losses compare after about the first of them
QUICK_LOOKS = (4, 8)
ALL_REDUCE = "all-reduce"


@dataclass(frozen=True)
class Variant:
    """How workers train together. Without a ``group_size`` they step with the mean of their gradients."""

    name: str
    words: str
    group_size: int | None = None
    is_stale: bool = False
    averages_moments: bool = False


VARIANTS = (
    Variant(ALL_REDUCE, "the optimizer steps with the mean gradient"),
    Variant("own-steps", "each worker's optimizer steps with its own gradient, then all average", WORKERS),
    Variant("groups", "as before, then groups of four average, drawn anew in each iteration", 4),
    Variant("groups-stale", "groups, one iteration stale", 4, is_stale=True),
    Variant("groups-moments", "groups that average the optimizer's moments too", 4, averages_moments=True),
)
CASES = {f"causes-{model}": model for model in TASKS}


def measure(case: str, *, quick: bool) -> list[dict[str, Any]]:
    """The rows of a case: the losses of each variant after some iterations, over seeds."""
    model = CASES[case]
    looks, seeds = (QUICK_LOOKS, SEEDS[:1]) if quick else (LOOKS, SEEDS)
    asked = list(product(VARIANTS, seeds))
    context = multiprocessing.get_context("spawn")  # of a process that has threads
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        found = list(pool.map(losses, *zip(*((model, *each, looks) for each in asked), strict=True)))
    rows = []
    for variant in VARIANTS:
        own = [each for (of, _), each in zip(asked, found, strict=True) if of is variant]
        row = {"case": case, "method": variant.name, "what": variant.words, "seeds": len(seeds)}
        for name, iterations, at in zip(("first", "last"), looks, zip(*own, strict=True), strict=True):
            row |= {f"{name}_iterations": iterations, f"{name}_loss": median(at)}
            row[f"{name}_spread"] = f"{min(at):.3f} to {max(at):.3f}"
        rows.append({**row, "learning_rate": learning_rates.best(model, ALL_REDUCE), "commit": commit()})
    return rows


def losses(model: str, variant: Variant, seed: int, looks: Sequence[int]) -> list[float]:
    """The loss of the mean of all models after so many iterations."""
    torch.set_num_threads(1)
    task = TASKS[model]()
    torch.manual_seed(seed)
    first = task.make()
    workers = [copy.deepcopy(first) for _ in range(WORKERS)]
    training = trained(task, workers, variant, learning_rates.best(model, ALL_REDUCE), seed)
    found = []
    for iteration in range(1, max(looks) + 1):
        next(training)
        if iteration in looks:
            found.append(held_out_loss(task, _means([tensors_of(each) for each in workers])))
    return found


def trained(
    task: Task, workers: Sequence[nn.Module], variant: Variant, rate: float, seed: int
) -> Iterator[None]:
    """Train ``workers``; yields after each iteration of all of them."""
    optimizers = [task.optimizer(each, rate) for each in workers]
    draw = random.Random(seed)
    late: list[list[torch.Tensor]] | None = None
    for iteration in range(10**9):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            optimizer.zero_grad(set_to_none=True)
            loss_of(worker, task.batch(rank, seed, iteration)).backward()
        if variant.group_size is None:
            _average_gradients(workers)
        for optimizer in optimizers:
            optimizer.step()
        if variant.group_size is not None:
            values = [
                [*tensors_of(worker), *(_moments_of(optimizer) if variant.averages_moments else ())]
                for worker, optimizer in zip(workers, optimizers, strict=True)
            ]
            changes = _towards_means(values, drawn_groups(variant.group_size, draw))
            due, late = (late, changes) if variant.is_stale else (changes, None)
            if due is not None:
                _add(values, due)
        yield


def drawn_groups(size: int, draw: random.Random) -> list[list[int]]:
    """All workers in groups of ``size``."""
    order = draw.sample(range(WORKERS), WORKERS)
    return [order[begin : begin + size] for begin in range(0, WORKERS, size)]


def _moments_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        value
        for parameter in optimizer.param_groups[0]["params"]
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]


def _means(values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack([each.detach() for each in same]).mean(0) for same in zip(*values, strict=True)]


def _average_gradients(workers: Sequence[nn.Module]) -> None:
    for same in zip(*(worker.parameters() for worker in workers), strict=True):
        gradients = [each.grad for each in same if each.grad is not None]
        mean = torch.stack(gradients).mean(0)
        for gradient in gradients:
            gradient.copy_(mean)


def _towards_means(
    values: Sequence[Sequence[torch.Tensor]], groups: Sequence[Sequence[int]]
) -> list[list[torch.Tensor]]:
    """What takes every worker's ``values`` to the mean of its group."""
    changes: list[list[torch.Tensor]] = [[] for _ in values]
    for group in groups:
        means = _means([values[each] for each in group])
        for each in group:
            changes[each] = [mean - own.detach() for mean, own in zip(means, values[each], strict=True)]
    return changes


def _add(values: Sequence[Sequence[torch.Tensor]], changes: Sequence[Sequence[torch.Tensor]]) -> None:
    with torch.no_grad():
        for own, change in zip(values, changes, strict=True):
            for value, by in zip(own, change, strict=True):
                value.add_(by)
