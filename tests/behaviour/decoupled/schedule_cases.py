"""Cases: hyper-parameters that differ between groups and change over time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import DDP, Job, case, mlp, sgd, state_of, train
from torch.optim import lr_scheduler

Make = Callable[[Any], Any]
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.01)
SCHEDULES: dict[str, tuple[Make, Make]] = {
    "StepLR": (MOMENTUM, lambda o: lr_scheduler.StepLR(o, 1, 0.5)),
    "LambdaLR": (ADAM, lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0 / (epoch + 1))),
    "OneCycleLR": (ADAM, lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=9)),  # betas as well
    "OneCycleLR of momentum": (MOMENTUM, lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=9)),
    "warm-up then cosine": (MOMENTUM, lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    )),
}  # fmt: skip


def _groups(model: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]


@case()
def groups_with_different_settings(job: Job) -> None:
    settings: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.3, "nesterov": True}),
        (torch.optim.AdamW, {"lr": 0.01}, {"betas": (0.5, 0.7), "amsgrad": True}),
    ]
    for make, common, special in settings:
        model = job.wrap(mlp())
        first, second = _groups(model)
        optimizer = make([first, {**second, **special}], **common)
        train(job, model, optimizer, 4)
        job.see("state", state_of(optimizer))


def _scheduled(optimizer_of: Make, make: Make, when: str, job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = optimizer_of(_groups(model))
    scheduler = make(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss = job.loss(model, step)
        loss.backward()
        if when == "before step" and step:  # the wrong order, as many scripts have it
            scheduler.step()
        optimizer.step()
        if when == "after step":
            scheduler.step()
        job.see_loss(loss)
    job.see("rates", scheduler.get_last_lr())


for _name, _pair in SCHEDULES.items():
    for _when in ("after step", "before step"):
        case(name=f"{_name} {_when}", world_sizes=[2])(partial(_scheduled, *_pair, _when))


@case()
def plateau_scheduler_that_reads_the_loss(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.2)
    for step in range(5):
        optimizer.zero_grad()
        loss = job.loss(model, step)
        loss.backward()
        optimizer.step()
        scheduler.step(job.mean(loss).item())
        job.see("rate", optimizer.param_groups[0]["lr"])


@case()
def scheduler_made_after_training_began(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    train(job, model, optimizer, 2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        train(job, model, optimizer, 1, step)
        scheduler.step()


@case()
def settings_changed_right_after_the_step(job: Job) -> None:
    """What was stepped keeps the values of its step."""
    changes: dict[str, Any] = {"lr": 1000.0, "momentum": 0.1, "weight_decay": 5.0, "nesterov": False}
    model = job.wrap(mlp())
    optimizer = sgd(model, nesterov=True, weight_decay=0.01)
    group = optimizer.param_groups[0]
    for step in range(3):
        usual = {name: group[name] for name in changes}
        train(job, model, optimizer, 1, step)
        group.update(changes)
        job.see("values", list(model.parameters()) if step == 1 else [])
        group.update(usual)
        train(job, model, optimizer, 1, step + 10)
        group["lr"] *= 0.5


@case()
def rate_that_is_a_tensor(job: Job) -> None:
    model = job.wrap(mlp())
    rate = torch.tensor(0.01, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=0.1)
    for step in range(4):
        train(job, model, optimizer, 1, step)
        rate.mul_(0.5)  # right after the step, in place


@case()
def group_added_while_training(job: Job) -> None:
    model = job.wrap(mlp())
    first, *others = model.parameters()
    optimizer = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    train(job, model, optimizer, 2)
    first.grad = None
    optimizer.add_param_group({"params": [first], "lr": 0.02, "momentum": 0.5})
    train(job, model, optimizer, 3)
    job.see("state", state_of(optimizer))


@case()
def group_added_right_after_backward(job: Job) -> None:
    model = job.wrap(mlp())
    first, *others = model.parameters()
    optimizer = torch.optim.Adam(others, lr=0.01)
    for step in range(4):
        model.zero_grad()
        job.loss(model, step).backward()
        if step == 2:
            optimizer.add_param_group({"params": [first], "lr": 0.05})
        optimizer.step()
    job.see("state", state_of(optimizer))


@case()
def optimizer_state_loaded_while_training(job: Job) -> None:
    for make in (partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.01)):
        model = job.wrap(mlp())
        optimizer = make(model.parameters())
        train(job, model, optimizer, 2)
        kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(job, model, optimizer, 2, 2)
        optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
        train(job, model, optimizer, 2, 4)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
        train(job, model, optimizer, 1, 6)
        job.loss(model, 7).backward()
        optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))  # between backward and step
        optimizer.step()
        job.see("state", state_of(optimizer))


@case(not_in=[DDP])  # which has to be wrapped anew where others are trained
def optimizer_state_loaded_before_others_are_trained(job: Job) -> None:
    """Buckets change before the optimizer has stepped with what was loaded."""
    model = job.wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(job, model, optimizer, 2)
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(job, model, optimizer, 2, 2)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    train(job, model, optimizer, 2, 4)
    frozen.requires_grad_(True)
    train(job, model, optimizer, 2, 6)
    job.see("state", state_of(optimizer))


@case()
def optimizer_replaced_while_training(job: Job) -> None:
    model = job.wrap(mlp())
    for make in (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adam, lr=0.01),
        partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    ):
        optimizer = make(model.parameters())
        train(job, model, optimizer, 2)
        job.see("state", state_of(optimizer))


@case()
def optimizer_state_changed_by_hand(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        train(job, model, optimizer, 1, step)
        job.see("moment", optimizer.state[model.module[5].weight]["exp_avg"])
        train(job, model, optimizer, 1, step + 10)
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        train(job, model, optimizer, 1, step + 20)
    optimizer.state.clear()
    train(job, model, optimizer, 2)
    job.see("state", state_of(optimizer))


@case()
def two_optimizers_for_one_model(job: Job) -> None:
    model = job.wrap(mlp())
    parameters = list(model.parameters())
    one = torch.optim.SGD(parameters[::2], lr=0.1, momentum=0.9)
    two = torch.optim.Adam(parameters[1::2], lr=0.01)
    for step in range(4):
        model.zero_grad()
        loss = job.loss(model, step)
        loss.backward()
        one.step()
        if step == 2:
            job.see("values", parameters)
        two.step()
        job.see_loss(loss)
    job.see("states", [state_of(one), state_of(two)])


@case()
def optimizers_that_step_alone_and_then_in_turn(job: Job) -> None:
    model = job.wrap(mlp())
    parameters = list(model.parameters())
    one = torch.optim.Adam(parameters[::2], lr=0.01)
    two = torch.optim.Adam(parameters[1::2], lr=0.01)
    for step, stepped in enumerate([(one,), (two,), (two,), (one, two), (two, one), (one, two)]):
        model.zero_grad()
        job.loss(model, step).backward()
        for optimizer in stepped:
            optimizer.step()
        engine = getattr(
            model, "engine", None
        )  # of the decoupled wrapper, which the reference knows nothing of
        if len(stepped) == 2 and engine is not None:
            assert "gradients" in (engine.schedule.gather, engine.settlement.needs_gradients and "gradients")
    job.see("states", [state_of(one), state_of(two)])


@case()
def two_optimizers_over_the_same_parameters(job: Job) -> None:
    model = job.wrap(mlp())
    one, two = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        model.zero_grad()
        job.loss(model, step).backward()
        one.step()
        two.step()
    job.see("state", state_of(two))


@case()
def one_optimizer_for_wrapped_and_other_parameters(job: Job) -> None:
    first, second = job.wrap(mlp()), job.wrap(mlp(1))
    own = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), own], lr=0.05, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        x, y = job.batch(step)
        torch.nn.functional.mse_loss(second(torch.cat([first(x), first(x).tanh()], 1)), y).backward()
        (own * 2).sum().backward()
        optimizer.step()
        job.see("own", own)


def _halves(reduce_scatter: str, all_gather: str, job: Job) -> None:
    model = job.wrap(mlp(), decision={"reduce_scatter": reduce_scatter, "all_gather": all_gather})
    train(job, model, sgd(model), 4)


for _halves_of in (("native", "native"), ("ring", "native"), ("native", "ring")):
    case(name=f"reduce-scatter {_halves_of[0]}, all-gather {_halves_of[1]}")(partial(_halves, *_halves_of))
