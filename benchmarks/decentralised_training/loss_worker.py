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
from decentralised_training.looks import Looks
from decentralised_training.losses import (
    CASES,
    METHODS,
    QUICK_METHODS,
    QUICK_RUN_S,
    QUICK_SEEDS,
    SLOW_RANK,
    LossCase,
)
from decentralised_training.tasks import TASKS, Task, loss_of

SWITCH_INTERVAL_S = 1e-4


class Learning:
    """Iterations that compute real gradients and sleep for the rest of their time."""

    def __init__(self, case: LossCase, task: Task, seed: int) -> None:
        self._case, self._task, self._seed = case, task, seed
        self._rank = dist.get_rank()
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
            learning, looks = Learning(case, task, seed), Looks(module)
            trainer = Trainer(
                module, task.optimizer(module, rate), strategy, learning.step, case.hosts, coordinators
            )
            found = _run(case, trainer, looks, QUICK_RUN_S if quick else case.run_s)
            found |= looks.found(task, found["seconds"], out.parent)
            trainer.close()
            computing_s += learning.computing_s
            runs.append({"method": method.name, "seed": seed, "learning_rate": rate, **found})
            if dist.get_rank() == 0:
                print(
                    f"{method.name} {seed} {rate:g}: {found['losses'][-1]:.3f}", file=sys.stderr, flush=True
                )
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


def _run(case: LossCase, trainer: Trainer, looks: Looks, seconds: float) -> dict[str, Any]:
    """Train for about so long: how many iterations all ranks made, and in which time."""
    trainer.block(2, 0.0 if not trainer.by_itself else 2 * case.step_s)  # connections, the order of readiness
    steps = 0
    if not trainer.by_itself:
        probe = trainer.block(2, 0.0)
        step_s = torch.tensor([probe.ends_s[1] - probe.ends_s[0]])
        dist.all_reduce(step_s, dist.ReduceOp.MAX)
        steps = max(4, round(seconds / float(step_s)))
    dist.barrier()
    looks.begin()
    block = trainer.block(steps, seconds, looks.look)
    took_s = torch.tensor([block.ends_s[-1] - block.begin_s])
    counts = torch.tensor([float(len(block.ends_s))])
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    dist.all_reduce(counts)
    return {"iterations": float(counts), "seconds": float(took_s)}
