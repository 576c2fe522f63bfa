"""Cases: ways that scripts have of their own with gradients, steps and modules, and that stock DDP takes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import (
    CPU,
    DDP,
    GRADIENTS,
    PARAMETERS,
    WIDTH,
    Job,
    Share,
    case,
    mlp,
    rows,
    sgd,
    train,
)
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call, grad, vmap


@case()
def gradients_cleared_through_data(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.zero_()
        loss = job.loss(model, step)
        loss.backward()
        optimizer.step()
        job.see_loss(loss)


@case()
def gradients_scaled_through_data_between_backwards(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        job.loss(model, 10 * step).backward()
        for p in model.parameters():
            p.grad.data.mul_(0.5)
        job.loss(model, 10 * step + 1).backward()
        optimizer.step()


@case()
def one_rank_differentiates_the_bare_module(job: Job) -> None:
    """Saliency maps of rank 0: nobody else takes part in that backward."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        train(job, model, optimizer, 1, start=step)
        if job.is_rank(0):
            x = rows(2, 50 + step)[0].requires_grad_()
            model.module(x)[0, 1].backward()
            optimizer.zero_grad()
    optimizer.zero_grad()


def _compared(through_wrapper: bool, find_unused: bool, job: Job) -> None:
    """A script keeps gradients it has looked at while it differentiates another loss, whose gradients are its own."""
    model = job.wrap(mlp(), find_unused_parameters=find_unused)
    optimizer = sgd(model)
    parameters = list(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for number in range(1 + step % 2):
            job.loss(model, 10 * step + number).backward()
        kept = [p.grad for p in parameters]
        x, y = rows(2, 50 + step)
        other = nn.functional.mse_loss((model if through_wrapper else model.module)(x), y)
        others = torch.autograd.grad(other, parameters)
        job.see("products", [(one * another).sum() for one, another in zip(kept, others, strict=True)])
        if step == 2:
            job.loss(model, 40).backward()  # and accumulates onto what it kept
        optimizer.step()


for _other, _through_wrapper, _find_unused in (
    ("the bare module", False, False), ("the wrapper", True, False), ("a wrapper that finds unused", True, True)
):  # fmt: skip
    case(name=f"gradients compared with those of {_other}")(
        partial(_compared, _through_wrapper, _find_unused)
    )


@case()
def a_forward_under_no_sync_concurrent_with_another(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss = job.loss(model, step)
        with model.no_sync():
            other = job.loss(model, 20 + step)
        (loss + other if step % 2 else loss).backward()
        optimizer.step()
        job.see_loss(loss)


@case()
def a_forward_that_is_given_up(job: Job) -> None:
    """The next backward is reduced because of it, as under DDP, although it is of a forward under no_sync."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        job.see_loss(job.loss(model, 30 + step))
        with model.no_sync():
            job.loss(model, 10 * step).backward()
        job.loss(model, 10 * step + 1).backward()
        optimizer.step()


@case(devices=(CPU,))
def an_optimizer_sharded_by_zero(job: Job) -> None:
    model = job.wrap(mlp())
    adam = torch.optim.Adam
    optimizer = (
        adam(model.parameters(), lr=0.01)
        if job.alone
        else ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adam, lr=0.01)
    )
    train(job, model, optimizer, 4)


def _local_steps(closures: bool, job: Job) -> None:
    """Local SGD: ranks step by themselves under no_sync, and the script averages parameters; then all step together."""
    model = job.wrap(mlp())
    others = [mlp() for _ in job.shares(0)[1:]]
    optimizer = sgd(model, momentum=0)
    steppers = [optimizer, *(sgd(other, momentum=0) for other in others)]
    for step in range(6):
        for share, one, stepper in zip(job.shares(step), [model, *others], steppers, strict=True):

            def backward(share: Share = share, one: Any = one, stepper: Any = stepper) -> torch.Tensor:
                stepper.zero_grad()
                with model.no_sync():
                    loss = nn.functional.mse_loss(one(share.x), share.y)
                    loss.backward()
                return loss

            if closures:
                stepper.step(backward)
            else:
                backward()
                stepper.step()
        if step % 2:
            for same in zip(*(one.parameters() for one in [model, *others]), strict=True):
                average = job.mean(torch.stack([p.data for p in same]).mean(0))
                for p in same:
                    p.data.copy_(average)
    optimizer.zero_grad()
    train(job, model, optimizer, 2)


for _closures in (False, True):
    case(devices=(CPU,), name=f"local steps{' of closures' if _closures else ''} and averages of parameters")(
        partial(_local_steps, _closures)
    )


@case(devices=(CPU,))
def transforms_of_functions(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    x = rows(4, 7)[0]

    def loss_of(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = functional_call(model.module, parameters, (x,)).square().mean()
        return result

    train(job, model, optimizer, 2)
    job.see("by parameter", grad(loss_of)(dict(model.module.named_parameters()), x))
    train(job, model, optimizer, 1, start=2)
    job.see("by input", grad(lambda x: model.module(x).square().mean())(x))
    train(job, model, optimizer, 1, start=3)
    samples = vmap(grad(loss_of), in_dims=(None, 0))
    job.see("by sample", samples({n: p.detach() for n, p in model.module.named_parameters()}, x[:, None]))


class Counting(nn.Module):
    """A model with a buffer of which each rank would have its own."""

    seen: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x) * (1 + 0.1 * self.seen)  # rank 0's, which has been broadcast
        self.seen += 1 + self.rank
        return result


@case()
def a_join_that_is_switched_off(job: Job) -> None:
    model = job.wrap(Counting(0 if job.alone else job.rank))
    optimizer = sgd(model)
    with nullcontext() if job.alone else model.join(enable=False):
        train(job, model, optimizer, 3)
    train(job, model, optimizer, 2, start=3)
    if job.mode in (GRADIENTS, PARAMETERS):
        assert model.uneven is None
        assert model.schedule.gather == job.mode
        assert model.engine.reducer.divisor == job.world_size


def _penalty(model: Any) -> torch.Tensor:
    return 0.1 * torch.stack([p.pow(2).sum() for p in list(model.module.parameters())[2:]]).sum()


@case()
def a_penalty_differentiated_by_itself(job: Job) -> None:
    """Behind the backward of the loss, and once before one that is accumulated onto it."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        job.loss(model, step).backward()
        _penalty(model).backward()
        if step == 2:
            job.loss(model, 30 + step).backward()
        optimizer.step()


@case(not_in=(DDP,))
def one_rank_accumulates_by_itself(job: Job) -> None:
    """What one rank adds between two reduced backwards counts as its share; DDP does the same with another rounding."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        job.loss(model, step).backward()
        if job.is_rank(0):
            (_penalty(model) / (job.world_size if job.alone else 1)).backward()
        job.loss(model, 30 + step).backward()
        optimizer.step()


class Scattered(nn.Module):
    """Gives a result that its loss does not depend on, and keeps the loss for the script to fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.loss: Any = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        self.loss = nn.functional.mse_loss(z, y)
        result: torch.Tensor = z.softmax(-1)
        return result


@case()
def a_loss_fetched_from_the_module(job: Job) -> None:
    model = job.wrap(Scattered())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        model(*job.batch(step))
        model.module.loss.backward()
        optimizer.step()


class Concatenated(nn.Module):
    """Two parameters whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = (nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(2))
        self.body = nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x * torch.cat((self.first, self.second)))
        return result


@case()
def gradients_in_one_memory(job: Job) -> None:
    model = job.wrap(Concatenated())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            job.loss(model, 10 * step).backward()
        job.loss(model, 10 * step + 1).backward()
        optimizer.step()


@case()
def a_critic_that_is_frozen_in_turn(job: Job) -> None:
    critic, maker = job.wrap(mlp(1)), job.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH)).double())
    of_critic, of_maker = sgd(critic, lr=0.05), sgd(maker, lr=0.05)
    for step in range(4):
        x, _ = job.batch(step)
        critic.requires_grad_(True)
        of_critic.zero_grad()
        (critic(maker(x).detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        critic.requires_grad_(False)
        of_maker.zero_grad()
        critic(maker(x)).square().mean().backward()
        of_maker.step()
