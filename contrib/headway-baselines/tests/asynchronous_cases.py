"""Ranks of the tests of asynchronous servers, and a single process that applies the updates that servers logged."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.errors import HeadwayError
from headway.integrations import plan_injection
from headway.integrations.parallelize import parallelize
from headway.job import Job
from headway.plan import Plan
from headway.strategies.live.module_spec import model_spec
from headway_baselines.asynchronous_servers.policy import AsynchronousServersStrategy
from headway_baselines.asynchronous_servers.runtime import AsynchronousServers
from headway_baselines.asynchronous_servers.shard import Update
from local_sgd_cases import (
    STEPS,
    adam,
    load,
    loss_of,
    net,
    sgd,
    state_of_another_run,
    step,
    values,
)

LIMIT_S = 4.0  # of the group, where a rank serves for longer


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    weights, rest = (
        [p for name, p in model.named_parameters() if (name == "3.weight") is chosen]
        for chosen in (True, False)
    )
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": weights, "weight_decay": 0.1, "lr": 0.1}]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.9, nesterov=True)


def many_groups(model: nn.Module) -> torch.optim.Optimizer:
    """A group for each parameter, and options that take more than 64 KiB."""
    groups = [{"params": [p], "name": name + " " * 20_000} for name, p in model.named_parameters()]
    return torch.optim.SGD(groups, lr=0.2)


INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd, "adam": adam, "momentum": momentum, "groups": many_groups
}  # fmt: skip


def rate(number: int) -> float:
    """A schedule of learning rates: servers have to follow it."""
    return 0.1 / (1 + number)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = rate(number)
        step(model, optimizer, number, rank)


def wrapped_of(inner: str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = net()
    optimizer = INNER[inner](model)
    strategy = AsynchronousServersStrategy(**options)
    return parallelize(
        model, optimizer, Plan.data_parallel(strategy, dist.get_world_size(), model_spec(model))
    ), optimizer


def alone(inner: str) -> list[list[float]]:
    model = net()
    train(model, INNER[inner](model), 0, STEPS)
    return values(model)


def trained(rank: int, world_size: int, inner: str, bound: int | None) -> dict[str, Any]:
    """Train, the higher ranks fewer steps; what ranks end with, and what this rank's server was told in which order."""
    wrapped, optimizer = wrapped_of(inner, staleness=bound)
    log: list[Update] = []
    wrapped.shard.observer = log.append
    steps = STEPS - rank
    train(wrapped, optimizer, rank, steps)
    wrapped.finish()
    wrapped.finish()
    stale = wrapped.staleness
    return {
        "log": [[each.worker, each.iteration, each.read, each.version] for each in log],
        "values": values(wrapped.module), "staleness": [stale.mean, stale.most, stale.pushes], "steps": steps,
        "alone": alone(inner) if world_size == 1 else None,  # in this process: its threads round as they do
    }  # fmt: skip


def loaded(_rank: int, _world_size: int) -> dict[str, Any]:
    """From a state that is loaded before the model is wrapped, and after."""
    state, found = state_of_another_run(), {}
    model = net()
    model.load_state_dict(state)
    train(model, momentum(model), 0, STEPS)
    found["alone"] = values(model)
    for via in ("wrapper", "module"):
        wrapped, optimizer = wrapped_of("momentum")
        load(wrapped, via, state)
        train(wrapped, optimizer, 0, STEPS)
        wrapped.finish()
        found[via] = values(wrapped.module)
        load(wrapped, via, state)  # training is over
    return found


def loaded_alone(rank: int, _world_size: int) -> str:
    """What is said where rank 0 alone loads a state."""
    wrapped, optimizer = wrapped_of("sgd")
    if rank == 0:
        load(wrapped, "wrapper", state_of_another_run())
    try:
        step(wrapped, optimizer, 0, rank)
    except HeadwayError as error:
        return str(error)
    finally:
        dist.barrier()  # the other has been answered
        wrapped._part.close()
    return ""


def late(rank: int, _world_size: int, early: int) -> list[list[float]]:
    """Ranks below ``early`` make no step."""
    wrapped, optimizer = wrapped_of("sgd")
    train(wrapped, optimizer, rank, 0 if rank < early else STEPS)
    wrapped.finish()
    return values(wrapped.module)[:1]


def ends_early(rank: int, _world_size: int) -> None:
    """Rank 0 ends after three steps, and the other trains on once the group's time limit has passed."""
    wrapped, optimizer = wrapped_of("sgd")
    for number in range(STEPS):
        if rank == 0 and number == 3:
            wrapped._part._end()  # as at the end of the interpreter
            os._exit(0)
        if rank == 1 and number == 4:
            time.sleep(LIMIT_S + 1)
        step(wrapped, optimizer, number, rank)
    print("trained to the end", flush=True)
    os._exit(0)


def unfinished(rank: int, _world_size: int) -> None:
    """Rank 0 is killed, and the other calls ``finish()``."""
    wrapped, optimizer = wrapped_of("sgd")
    step(wrapped, optimizer, 0, rank)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        wrapped.finish()
    except HeadwayError as error:
        print(f"{type(error).__name__} {error}", flush=True)
    os._exit(3)


def replayed(inner: str, logs: Sequence[Sequence[Sequence[int]]]) -> list[list[float]]:
    """The parameters after the updates that servers logged, in one process: ``logs[server]`` in their order.

    Each gradient is computed with the versions of all shards that its worker had read.
    """
    models, count = [net() for _ in logs], len(logs)
    optimizers = [INNER[inner](model) for model in models]  # those of a server are right in its shard alone
    shards = AsynchronousServersStrategy().decide(Job.of(model_spec(models[0]), count)).shards
    histories = [[_copy(model)] for model in models]
    reads = {
        (worker, iteration, server): read
        for server, log in enumerate(logs)
        for worker, iteration, read, _ in log
    }
    workers = [net() for _ in logs]
    gradients: dict[tuple[int, int], Mapping[str, torch.Tensor]] = {}
    left = [list(log) for log in logs]
    while any(left):
        progressed = False
        for server in range(count):
            if not left[server]:
                continue
            worker, iteration, _, version = left[server][0]
            if (worker, iteration) not in gradients:
                needed = [reads[worker, iteration, each] for each in range(count)]
                if any(version >= len(own) for version, own in zip(needed, histories, strict=True)):
                    continue
                at = [own[version] for version, own in zip(needed, histories, strict=True)]
                gradients[worker, iteration] = _gradients(workers[worker], shards, at, worker, iteration)
            for name, parameter in models[server].named_parameters():
                parameter.grad = gradients[worker, iteration][name].clone()
            optimizers[server].param_groups[0]["lr"] = rate(iteration - 1)
            optimizers[server].step()
            assert version == len(histories[server]) - 1
            histories[server].append(_copy(models[server]))
            left[server].pop(0)
            progressed = True
        assert progressed, "gradients of parameters that nobody held"
    _load(workers[0], shards, [own[-1] for own in histories])
    return [p.detach().flatten().tolist() for p in workers[0].parameters()]


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _load(model: nn.Module, shards: Any, at: Sequence[Mapping[str, torch.Tensor]]) -> None:
    with torch.no_grad():
        own = dict(model.named_parameters())
        for parts, held in zip(shards, at, strict=True):
            for part in parts:
                where = slice(part.start, part.end)
                own[part.parameter].view(-1)[where] = held[part.parameter].view(-1)[where]


def _gradients(
    model: nn.Module, shards: Any, at: Sequence[Mapping[str, torch.Tensor]], worker: int, iteration: int
) -> Mapping[str, torch.Tensor]:
    _load(model, shards, at)
    model.zero_grad()
    loss_of(model, iteration - 1, worker).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def unmodified(rank: int, world_size: int) -> dict[str, Any]:
    """A script that knows DistributedDataParallel alone; a rank that ends first serves the other."""
    plan = Plan.data_parallel(AsynchronousServersStrategy(), world_size, model_spec(net()))
    plan_injection.install(plan)
    model: Any = DistributedDataParallel(net())
    optimizer = sgd(model)
    for number in range(3 if rank == 0 else STEPS):
        step(model, optimizer, number, rank)
    plan_injection.uninstall()
    part = model._part
    part._end()  # as at the end of the interpreter, which ranks of tests do not come to
    return {"followed": isinstance(model, AsynchronousServers), "iteration": model.iteration}


def refused(rank: int, _world_size: int) -> dict[str, str]:
    """What is said to uses that would train wrongly."""
    found = {}

    def say(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except HeadwayError as error:
            found[name] = f"{type(error).__name__}: {error}"

    wrapped, optimizer = wrapped_of("sgd")

    def closure() -> torch.Tensor:
        loss: torch.Tensor = wrapped(torch.ones(4, 7, dtype=torch.float64)).sum()
        loss.backward()
        return loss

    load(wrapped, "module", net().state_dict())
    say("closure", lambda: optimizer.step(closure))  # type: ignore[arg-type]
    other, _ = wrapped_of("sgd")
    whole = torch.optim.LBFGS(other.parameters())
    say("optimizer", lambda: whole.step(lambda: torch.zeros(())))
    third: Any = net()
    say("some", lambda: parallelize(third, torch.optim.SGD([third[3].weight]), AsynchronousServersStrategy()))
    odd = torch.optim.SGD([{"params": list(third.parameters()), "kind": object()}])
    say("option", lambda: parallelize(third, odd, AsynchronousServersStrategy()))
    for name, fused in (("fused", True), ("not fused", False)):
        scaled = net()
        inner = torch.optim.SGD(scaled.parameters(), lr=0.1, fused=fused)
        wrapped_scaled = parallelize(scaled, inner, AsynchronousServersStrategy())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(wrapped_scaled, 0, rank)).backward()
        say(name, lambda scaler=scaler, inner=inner: scaler.step(inner))  # type: ignore[misc]
        headway.finish(wrapped_scaled)
    fourth, its_own = wrapped_of("momentum")
    step(fourth, its_own, 0, rank)
    say("load", lambda: load(fourth, "wrapper", net().state_dict()))
    copy.deepcopy(fourth.module).load_state_dict(net().state_dict())
    whole_run = momentum(ordinary := net())
    step(ordinary, whole_run, 0, rank)
    fifth, fresh = wrapped_of("momentum")
    fresh.load_state_dict(whole_run.state_dict())
    say("optimizer state", lambda: step(fifth, fresh, 0, rank))
    for each in (wrapped, other, fourth, fifth):
        each.finish() if each.shard.has_begun else each._part.close()
    return found


def bereft(rank: int, world_size: int) -> None:
    """The last rank is killed; what the others see."""
    wrapped, optimizer = wrapped_of("sgd")
    try:
        for number in range(10_000):
            if number == 3 and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step(wrapped, optimizer, number, rank)
    except HeadwayError as error:
        print(f"{type(error).__name__} {error}", flush=True)
        os._exit(3)


def bounded(rank: int, _world_size: int) -> list[list[int]]:
    """With a bound of one iteration; rank 1 waits before its third step until the other can go no further."""
    wrapped, optimizer = wrapped_of("sgd", staleness=1)
    seen: list[list[int]] = []
    clocks = [0, 0]

    def observe(update: Update) -> None:
        clocks[update.worker] = update.iteration
        seen.append(list(clocks))
        if rank == 0 and clocks == [4, 2]:
            store.set("ahead", "")

    store = dist.distributed_c10d._get_default_store()
    wrapped.shard.observer = observe
    for number in range(6):
        if rank == 1 and number == 2:
            store.wait(["ahead"])
        step(wrapped, optimizer, number, rank)
    wrapped.finish()
    return seen
