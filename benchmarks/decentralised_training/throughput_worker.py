"""One rank of a case of throughput: probe, learn, try options, then all methods in turn; it writes what it did."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paced_training.jobs import PacedJob, optimizer_of
from paced_training.learned import Learned, learn, shared_from_rank_0
from paced_training.measuring import busiest_share, busy_share, cores_ticks
from paced_training.paced import PacedDevice, PacedLayer, PacedModel, Pacing
from torch import nn
from torch.optim import Optimizer

from decentralised_training.cases import (
    FACTORS,
    GTX_1080_TI,
    SITUATIONS,
    THROUGHPUT,
    PacedPlan,
    ThroughputCase,
)
from decentralised_training.live import Coordinators, Trainer
from decentralised_training.methods import METHODS, Method, is_partial
from headway.measuring.probe import probe_cluster
from headway.network.collective_costs import CANDIDATES, Effort, fitted, timings_of
from headway.strategies.base import Strategy

SWITCH_INTERVAL_S = (
    1e-4  # Python's default of 5 ms would stall whoever has threads of its own; the same for all
)
NEEDED = ("gloo_all_reduce", "ring", "servers")  # algorithms of the methods that are predicted
PROBE = Effort(
    tuple(each for each in CANDIDATES if each.name in NEEDED), {1_000: 10, 60_000: 4},
    repeats=3, most_repeats=5, longest_s=0.5, interference_rounds=1,
)  # fmt: skip
LINKS = replace(PROBE, candidates=())
ALONE = 8  # iterations that show what passes take, and how they differ by chance


@dataclass(frozen=True)
class Measuring:
    """How much is measured. Where ranks go by themselves a block lasts as long as the slowest takes for as many steps.

    Nothing shorter would do: at its beginning no link is busy, no group in flight and nobody waits for a straggler,
    and what is fast at first comes to wait.
    """

    rounds: int
    warm_steps: int
    steps: int
    steps_together: int  # where every rank waits for every other
    trial_steps: int
    shortest_s: float
    longest_s: float
    warm_s: float
    most_options: int | None = None
    only: tuple[str, ...] = ()


FULL = Measuring(
    rounds=2, warm_steps=2, steps=8, steps_together=4, trial_steps=1, shortest_s=12.0, longest_s=24.0, warm_s=6.0,
)  # fmt: skip
LONGEST_BY_CHANCE_S = 14.0
QUICK = Measuring(
    rounds=1, warm_steps=2, steps=6, steps_together=3, trial_steps=1, shortest_s=2.0, longest_s=8.0, warm_s=1.0,
    most_options=1,
    only=("all-reduce", "parameter-server", "ad-psgd", "static", "first-come", "inter-intra-stale"),
)  # fmt: skip


class SituatedDevice(PacedDevice):
    """A device that is slower by the factor of the iteration."""

    factor = 1.0

    def hold(self, seconds: float) -> None:
        super().hold(seconds * self.factor)


def paced_model(case: ThroughputCase, plan: PacedPlan, rank: int) -> tuple[PacedModel, SituatedDevice]:
    """The case's model, whose layers sleep."""
    pacing = Pacing(scale=1 / plan.shrink, dilation=plan.dilation, rank=rank)
    model, device = PacedModel(case.table, pacing, GTX_1080_TI), SituatedDevice()
    model.clock = device
    for layer in model.modules():
        if isinstance(layer, PacedLayer):
            layer.device = device
    return model, device


def work(case_name: str, folder: Path, *, quick: bool) -> None:
    """Run the case as one rank of the process group in the environment."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    dist.init_process_group("gloo")
    case, effort = THROUGHPUT[case_name], QUICK if quick else FULL
    plan, rank = case.plan(quick=quick), dist.get_rank()
    _say("probing")
    cluster = probe_cluster(busy_cores=False, effort=LINKS)
    timings = timings_of(cluster, busy_cores=False, effort=PROBE)
    _say("learning")
    learned, optimizer_s = _learned(case, plan, rank)
    coordinators = Coordinators()
    found = _measured(case, plan, effort, coordinators)
    found["rank"] = rank
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        cluster = fitted(cluster, timings, PROBE)  # here alone: ranks share cores
        cluster.save(folder / "cluster.yaml")
        (folder / "learned.json").write_text(
            json.dumps(
                {"spec": learned.spec.model_dump(mode="json"), "ready_s": learned.ready_s, "needed_s": learned.needed_s,
                 "optimizer_s": optimizer_s}
            )
        )  # fmt: skip
    dist.barrier()
    coordinators.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # channels and groups of several methods would wait for each other at length


def _learned(case: ThroughputCase, plan: PacedPlan, rank: int) -> tuple[Learned, float]:
    """What rank 0's steps without communication teach, and what an optimizer's step takes."""

    def make() -> nn.Module:
        return paced_model(case, plan, rank)[0]

    learned = shared_from_rank_0(learn(PacedJob(make, _loss, 1 / plan.shrink)))
    model = make()
    optimizer = optimizer_of(model.parameters())
    taken = []
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        begun = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - begun)
    return learned, statistics.median(taken)


def _say(what: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


def _loss(model: nn.Module, _step: int) -> torch.Tensor:
    loss: torch.Tensor = model()
    return loss


class Steps:
    """Iterations of one model, slowed as the case says; it takes the time of passes."""

    def __init__(self, case: ThroughputCase, model: PacedModel, device: SituatedDevice, rank: int) -> None:
        self._case, self._model, self._device, self._rank = case, model, device, rank
        self.passes_s: list[tuple[float, float]] = []

    def __call__(self, wrapped: nn.Module, optimizer: Optimizer, iteration: int) -> None:
        self._device.factor = self._case.situation.factor(self._rank, iteration)
        begun = time.perf_counter()
        loss = wrapped()
        middle = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._model.clock.mark()
        self.passes_s.append((middle - begun, time.perf_counter() - middle))
        optimizer.step()
        self._model.clock.mark()


def _measured(
    case: ThroughputCase, plan: PacedPlan, effort: Measuring, coordinators: Coordinators
) -> dict[str, Any]:
    trainers: dict[str, Trainer] = {}
    tried: dict[str, dict[str, float]] = {}
    errors: dict[str, str] = {}
    alone_s = _alone(case, plan)
    for method in METHODS:
        if effort.only and method.name not in effort.only:
            continue
        _say(method.name)
        try:
            trainers[method.name], tried[method.name] = _tuned(case, plan, method, effort, coordinators)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            errors[method.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        dist.barrier()
    steps_s = {name: _step_s(trainer, effort) for name, trainer in trainers.items()}
    if case.situation.by_chance:
        # Each block of a rank by itself, and all blocks together where ranks wait for each other, have every draw.
        effort = replace(
            effort, steps=FACTORS, steps_together=-(-FACTORS // effort.rounds), longest_s=LONGEST_BY_CHANCE_S
        )
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
    names = list(trainers)
    for number in range(effort.rounds):
        _say(f"round {number + 1}")
        shift = number * len(names) // effort.rounds
        for name in (*names[shift:], *names[:shift]):
            blocks[name].append(_block(trainers[name], effort, steps_s[name]))
    strategies = {name: _written(trainer.strategy) for name, trainer in trainers.items()}
    for trainer in trainers.values():
        trainer.close()
    return {"blocks": blocks, "tried": tried, "errors": errors, "strategies": strategies, "alone_s": alone_s}


def _written(strategy: Strategy) -> dict[str, Any]:
    return {"name": strategy.name, **strategy.model_dump(mode="json")}


def _alone(case: ThroughputCase, plan: PacedPlan) -> list[tuple[float, float]]:
    """Forward and backward of some iterations without communication, of which none is slowed."""
    model, device = paced_model(case, plan, dist.get_rank())
    steps = Steps(replace(case, situation=SITUATIONS["homogeneous"]), model, device, dist.get_rank())
    optimizer = optimizer_of(model.parameters())
    device.restart()
    for iteration in range(1 + ALONE):
        steps(model, optimizer, iteration)
    return steps.passes_s[1:]


def _trainer(
    case: ThroughputCase, plan: PacedPlan, strategy: Strategy, coordinators: Coordinators
) -> Trainer:
    rank = dist.get_rank()
    model, device = paced_model(case, plan, rank)
    steps = Steps(case, model, device, rank)
    trainer = Trainer(model, optimizer_of(model.parameters()), strategy, steps, case.hosts, coordinators)
    device.restart()
    return trainer


def _tuned(
    case: ThroughputCase, plan: PacedPlan, method: Method, effort: Measuring, coordinators: Coordinators
) -> tuple[Trainer, dict[str, float]]:
    """The fastest of a method's options, by some iterations of each."""
    options = method.options(1 / plan.shrink)[: effort.most_options]
    tried: dict[str, float] = {}
    best: tuple[float, Strategy] | None = None
    for strategy in options if len(options) > 1 else ():
        trainer = _trainer(case, plan, strategy, coordinators)
        block = trainer.block(1 + effort.trial_steps, 0.0)
        took = torch.tensor([(block.ends_s[-1] - block.ends_s[0]) / effort.trial_steps])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        trainer.close()
        tried[strategy.describe()] = round(float(took) * 1e3, 1)
        if best is None or float(took) < best[0]:
            best = float(took), strategy
    return _trainer(case, plan, options[0] if best is None else best[1], coordinators), tried


def _step_s(trainer: Trainer, effort: Measuring) -> float:
    """What the slowest rank takes for an iteration, about; meanwhile ranks connect, and DDP learns its order."""
    block = trainer.block(3, effort.warm_s)
    took_s = (block.ends_s[-1] - block.ends_s[0]) / max(1, len(block.ends_s) - 1) or effort.warm_s
    slowest_s = torch.tensor([took_s])
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    return float(slowest_s)


def _block(trainer: Trainer, effort: Measuring, step_s: float) -> dict[str, Any]:
    warm_s = max(effort.warm_steps * step_s, effort.warm_s)
    until_s = warm_s + min(max(effort.steps * step_s, effort.shortest_s), effort.longest_s)
    dist.barrier()
    device = getattr(trainer.module, "clock", None)
    if device is not None:
        device.restart()
    before, used = cores_ticks(), _cpu_s()
    steps = effort.steps if is_partial(trainer.strategy) else effort.steps_together
    block = trainer.block(effort.warm_steps + steps, until_s)
    after = cores_ticks()
    return {
        **asdict(block), "by_itself": trainer.by_itself, "warm_steps": effort.warm_steps, "warm_s": warm_s,
        "until_s": until_s, "cpu_s": _cpu_s() - used,
        "busiest_core": busiest_share(before, after), "busy_cores": busy_share(before, after),
    }  # fmt: skip


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
