"""One rank of a case of time to a loss: for each seed and method a new model is trained, and looked at afterwards."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from decentralised_training.live import Coordinators, Trainer
from decentralised_training.losses import (
    CASES,
    METHODS,
    QUICK_METHODS,
    QUICK_RUN_S,
    QUICK_SEEDS,
    SLOW_RANK,
    LossCase,
)
from headway.demo.train_digits import convolutional_net
from headway.demo.train_gpt import CONTEXT, GPT, Sources

SWITCH_INTERVAL_S = 1e-4
LOOK_S = 0.25  # a copy of the model is kept so often
DIGITS_WIDTH, DIGITS_BATCH = 16, 16
GPT_WIDTH, GPT_DEPTH, GPT_BATCH = 64, 2, 8
HELD_OUT = 360  # digits nobody trains on; of text as many windows
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer: ``batch(rank, seed, iteration)`` is what a rank trains on."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    held_out: Batch
    optimizer: Callable[[nn.Module, float], Optimizer]  # with this learning rate
    samples: int


def digits() -> Task:
    """A convolutional net on scikit-learn's digits."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1) / 16)[order]
    labels = torch.tensor(loaded.target)[order]
    trained = len(labels) - HELD_OUT

    def batch(rank: int, seed: int, iteration: int) -> Batch:
        draw = torch.Generator().manual_seed(1_000_003 * seed + 10_007 * rank + iteration)
        chosen = torch.randint(trained, (DIGITS_BATCH,), generator=draw)
        return images[chosen], labels[chosen]

    return Task(
        lambda: convolutional_net(DIGITS_WIDTH), batch, (images[trained:], labels[trained:]),
        lambda module, rate: torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9), DIGITS_BATCH,
    )  # fmt: skip


def gpt() -> Task:
    """A small GPT on the standard library's sources."""
    windows: dict[tuple[int, int], Sources] = {}

    def batch(rank: int, seed: int, iteration: int) -> Batch:
        own = windows.setdefault((rank, seed), Sources(100 * seed + rank, 4096 * GPT_BATCH))
        rows = [own[(iteration * GPT_BATCH + each) % len(own)] for each in range(GPT_BATCH)]
        window = torch.stack(rows)
        return window[:, :-1], window[:, 1:]

    others = Sources(-1, HELD_OUT // 4)
    window = torch.stack([others[each] for each in range(len(others))])
    return Task(
        lambda: GPT(GPT_WIDTH, GPT_DEPTH), batch, (window[:, :-1], window[:, 1:]),
        lambda module, rate: torch.optim.AdamW(module.parameters(), lr=rate), GPT_BATCH * CONTEXT,
    )  # fmt: skip


TASKS = {"digits": digits, "gpt": gpt}


def loss_of(module: nn.Module, batch: Batch) -> torch.Tensor:
    """The cross entropy of a batch, a class a digit or a byte."""
    output = module(batch[0])
    return cross_entropy(output.flatten(0, -2), batch[1].flatten())


class Learning:
    """Iterations that compute real gradients and sleep for the rest of their time; keeps copies of the model."""

    def __init__(self, case: LossCase, task: Task, module: nn.Module, seed: int) -> None:
        self._case, self._task, self._module, self._seed = case, task, module, seed
        self._rank = dist.get_rank()
        self.begun_s = time.monotonic()
        self._iterations = 0
        self.looks: list[tuple[float, int, torch.Tensor]] = []  # seconds, iterations, the model
        self.computing_s: list[float] = []

    def step(self, wrapped: nn.Module, optimizer: Optimizer, iteration: int) -> None:
        begun, used = time.monotonic(), time.thread_time()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(wrapped, self._task.batch(self._rank, self._seed, iteration))
        lasts_s = self._case.step_s * self._case.situation.factor(self._rank, iteration, SLOW_RANK)
        # Before backward, in which all-reduces overlap with what is left of it: a third of the time, as forwards take.
        time.sleep(max(0.0, begun + lasts_s / 3 - time.monotonic()))
        middle = time.monotonic()
        loss.backward()
        self.computing_s.append(time.thread_time() - used)
        time.sleep(max(0.0, middle + 2 * lasts_s / 3 - time.monotonic()))
        optimizer.step()

    def look(self) -> None:
        """Keep a copy where it is time. Called after each iteration."""
        self._iterations += 1
        since = time.monotonic() - self.begun_s
        if len(self.looks) * LOOK_S <= since:
            self.looks.append((since, self._iterations, flat(self._module)))


def flat(module: nn.Module) -> torch.Tensor:
    """All parameters and statistics in one vector."""
    return torch.cat([each.detach().flatten().float() for each in _tensors(module)])


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *(each for each in module.buffers() if each.is_floating_point())]


def work(case_name: str, out: Path, *, quick: bool) -> None:
    """Run the case as one rank of the process group in the environment."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    dist.init_process_group("gloo")
    case = CASES[case_name]
    task = TASKS[case.model]()
    methods = [method for method in METHODS if not quick or method.name in QUICK_METHODS]
    coordinators = Coordinators()
    runs: list[dict[str, Any]] = []
    computing_s: list[float] = []
    seeds = QUICK_SEEDS if quick else case.seeds
    for number, seed in enumerate(seeds):
        shift = number * len(methods) // max(1, len(seeds))
        turns = [
            (each, rate) for each in (*methods[shift:], *methods[:shift]) for rate in case.rates(each.name)
        ]
        for method, rate in turns:
            strategy = method.options(1.0)[-1 if method.name == "parameter-server" else 0]
            torch.manual_seed(seed)
            module = task.make()
            learning = Learning(case, task, module, seed)
            trainer = Trainer(
                module, task.optimizer(module, rate), strategy, learning.step, case.hosts, coordinators
            )
            run = _run(case, task, trainer, learning, QUICK_RUN_S if quick else case.run_s)
            computing_s += learning.computing_s
            runs.append({"method": method.name, "seed": seed, "learning_rate": rate, **run})
            if dist.get_rank() == 0:
                print(f"{method.name} {seed} {rate:g}: {run['losses'][-1]:.3f}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        size_bytes = sum(p.numel() * 4 for p in module.parameters())
        ratio = size_bytes / (case.rate_mbit / 8e-6) / case.step_s
        shared = {"ratio_measured": ratio, "size_mib": size_bytes / 2**20, "rate_mbit": case.rate_mbit,
                  "step_ms": case.step_s * 1e3, "computing_ms": statistics.median(computing_s) * 1e3}  # fmt: skip
        out.write_text(json.dumps({"runs": runs, "shared": shared}))
    dist.barrier()
    coordinators.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _run(case: LossCase, task: Task, trainer: Trainer, learning: Learning, seconds: float) -> dict[str, Any]:
    """Train for about so long; the losses of the mean model meanwhile."""
    trainer.block(2, 0.0 if not trainer.by_itself else 2 * case.step_s)  # connections, the order of readiness
    steps = 0
    if not trainer.by_itself:
        probe = trainer.block(2, 0.0)
        step_s = torch.tensor([probe.ends_s[1] - probe.ends_s[0]])
        dist.all_reduce(step_s, dist.ReduceOp.MAX)
        steps = max(4, round(seconds / float(step_s)))
    dist.barrier()
    learning.begun_s = time.monotonic()
    learning.looks.clear()
    block = trainer.block(steps, seconds, learning.look)
    took_s = torch.tensor([block.ends_s[-1] - block.begin_s])
    counts = torch.tensor([float(len(block.ends_s))])
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    dist.all_reduce(counts)
    found = _losses(task, learning, float(took_s))
    trainer.close()
    return {**found, "iterations": float(counts), "seconds": float(took_s)}


def _losses(task: Task, learning: Learning, until_s: float) -> dict[str, Any]:
    """At every look the loss of the mean of all models, and all samples so far."""
    measured, (images, _) = task.make(), task.held_out
    del images
    times, losses, samples, apart = [], [], [], 0.0
    moments = [LOOK_S * number for number in range(1, int(until_s / LOOK_S) + 1)]
    for moment in moments:
        _, iterations, own = max(
            (look for look in learning.looks if look[0] <= moment),
            default=learning.looks[0],
            key=lambda look: look[0],
        )
        mean, total = own.clone(), torch.tensor([float(iterations)])
        dist.all_reduce(mean)
        dist.all_reduce(total)
        mean /= dist.get_world_size()
        distance = torch.stack([(own - mean).square().sum(), mean.square().sum()])
        dist.all_reduce(distance)
        apart = float((distance[0] / distance[1]).sqrt())
        times.append(moment)
        samples.append(float(total) * task.samples)
        losses.append(_loss(measured, mean, task.held_out) if dist.get_rank() == 0 else 0.0)
    return {"times_s": times, "losses": losses, "samples": samples, "apart": apart}


def _loss(module: nn.Module, values: torch.Tensor, held_out: Batch) -> float:
    place = 0
    with torch.no_grad():
        for tensor in _tensors(module):
            tensor.copy_(values[place : place + tensor.numel()].view_as(tensor))
            place += tensor.numel()
        module.eval()
        return float(loss_of(module, held_out))
