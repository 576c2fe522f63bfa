"""A script for torchrun: trains a model in every given mode, is killed once, and goes on from its last checkpoint.

python restart_script.py FOLDER MODE...
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.behaviour.decoupled.job import mlp, rows, wrap
from torch import nn

ROWS, STEPS, SAVED_EVERY, KILLED_AT = 8, 9, 2, 5


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def save(models: list[Any], optimizers: list[torch.optim.Optimizer], step: int, checkpoint: Path) -> None:
    states = [(m.module.state_dict(), o.state_dict()) for m, o in zip(models, optimizers, strict=True)]
    partial = checkpoint.with_suffix(".partial")
    torch.save({"step": step, "states": states}, partial)
    partial.replace(checkpoint)


def main(folder: Path, modes: list[str]) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    models: list[Any] = [wrap(mlp(), mode) for mode in modes]
    optimizers = [make_optimizer(model) for model in models]
    first = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first = saved["step"]
        for model, optimizer, (values, state) in zip(models, optimizers, saved["states"], strict=True):
            model.module.load_state_dict(values)
            optimizer.load_state_dict(state)
        (folder / f"resumed-{rank}").write_text(str(first))
    for step in range(first, STEPS):
        x, y = rows(ROWS, step)
        if step == KILLED_AT and rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            models[-1].module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
            optimizer.step()
        if step % SAVED_EVERY == SAVED_EVERY - 1 and rank == 0:
            save(models, optimizers, step + 1, checkpoint)
    torch.save([model.module.state_dict() for model in models], folder / f"ended-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
