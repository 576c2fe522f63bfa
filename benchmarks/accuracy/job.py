"""One rank of a job: plan after plan on one model, each timed without a recorder; the base job also records and probes.

Layers are paced (`paced_training.paced`): parameters, gradients and messages are real, computation is asleep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paced_training.measuring import stolen_share, stolen_ticks
from paced_training.paced import PacedModel, Pacing
from paced_training.planned import end, settle
from torch import nn

import headway
from accuracy.configurations import BASE_LAB, BASE_PLAN, LABS, SLOW_BY, SLOW_RANK, Effort, Subject, plans_of
from headway import files
from headway.measuring.probe import probe_cluster
from headway.models.catalogue import MODELS
from headway.strategies.base import Strategy
from headway.strategies.registry import plugin_of

WARM_STEPS = 3
TRACE, PROBED = "trace", "probed.yaml"
SWITCH_INTERVAL_S = 1e-4


def work(model: str, lab_name: str, effort: Effort, folder: Path) -> None:
    """Run all plans of a model on a lab, as one rank of the process group in the environment."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    dist.init_process_group("gloo")
    subject, lab = Subject.of(model), LABS[lab_name]
    slow = lab.slow_rank and dist.get_rank() == SLOW_RANK
    dilation = subject.dilation * lab.compute * (SLOW_BY if slow else 1.0)
    plans = plans_of(subject, lab)
    if lab == BASE_LAB:
        stop_step = WARM_STEPS + effort.steps
        with headway.record(folder / TRACE, first_step=WARM_STEPS, stop_step=stop_step):
            _train(subject, dilation, plans[BASE_PLAN], stop_step)
        cluster = probe_cluster(busy_cores=False)
        if dist.get_rank() == 0:
            cluster.save(folder / PROBED)
    found: dict[str, dict[str, list[float]]] = {name: {"steps_ms": [], "stolen": []} for name in plans}
    for _ in range(effort.rounds):
        for name, strategy in plans.items():
            ticks = stolen_ticks()
            found[name]["steps_ms"] += _timed(subject, dilation, strategy, effort.steps)
            found[name]["stolen"].append(stolen_share(ticks, stolen_ticks()))
    if dist.get_rank() == 0:
        files.write_text(folder / f"{lab_name}.json", files.dump_json(found))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _training(
    subject: Subject, dilation: float, strategy: Strategy
) -> Iterator[tuple[PacedModel, nn.Module, Any]]:
    """The model, as it is wrapped, and its optimizer."""
    pacing = Pacing(scale=1 / subject.shrink, dilation=dilation, rank=dist.get_rank())
    model = PacedModel(MODELS[subject.model](), pacing)
    wrapped = plugin_of(strategy).wrap(model, strategy)
    yield model, wrapped, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    settle(wrapped)
    end(wrapped)


def _step(model: PacedModel, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = wrapped()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    model.clock.mark()
    optimizer.step()
    model.clock.mark()


def _train(subject: Subject, dilation: float, strategy: Strategy, steps: int) -> None:
    with _training(subject, dilation, strategy) as (model, wrapped, optimizer):
        model.clock.restart()
        for _ in range(steps):
            _step(model, wrapped, optimizer)


def _timed(subject: Subject, dilation: float, strategy: Strategy, steps: int) -> list[float]:
    """Milliseconds of every step, the mean over ranks."""
    with _training(subject, dilation, strategy) as (model, wrapped, optimizer):
        dist.barrier()
        model.clock.restart()
        for _ in range(WARM_STEPS):
            _step(model, wrapped, optimizer)
        moments = [time.perf_counter()]
        for _ in range(steps):
            _step(model, wrapped, optimizer)
            moments.append(time.perf_counter())
    taken = torch.tensor(moments, dtype=torch.float64).diff() * 1e3
    dist.all_reduce(taken)
    means: list[float] = (taken / dist.get_world_size()).tolist()
    return means
