"""One rank of a job: it says when all that is not the model's is there, is let go, and trains."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import headway
from headway.strategies.decoupled.lifecycle import release
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.registry import plugin_of
from memory.subjects import PLANS, SUBJECTS, Made, Subject

STEPS = 5
FIRST_RECORDED = 3
POLL_S = 0.01
TRACE, GO = "trace", "go"


def work(subject_name: str, plan: str, folder: Path, *, record: bool) -> None:
    """Train as one rank of the process group in the environment; where not ``record``, wait to be let go."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    subject = SUBJECTS[subject_name]
    if record:
        with headway.record(folder / TRACE, first_step=FIRST_RECORDED, stop_step=STEPS):
            _train(subject, subject.make(), plan)
    else:
        _warm_up(plan)
        gc.collect()
        (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
        while not (folder / GO).exists():
            time.sleep(POLL_S)
        _train(subject, subject.make(), plan)
    dist.barrier()
    dist.destroy_process_group()


def _warm_up(plan: str) -> None:
    """Load every library that training will need, on a small model of each kind of layer."""
    small = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.LayerNorm(8)
    )
    subject = Subject(lambda: (small, (torch.ones(2, 3, 8, 8), torch.zeros(2))), "adam")
    _train(subject, (_Summed(small), subject.make()[1]), plan)


class _Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.model(inputs).sum()
        return total


def _train(subject: Subject, made: Made, plan: str) -> None:
    model, batch = made
    strategy = PLANS[plan]
    wrapped = plugin_of(strategy).wrap(model, strategy)
    optimizer = subject.optimizer_of(model)
    for _ in range(STEPS):
        wrapped(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(wrapped, DecoupledDataParallel) and wrapped.engine is not None:
        wrapped.engine.settlement.settle_values()
        release(wrapped.engine)
