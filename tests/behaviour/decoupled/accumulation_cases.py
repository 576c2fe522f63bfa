"""Cases: when gradients are summed, kept and cleared, and when the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import DDP, HANDED_OVER, TURNS, Job, case, mlp, sgd, state_of, train


@case()
def plain_training(job: Job) -> None:
    model = job.wrap(mlp())
    train(job, model, sgd(model), steps=6)


@case()
def accumulation_under_no_sync(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            for part in range(2):
                job.loss(model, 10 * step + part).backward()
        loss = job.loss(model, 10 * step + 2)
        loss.backward()
        optimizer.step()
        job.see_loss(loss)


@case()
def accumulation_with_every_backward_synchronised(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            loss = job.loss(model, 10 * step + part)
            loss.backward()
            job.see_loss(loss)
        optimizer.step()


@case()
def accumulation_of_both_kinds_with_reads_between(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        job.loss(model, 10 * step).backward()
        job.see("first", next(model.parameters()).grad)
        with model.no_sync():
            job.loss(model, 10 * step + 1).backward()
        job.loss(model, 10 * step + 2).backward()
        job.see("all", [p.grad for p in model.parameters()])
        job.loss(model, 10 * step + 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)


@case()
def gradients_are_never_cleared(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model, lr=0.02)
    for step in range(4):
        loss = job.loss(model, step)
        loss.backward()
        optimizer.step()
        job.see_loss(loss)


@case()
def no_sync_counts_where_forward_was(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            loss = job.loss(model, step)
        loss.backward()
        job.loss(model, step + 5).backward()
        optimizer.step()


@case()
def steps_without_a_backward_of_their_own(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        train(job, model, optimizer, 1, step)
        optimizer.step()  # again with the same gradients
        optimizer.zero_grad()
        optimizer.step()  # without gradients: nothing may move
        job.see("values", list(model.parameters()))
        optimizer.zero_grad(set_to_none=False)


@case()
def backward_whose_gradients_are_thrown_away(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        train(job, model, optimizer, 1, step)
        job.loss(model, 7).backward()
        optimizer.zero_grad()
        optimizer.step()
        job.loss(model, 8).backward()
        model.module[0].weight.grad = None
        optimizer.step()


@case()
def closures(job: Job) -> None:
    for make in (sgd, partial(torch.optim.Adam, lr=0.01)):
        model = job.wrap(mlp())
        optimizer: Any = make(model) if make is sgd else make(model.parameters())

        def closure(step: int, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = job.loss(model, step)
            loss.backward()
            return loss

        for step in range(3):
            job.see_loss(optimizer.step(partial(closure, step)))
        train(job, model, optimizer, 1, 9)
        job.see("state", state_of(optimizer))


def _by_hand(parameters: Any, set_to_none: bool) -> None:
    for parameter in parameters:
        parameter.grad = None if set_to_none else torch.zeros_like(parameter)


Clear = Callable[[Any, Any, bool], None]
CLEARS: dict[str, Clear] = {
    "optimizer": lambda _model, optimizer, to_none: optimizer.zero_grad(set_to_none=to_none),
    "model": lambda model, _optimizer, to_none: model.zero_grad(set_to_none=to_none),
    "module": lambda model, _optimizer, to_none: model.module.zero_grad(set_to_none=to_none),
    "hand": lambda model, _optimizer, to_none: _by_hand(model.parameters(), to_none),
}


def _clearing(clear: Clear, to_none: bool, job: Job) -> None:
    for moment in ("before backward", "after step"):
        model = job.wrap(mlp())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(3):
            loss = job.loss(model, step)
            if moment == "before backward":
                clear(model, optimizer, to_none)
            loss.backward()
            optimizer.step()
            if moment == "after step":
                clear(model, optimizer, to_none)
                job.see("cleared", [p.grad for p in model.parameters()])
            job.see_loss(loss)


for _who, _clear in CLEARS.items():
    for _to_none in (True, False):
        _script = partial(_clearing, _clear, _to_none)
        case(name=f"zero_grad by {_who}, {'to None' if _to_none else 'to zero'}", world_sizes=[2])(_script)


@case(not_in=[DDP, HANDED_OVER, TURNS])
def two_forwards_then_two_backwards(job: Job) -> None:
    """Stock DDP does not reduce the second backward."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        first, second = job.loss(model, step), job.loss(model, step + 20)
        first.backward()
        second.backward()
        optimizer.step()
        job.see_loss(first)


@case()
def several_forwards_before_one_backward(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        (job.loss(model, step) + 2 * job.loss(model, step + 20)).backward()
        optimizer.step()
        optimizer.zero_grad()
        job.loss(model, 30)  # thrown away
        with torch.no_grad():
            job.see_loss(job.loss(model, 31))
        loss = job.loss(model, step + 10)
        with torch.no_grad():
            job.see_loss(job.loss(model, 32))
        loss.backward()
        optimizer.step()
        job.see_loss(loss)


@case()
def forwards_that_learn_nothing_between_steps(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    contexts: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode, torch.enable_grad]
    for step in range(4):
        train(job, model, optimizer, 1, step)
        for context in contexts[step % 3 :] + contexts[: step % 3]:
            model.eval()
            with context():
                job.see_loss(job.loss(model, 50))
                job.see_loss(job.loss(model.module, 51))
            model.train()
            with context():
                job.see_loss(job.loss(model, 52))


@case()
def evaluation_on_the_first_rank_only(job: Job) -> None:
    """As scripts do it: through the bare module, since rank 0 would be alone in the wrapper's collectives."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        train(job, model, optimizer, 1, step)
        if job.is_rank(0):
            model.module.eval()
            with torch.no_grad():
                x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
                job.see("evaluated", model.module(x))
            model.module.train()
