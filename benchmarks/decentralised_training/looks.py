"""Looks: copies of a rank's model while it trains, and what rank 0 makes of those of all ranks afterwards.

Ranks leave them in files that they share: their links are slow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from decentralised_training.tasks import Task, held_out_loss, tensors_of

LOOK_S = 0.25  # a copy of the model is kept so often


class Looks:
    """Those of one rank, from ``begin`` on."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.begin()

    def begin(self) -> None:
        """Forget what was before."""
        self._begun_s, self._iterations = time.monotonic(), 0
        self._kept: list[tuple[float, int, torch.Tensor]] = []  # seconds, iterations, the model

    def look(self) -> None:
        """Keep a copy where it is time. Called after each iteration."""
        self._iterations += 1
        since = time.monotonic() - self._begun_s
        if len(self._kept) * LOOK_S <= since:
            self._kept.append((since, self._iterations, flat(self._module)))

    def found(self, task: Task, until_s: float, folder: Path) -> dict[str, Any]:
        """At every moment the loss of the mean of all models, and all samples so far. Collective; rank 0 has it."""
        moments = [LOOK_S * number for number in range(1, int(until_s / LOOK_S) + 1)]
        latest = [self._latest(moment) for moment in moments]
        np.savez(
            _file(folder, dist.get_rank()),
            iterations=np.array([iterations for iterations, _ in latest]),
            models=np.stack([values.numpy() for _, values in latest]),
        )
        dist.barrier()
        result = {}
        if dist.get_rank() == 0:
            files = [_file(folder, rank) for rank in range(dist.get_world_size())]
            result = {"times_s": moments, **_of_means(task, files)}
            for each in files:
                each.unlink()
        dist.barrier()
        return result

    def _latest(self, moment: float) -> tuple[int, torch.Tensor]:
        before = [each for each in self._kept if each[0] <= moment]
        _, iterations, values = before[-1] if before else self._kept[0]
        return iterations, values


def flat(module: nn.Module) -> torch.Tensor:
    """All parameters and statistics in one vector."""
    return torch.cat([each.detach().flatten().float() for each in tensors_of(module)])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"looks-{rank}.npz"


def _of_means(task: Task, files: Sequence[Path]) -> dict[str, Any]:
    total: Any = 0.0
    mean: Any = 0.0
    last = []
    for each in files:
        with np.load(each) as looks:  # one at a time: together they are large
            total = total + looks["iterations"]
            mean = mean + looks["models"] / len(files)
            last.append(looks["models"][-1])
    squared = sum(float(np.square(each - mean[-1]).sum()) for each in last) / len(files)
    apart = (squared / float(np.square(mean[-1]).sum())) ** 0.5
    shapes = tensors_of(task.make())
    losses = []
    for values in torch.from_numpy(mean):
        parts = values.split([each.numel() for each in shapes])
        losses.append(held_out_loss(task, [part.view_as(of) for part, of in zip(parts, shapes, strict=True)]))
    return {"losses": losses, "samples": (total * task.samples).tolist(), "apart": apart}
