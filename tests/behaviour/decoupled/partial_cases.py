"""Cases: parameters that get no gradient, at times, on some ranks, or ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tests.behaviour.decoupled.job import DDP, Job, Share, case, mlp, sgd, state_of, train
from torch import nn


class Branches(nn.Module):
    """A stem, three branches of which a step uses some, and a head; one more parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Linear(6, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.never = nn.Parameter(torch.ones(4))
        self.double()

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        for index in used:
            x = torch.tanh(self.branches[index](x))
        result: torch.Tensor = self.head(x)
        return result


Choice = Callable[[int, int], tuple[int, ...]]
CHOICES: dict[str, Choice] = {
    "always the same": lambda _step, _rank: (0,),
    "by step": lambda step, _rank: ((0, 1, 2), (), (1,), (2, 0), (1,))[step],
    "by rank": lambda _step, rank: (rank % 3,),
    "by step and rank": lambda step, rank: (((0,), (1, 2)), ((), (1,)), ((2,), ()), ((), ()), ((0, 1), (2,)))[
        step
    ][min(rank, 1)],
}


def _conditional(choice: Choice, to_none: bool, clipped: bool, job: Job) -> None:
    model = job.wrap(Branches(), find_unused_parameters=True)
    optimizer: torch.optim.Optimizer = sgd(model, weight_decay=0.01)
    for step in range(5):
        optimizer.zero_grad(set_to_none=to_none)

        def loss_of(share: Share, step: int = step) -> torch.Tensor:
            return nn.functional.mse_loss(model(share.x, choice(step, share.rank)), share.y)

        job.backward_by_rank(model, loss_of, job.shares(step))
        if clipped:
            if step == 1 and job.is_rank(job.world_size - 1):
                job.see("on the last rank", [p.grad for p in model.parameters()])
            job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        if step == 3:
            job.see("gradients before step", [p.grad for p in model.parameters()])
        optimizer.step()
        if step == 2:
            job.see("state", state_of(optimizer))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # What no rank used has no gradient, and its moments are where they were.
    job.see("gradients", [p.grad for p in model.parameters()])
    job.see("state", state_of(optimizer))


for _name, _choice in CHOICES.items():
    for _to_none in (True, False):
        _cleared = f"branches used {_name}, cleared {'to None' if _to_none else 'to zero'}"
        case(name=_cleared)(partial(_conditional, _choice, _to_none, False))
        if _name.startswith("by"):
            case(name=f"{_cleared}, clipped")(partial(_conditional, _choice, _to_none, True))


@case()
def branches_cleared_between_forward_and_backward(job: Job) -> None:
    """What there was during forward is no sign of use: what no rank uses stays as it is, weight decay or not."""
    model = job.wrap(Branches(), find_unused_parameters=True)
    optimizer = sgd(model, weight_decay=0.1)
    for step in range(5):
        if job.alone:
            optimizer.zero_grad()

        def loss_of(share: Share, step: int = step) -> torch.Tensor:
            result = model(share.x, CHOICES["by step"](step, share.rank))
            if not job.alone:
                optimizer.zero_grad()
            return nn.functional.mse_loss(result, share.y)

        job.backward_by_rank(model, loss_of, job.shares(step))
        job.see("gradients", [p.grad for p in model.parameters()])
        optimizer.step()


@case()
def branches_accumulated_over_two_backwards(job: Job) -> None:
    model = job.wrap(Branches(), find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):

            def loss_of(share: Share, part: int = part) -> torch.Tensor:
                return nn.functional.mse_loss(model(share.x, ((part + share.rank) % 2,)), share.y)

            job.backward_by_rank(model, loss_of, job.shares(2 * step + part))
        optimizer.step()
        job.see("gradients", [p.grad for p in model.parameters()])


@case()
def unused_but_looked_for_in_vain(job: Job) -> None:
    """find_unused_parameters where everything is used."""
    model = job.wrap(mlp(), find_unused_parameters=True)
    train(job, model, sgd(model), 4)


@case()
def frozen_before_wrapping(job: Job) -> None:
    inner = mlp()
    for p in (*inner[0].parameters(), inner[3].weight):
        p.requires_grad_(False)
    model = job.wrap(inner)
    optimizer = sgd(model)  # given the frozen ones as well
    train(job, model, optimizer, 4)
    job.see("state", state_of(optimizer))


def _freezing(looking: bool, job: Job) -> None:
    """Stock DDP can do this only where it looks for unused parameters."""
    model = job.wrap(mlp(), find_unused_parameters=looking)
    optimizer = sgd(model, weight_decay=0.01)
    train(job, model, optimizer, 2)
    model.module[2].requires_grad_(False)  # its gradient stays as it was until it is cleared
    job.loss(model, 2).backward()
    optimizer.step()
    train(job, model, optimizer, 2, 3)
    job.see("frozen", [p.grad for p in model.parameters()])
    model.module[0].weight.requires_grad_(False)
    train(job, model, optimizer, 2, 5)
    model.module[2].requires_grad_(True)
    train(job, model, optimizer, 2, 7)
    job.see("state", state_of(optimizer))


case(name="freezing while training, looking for unused")(partial(_freezing, True))
case(name="freezing while training", not_in=[DDP])(partial(_freezing, False))


@case(not_in=[DDP])
def freezing_right_after_the_step(job: Job) -> None:
    """While the update of the parameter is still due."""
    model = job.wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        train(job, model, optimizer, 1, step)
        model.module[0].requires_grad_(step % 2 == 1)
        optimizer.zero_grad()
        job.see("values", list(model.parameters()))
    job.see("state", state_of(optimizer))


@case(not_in=[DDP])
def unfreezing_what_was_frozen_when_wrapped(job: Job) -> None:
    """Gradual unfreezing, which stock DDP leaves unsynchronised."""
    inner = mlp()
    inner[0].requires_grad_(False)
    inner[2].requires_grad_(False)
    model = job.wrap(inner)
    optimizer = sgd(model)
    train(job, model, optimizer, 2)
    model.module[2].requires_grad_(True)
    train(job, model, optimizer, 2, 2)
    model.module[0].requires_grad_(True)
    train(job, model, optimizer, 2, 4)
    job.see("state", state_of(optimizer))


class Behind(nn.Module):
    """A model with something behind it, which may be more of what is trained."""

    def __init__(self, inner: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.inner(x))
        return result


def _another_root(trains_more: bool, job: Job) -> None:
    """The script puts another module in the place of the wrapped one: an adapter, say, whose backbone is frozen."""
    model = job.wrap(mlp())
    train(job, model, sgd(model), 2)
    torch.manual_seed(5)
    head = nn.Linear(3, 3).double() if trains_more else nn.Tanh()
    if trains_more:
        model.module.requires_grad_(False)
    model.module = Behind(model.module, head)
    optimizer = sgd(model)
    train(job, model, optimizer, 3, 2)
    job.see("values", list(model.parameters()))
    job.see("state", state_of(optimizer))


case(name="another root with an adapter", not_in=[DDP])(partial(_another_root, True))
case(name="another root of the same parameters")(partial(_another_root, False))


@case()
def one_rank_looks_where_parameters_go_unused(job: Job) -> None:
    model = job.wrap(Branches(), find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        x, y = job.batch(step)
        nn.functional.mse_loss(model(x, (step % 2,)), y).backward()
        if job.is_rank(0):
            looked = [p.grad for p in model.parameters()]
            assert looked[0] is None  # of the parameter that is never used
        optimizer.step()


@case()
def a_branch_used_on_one_rank_before_a_reduced_backward(job: Job) -> None:
    """Under no_sync rank 0 uses a branch that no rank uses in the backward that is reduced."""
    model = job.wrap(Branches(), find_unused_parameters=True)
    optimizer = sgd(model, weight_decay=0.01)
    for step in range(4):
        optimizer.zero_grad()

        def loss_of(share: Share, step: int = step) -> torch.Tensor:
            used = (0, 1) if share.rank == 0 else (0,)
            return nn.functional.mse_loss(model(share.x, used), share.y)

        def last_of(share: Share, step: int = step) -> torch.Tensor:
            return nn.functional.mse_loss(model(share.x, (2,)), share.y)

        with model.no_sync():
            job.backward_by_rank(model, loss_of, job.shares(step))
        job.backward_by_rank(model, last_of, job.shares(10 + step))
        optimizer.step()
