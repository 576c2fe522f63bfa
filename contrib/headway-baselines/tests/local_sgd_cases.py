"""Ranks of the tests of local SGD, and what they are compared with: the same training in one process, by hand."""

from __future__ import annotations

import copy
import io
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.behaviour import pass_cases as float16
from tests.behaviour.settings_cases import asked_of, batch, imported, layers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.errors import HeadwayError, UnsupportedError
from headway.integrations import plan_injection
from headway.integrations.parallelize import parallelize
from headway.interop.settings.tools import settings_for
from headway.job import Job
from headway.passes.precision import Precision
from headway.plan import Plan
from headway.strategies.live.module_spec import model_spec
from headway_baselines.local_sgd.policy import LocalSGDStrategy
from headway_baselines.local_sgd.runtime import LocalSGD

STEPS, ROWS = 9, 5


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + rank)
    loss: torch.Tensor = model(torch.randn(ROWS, 7, generator=seed, dtype=torch.float64)).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"sgd": sgd, "adam": adam}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number, rank).backward()
    optimizer.step()


def values(model: nn.Module) -> list[list[float]]:
    return [each.detach().double().flatten().tolist() for each in model.state_dict().values()]


# One process -------------------------------------------------------------------------------------------


def alone(world_size: int, inner: str, options: dict[str, Any], finish: bool) -> list[list[list[float]]]:
    """What each rank holds after STEPS steps: ``world_size`` models in one process, averaged by hand."""
    strategy = LocalSGDStrategy(**options)
    models = [net() for _ in range(world_size)]
    optimizers = [INNER[inner](model) for model in models]
    begun_with = [p.detach().clone() for p in models[0].parameters()]
    velocity = [torch.zeros_like(p) for p in begun_with]

    def average() -> None:
        with torch.no_grad():
            if strategy.buffers == "averaged":
                for key in ("1.running_mean", "1.running_var"):
                    own = [model.state_dict()[key] for model in models]
                    mean = torch.stack(own).mean(0)
                    for each in own:
                        each.copy_(mean)
            for index, begin in enumerate(begun_with):
                copies: list[torch.Tensor] = [list(model.parameters())[index] for model in models]
                if strategy.moments == "averaged":
                    for key in ("exp_avg", "exp_avg_sq"):
                        states = [o.state[p][key] for o, p in zip(optimizers, copies, strict=True)]
                        mean = torch.stack(states).mean(0)
                        for state in states:
                            state.copy_(mean)
                result = torch.stack(copies).mean(0)
                if (outer := strategy.outer) is not None:
                    change = begin - result
                    velocity[index] = outer.momentum * velocity[index] + change
                    push = change + outer.momentum * velocity[index] if outer.nesterov else velocity[index]
                    result = begin - outer.learning_rate * push
                    begin.copy_(result)
                for each in copies:
                    each.copy_(result)

    for number in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, number, rank)
        if (number + 1) % strategy.steps == 0:
            average()
    if finish and STEPS % strategy.steps:
        average()
    return [values(model) for model in models]


# Ranks -------------------------------------------------------------------------------------------------


def wrapped_of(options: dict[str, Any], inner: str = "sgd") -> tuple[Any, torch.optim.Optimizer]:
    model = net()
    if dist.get_rank():  # rank 0's are taken over
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    optimizer = INNER[inner](model)
    plan = Plan.data_parallel(LocalSGDStrategy(**options), dist.get_world_size(), model_spec(model))
    return parallelize(model, optimizer, plan), optimizer


def trained(rank: int, _world_size: int, cases: list[tuple[str, dict[str, Any], bool]]) -> Any:
    found = []
    for inner, options, finish in cases:
        wrapped, optimizer = wrapped_of(options, inner)
        for number in range(STEPS):
            step(wrapped, optimizer, number, rank)
        if finish:
            wrapped.finish()
            wrapped.finish()  # nothing is left to do
        found.append(values(wrapped.module))
    return found


def as_others_do(rank: int, _world_size: int) -> dict[str, Any]:
    """H = 1 with SGD and stock DDP; H = 3 and torch's own post-local SGD."""
    found = {}
    for name, wrap in (
        ("ours 1", lambda: wrapped_of({"steps": 1, "buffers": "local"})),
        ("ours 3", lambda: wrapped_of({"steps": 3, "buffers": "local"})),
        ("ddp", _ddp),
        ("torch 3", _torchs),
    ):
        wrapped, optimizer = wrap()
        for number in range(STEPS):
            step(wrapped, optimizer, number, rank)
        found[name] = [p.detach().flatten().tolist() for p in wrapped.parameters()]
    return found


def _ddp() -> tuple[Any, torch.optim.Optimizer]:
    model = DistributedDataParallel(net(), broadcast_buffers=False)
    return model, sgd(model)


def _torchs() -> tuple[Any, Any]:
    """PyTorch's local SGD with a period of 3: its averager counts steps from 0, and averages at the first it may."""
    model = DistributedDataParallel(net(), broadcast_buffers=False)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    state = PostLocalSGDState(None, groups[dist.get_rank()], start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook)
    return model, PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=3, warmup_steps=2))


def restored(rank: int, _world_size: int) -> bool:
    """Whether a rank that goes on from a checkpoint in the middle of a period ends with the same bits."""
    options = {"steps": 3, "outer_optimizer": "sgd", "moments": "averaged"}
    first, optimizer = wrapped_of(options, "adam")
    for number in range(4):
        step(first, optimizer, number, rank)
    file = io.BytesIO()
    torch.save(first.checkpoint(), file)
    file.seek(0)
    second, other = wrapped_of(options, "adam")
    second.restore(torch.load(file, weights_only=True), other)
    for number in range(4, STEPS):
        step(first, optimizer, number, rank)
        step(second, other, number, rank)
    first.finish()
    second.finish()
    return values(first.module) == values(second.module) and second.iteration == STEPS


def state_of_another_run() -> dict[str, torch.Tensor]:
    model = net()
    optimizer = sgd(model)
    for number in range(4):
        step(model, optimizer, 50 + number, 7)
    return model.state_dict()


def load(wrapped: Any, via: str, state: dict[str, torch.Tensor]) -> None:
    """As a script does that loads a checkpoint after it has wrapped its model."""
    if via == "wrapper":
        wrapped.load_state_dict({f"module.{name}": value for name, value in state.items()})
    else:
        wrapped.module.load_state_dict(state)


def loaded(rank: int, _world_size: int) -> dict[str, Any]:
    """DiLoCo from a state that is loaded before it is wrapped, after that, and after a period of training."""
    state = state_of_another_run()
    found: dict[str, Any] = {}
    for when in ("before", "wrapper", "module", "late"):
        model = net()
        optimizer = sgd(model)
        if when == "before":
            model.load_state_dict(state)
        wrapped: Any = parallelize(model, optimizer, LocalSGDStrategy(steps=3, outer_optimizer="sgd"))
        if when == "late":
            for number in range(3):
                step(wrapped, optimizer, 90 + number, rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if when != "before":
                load(wrapped, when, state)
            for number in range(6):
                step(wrapped, optimizer, number, rank)
        found[when] = values(wrapped.module)
        found[f"said {when}"] = " ".join(str(each.message) for each in caught)
    return found


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is said to uses that would train wrongly."""
    found = {}

    def say(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except HeadwayError as error:
            found[name] = f"{type(error).__name__}: {error}"

    wrapped, optimizer = wrapped_of({"steps": 4})
    say("a scaler", lambda: _scaled(wrapped, optimizer))
    say("join", wrapped.join)
    say("a hook", lambda: wrapped.register_comm_hook(None, print))
    say("compile", wrapped.compile)
    say("an option", lambda: LocalSGD(net(), strategy=LocalSGDStrategy(), mixed_precision=object()))
    say("wrapped", lambda: LocalSGD(wrapped, strategy=LocalSGDStrategy()))
    say("no checkpoint", lambda: wrapped.restore({"kind": "another"}))
    for number in range(5):
        step(wrapped, optimizer, number, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped.checkpoint()
        copy.deepcopy(wrapped.module).state_dict()
        wrapped.module.state_dict()
        wrapped.state_dict()
    found["state"] = " ".join(str(each.message) for each in caught)

    def uneven() -> None:
        for _ in range(3 if rank else 2):
            step(wrapped, optimizer, 5, rank)
        wrapped.finish()

    say("uneven", uneven)
    other, another = wrapped_of({"steps": 1, "moments": "averaged"}, "adam" if rank else "sgd")
    say("another optimizer", lambda: step(other, another, 0, rank))
    say("another plan", lambda: wrapped_of({"steps": 2 + rank}))
    alone, its_own = wrapped_of({"steps": 1, "outer_optimizer": "sgd"})
    if rank == 0:
        load(alone, "module", state_of_another_run())
    say("loaded alone", lambda: step(alone, its_own, 0, rank))
    assert world_size > 1
    return found


def _scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0, 0)).backward()
    scaler.step(optimizer)


def unmodified(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A script that knows DistributedDataParallel alone, under a plan; recorded too."""
    plan = Plan.data_parallel(LocalSGDStrategy(steps=3), world_size, model_spec(net()))
    plan_injection.install(plan)
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    optimizer = sgd(model)
    with headway.record(Path(folder) / "trace", model, first_step=1, stop_step=8):
        for number in range(STEPS):
            with model.no_sync():
                loss_of(model, number, rank)
            step(model, optimizer, number, rank)
    plan_injection.uninstall()
    return {
        "followed": isinstance(model, LocalSGD), "names": list(model.state_dict()), "values": values(model.module)
    }  # fmt: skip


def bereft(rank: int, world_size: int) -> None:
    """The last rank is killed within a period; what the others see at its end."""
    wrapped, optimizer = wrapped_of({"steps": 4})
    try:
        for number in range(STEPS):
            if number == 5 and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step(wrapped, optimizer, number, rank)
    except HeadwayError as error:
        print(f"{type(error).__name__} {error}", flush=True)
        os._exit(3)


def exported(rank: int, _world_size: int) -> dict[str, list[list[float]]]:
    """Parameters of this rank after each step under torch's local SGD, as settings have it, and by hand."""
    asked = asked_of(layers(2), "local-sgd", {"steps": 3, "buffers": "local"})
    assert isinstance(asked.data, LocalSGDStrategy)
    defined = imported(settings_for("ddp", asked).files["ddp_settings.py"])
    wrapped = defined["wrap"](layers(2))
    optimizer = defined["wrap_optimizer"](torch.optim.SGD(wrapped.parameters(), lr=0.1))
    alone = layers(2)
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    found: dict[str, list[list[float]]] = {"torch": [], "by hand": []}
    for step in range(7):
        for model, one in ((wrapped, optimizer), (alone, own)):
            one.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            one.step()
        if asked.data.decide(Job.of(model_spec(alone), 2)).averages_after(step + 1):
            for parameter in alone.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
        found["torch"].append([float(p.sum()) for p in wrapped.parameters()])
        found["by hand"].append([float(p.sum()) for p in alone.parameters()])
    return found


def refused_in_float16(rank: int, world_size: int) -> str:
    """What local SGD says, whose ranks would leave out steps by themselves, where no plan has refused both."""
    inner = float16.model(plain=True).float()
    optimizer = float16.momentum(inner.parameters())
    del world_size
    Precision(dtype="float16").apply(inner, optimizer)
    wrapped = parallelize(inner, optimizer, LocalSGDStrategy())
    wrapped(float16.batches(rank, torch.float32)[0]).square().mean().backward()
    try:
        optimizer.step()
    except UnsupportedError as error:
        return str(error)
    return ""
