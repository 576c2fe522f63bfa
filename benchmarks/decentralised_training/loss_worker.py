"""One rank of a case of time to a loss: for each seed and method a new model is trained, and looked at afterwards."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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
from decentralised_training.tasks import TASKS, Task, held_out_loss, loss_of, tensors_of

SWITCH_INTERVAL_S = 1e-4
LOOK_S = 0.25  # a copy of the model is kept so often


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
    return torch.cat([each.detach().flatten().float() for each in tensors_of(module)])


def _parts(task: Task, values: torch.Tensor) -> list[torch.Tensor]:
    """What ``flat`` of a model of ``task`` has put together."""
    tensors = tensors_of(task.make())
    parts = values.split([each.numel() for each in tensors])
    return [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]


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
        losses.append(held_out_loss(task, _parts(task, mean)) if dist.get_rank() == 0 else 0.0)
    return {"times_s": times, "losses": losses, "samples": samples, "apart": apart}
