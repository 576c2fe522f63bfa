"""Cases: every optimizer of torch that scripts use, and those that scripts write themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import FEW_ULPS, Job, case, mlp, state_of, train
from torch import optim
from torch.optim import Optimizer


class Lamb(Optimizer):
    """Layer-wise rates (arXiv 1904.00962), as a script would write it: the update of an element needs whole tensors."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-6) + group["weight_decay"] * p
                p.sub_(update * (group["lr"] * p.norm() / update.norm()))


class CentralisedAdam(optim.Adam):
    """A subclass that changes gradients before the step and parameters after it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.9, 0.9)
        return result


class SignStep(Optimizer):
    """Element-wise and without state, but not torch's."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch._foreach_sub_(group["params"], [p.grad.sign() * group["lr"] for p in group["params"]])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "SGD maximize": partial(optim.SGD, lr=0.01, momentum=0.9, maximize=True),
    "Adam": partial(optim.Adam, lr=0.01),
    "Adam foreach": partial(optim.Adam, lr=0.01, weight_decay=0.01, foreach=True),
    "Adam fused": partial(optim.Adam, lr=0.01, weight_decay=0.01, fused=True),
    "Adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
    "Adam amsgrad fused": partial(optim.Adam, lr=0.01, amsgrad=True, fused=True),
    "Adam decoupled maximize": partial(
        optim.Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, amsgrad=True, foreach=True),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "RMSprop": partial(optim.RMSprop, lr=0.01),
    "RMSprop centered momentum": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9, foreach=False),
    "RMSprop foreach": partial(
        optim.RMSprop, lr=0.01, centered=True, momentum=0.9, weight_decay=0.1, foreach=True
    ),
    "Adagrad": partial(optim.Adagrad, lr=0.1),
    "Adagrad decay": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.01, foreach=False),
    "Adagrad foreach": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, foreach=True),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "NAdam foreach": partial(optim.NAdam, lr=0.01, foreach=True),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "ASGD": partial(optim.ASGD, lr=0.05),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Adafactor foreach": partial(optim.Adafactor, lr=0.01, foreach=True),
    "own Lamb": Lamb,
    "own sign": SignStep,
    "subclass of Adam": partial(CentralisedAdam, lr=0.01),
}  # fmt: skip


def _training(make: Callable[[Any], Optimizer], job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = make(model.parameters())
    for step in range(5):
        train(job, model, optimizer, 1, step)
        if step == 2 and job.is_rank(0):
            job.see("state on rank 0", state_of(optimizer))
    job.see("state", state_of(optimizer))


for _name, _make in OPTIMIZERS.items():
    case(name=f"optimizer {_name}")(partial(_training, _make))


def _with_line_search(search: str | None, job: Job) -> None:
    """Every rank has to take the same decisions, so its closure returns the mean loss, as under stock DDP."""
    model = job.wrap(mlp())
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn=search)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = job.loss(model, step)
            loss.backward()
            return job.mean(loss)

        job.see("loss", optimizer.step(closure))
        job.see("values", list(model.parameters()))


# Quotients of differences of gradients enlarge what differs in the last bits.
case(name="optimizer LBFGS", tolerance=1e-9)(partial(_with_line_search, None))
case(name="optimizer LBFGS line search", tolerance=1e-9)(partial(_with_line_search, "strong_wolfe"))


def _single_precision(make: Callable[[Any], Optimizer], job: Job) -> None:
    model = job.wrap(mlp().float())
    optimizer = make(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        x, y = job.batch(step)
        loss = torch.nn.functional.mse_loss(model(x.float()), y.float())
        loss.backward()
        optimizer.step()
        job.see_loss(loss)
    job.see("state", state_of(optimizer))


for _name in ("SGD nesterov", "AdamW foreach", "Adam fused", "RMSprop", "Adagrad"):
    case(name=f"single precision {_name}", tolerance=FEW_ULPS)(partial(_single_precision, OPTIMIZERS[_name]))
