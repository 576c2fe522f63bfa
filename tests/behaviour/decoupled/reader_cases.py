"""Threads of the script that read while the main thread trains, at random moments: nothing of training may change."""

from __future__ import annotations

import copy
import io
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import ALONE, CPU, GRADIENTS, PARAMETERS, TURNS, Job, case, mlp, sgd
from torch import nn

STEPS, LONG_STEPS = 12, 60
LONGEST_PAUSE_S = 0.002
Read = Callable[[Any, torch.optim.Optimizer], object]


def _act(model: Any, _optimizer: torch.optim.Optimizer) -> object:
    with torch.no_grad():
        return model.module(torch.ones(3, 6, dtype=torch.float64)).abs().max().item()


def _save(model: Any, optimizer: torch.optim.Optimizer) -> object:
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    return file


READS: dict[str, Read] = {
    "forwards": _act,
    "norms": lambda model, _: [p.norm().item() for p in model.parameters()],
    "clones": lambda model, _: [p.detach().clone() for p in model.parameters()],
    "state_dict": lambda model, _: {k: v.clone() for k, v in model.module.state_dict().items()},
    "copies": lambda model, _: copy.deepcopy(model.module),
    "gradients": lambda model, _: [
        None if p.grad is None else p.grad.norm().item() for p in model.parameters()
    ],
    "optimizer": lambda _, optimizer: optimizer.state_dict(),
    "checkpoints": _save,
}


class _Readers:
    """Threads that read until the block is left; what one of them raised is raised there."""

    def __init__(self, reads: list[Read], model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self._stop = threading.Event()
        self._raised: list[BaseException] = []
        self.count = 0
        self._threads = [
            threading.Thread(
                target=self._run, args=(read, model, optimizer, random.Random(10 * seed + number))
            )
            for number, read in enumerate(reads)
        ]

    def _run(self, read: Read, model: Any, optimizer: torch.optim.Optimizer, chance: random.Random) -> None:
        try:
            while not self._stop.is_set():
                read(model, optimizer)
                self.count += 1
                time.sleep(chance.uniform(0, LONGEST_PAUSE_S))
        except BaseException as error:
            self._raised.append(error)

    def __enter__(self) -> _Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for error in self._raised:
            raise error


def _reading(names: list[str], make: Callable[[Any], torch.optim.Optimizer], steps: int, job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = make(model)
    # torch itself gives no two threads the same gradient at once: a read during a backward may end the process.
    quiet = threading.Lock()

    def guarded(name: str) -> Read:
        def read(model: Any, optimizer: torch.optim.Optimizer) -> object:
            with quiet if name == "gradients" else nullcontext():
                return READS[name](model, optimizer)

        return read

    reads = [] if job.alone else [guarded(name) for name in names]
    with _Readers(reads, model, optimizer, job.rank) as readers:
        for step in range(steps):
            with quiet:
                optimizer.zero_grad(set_to_none=step % 3 != 0)
                if step % 4 == 3:
                    with model.no_sync():
                        job.loss(model, 10 * step + 1).backward()
                loss = job.loss(model, step)
                loss.backward()
            time.sleep(0.001)  # readers come in between
            if step % 5 == 4:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            job.see_loss(loss)
            time.sleep(0.001)
    assert readers.count >= len(reads)


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


IN = (GRADIENTS, PARAMETERS, TURNS)
for _name in ("forwards", "checkpoints"):
    case(name=f"another thread reads: {_name}", only_in=IN, world_sizes=[2], devices=[CPU])(
        partial(_reading, [_name], sgd, STEPS)
    )
case(name="all kinds of readers at once", only_in=IN, devices=[CPU])(
    partial(_reading, list(READS), _adamw, STEPS)
)


def for_long(rank: int, world_size: int, mode: str) -> list[str]:
    """Many steps under readers of every kind, and of each by itself; returns what differs from training alone."""
    differ = []
    for names in [*([name] for name in READS), list(READS)]:
        alone, job = Job(ALONE, rank, world_size), Job(mode, rank, world_size)
        for training in (alone, job):
            _reading(names, _adamw, LONG_STEPS, training)
            training.finish()
        for what, value in job.seen.items():
            reference = alone.seen[what]
            if (value is None) != (reference is None) or (
                value is not None
                and reference is not None
                and not torch.allclose(value, reference, rtol=1e-9)
            ):
                differ.append(f"{what} under {', '.join(names)}")
    return differ
