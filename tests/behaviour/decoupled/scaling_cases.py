"""Cases: gradients that are clipped, scaled or changed between backward and step, and reduced precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import FEW_ULPS, Job, Share, case, mlp, sgd, train
from torch import nn

# A parameter that is one such unit off may be rounded to the next number of half precision, or a gradient computed of
# it: where three ranks' averages are rounded in another order than alone, that is seen. 2^-8 is bfloat16's own unit.
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

Clip = Callable[[Any], Any]


def _in_two_calls(model: Any) -> torch.Tensor:
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return norm


def _own(model: Any) -> torch.Tensor:
    """The wrapper's method where it has one, as that of FSDP."""
    clip = getattr(model, "clip_grad_norm_", None)
    norm: torch.Tensor = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if clip is None else clip(0.1)
    return norm


CLIPS: dict[str, Clip] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "norm foreach": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    "norm of one tensor at a time": lambda model: [
        nn.utils.clip_grad_norm_(p, 0.02, foreach=False) for p in model.parameters()
    ],
    "largest": lambda model: nn.utils.clip_grad_norm_(
        model.parameters(), 0.05, math.inf, error_if_nonfinite=True
    ),
    "norm in two calls": _in_two_calls,
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "value foreach": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=True),
    "own": _own,
}


def _clipping(clip: Clip, job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)  # Adam would hardly notice the size of gradients
    for step in range(4):
        optimizer.zero_grad()
        loss = job.loss(model, step)
        loss.backward()
        job.see("norm", clip(model))
        optimizer.step()
        job.see_loss(loss)


for _name, _clip in CLIPS.items():
    case(name=f"clipping by {_name}")(partial(_clipping, _clip))


@case()
def clipping_after_accumulation(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            job.loss(model, 10 * step).backward()
        job.loss(model, 10 * step + 1).backward()
        job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()


@case()
def clipped_then_looked_at_and_added_to(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        job.loss(model, step).backward()
        job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        if step in (1, 4) and job.is_rank(job.world_size - 1):
            job.see("on the last rank", [p.grad for p in model.parameters()])
        if step == 2:
            job.see("everywhere", [p.grad for p in model.parameters()])
        if step >= 3:  # onto clipped gradients, which in step 4 one rank has looked at
            job.loss(model, step + 10).backward()
            job.see("norm of both", nn.utils.clip_grad_norm_(model.parameters(), 0.15))
        optimizer.step()
        if step == 0:
            job.see("after the step", [p.grad for p in model.parameters()])


@case()
def clipped_while_some_are_frozen(job: Job) -> None:
    inner = mlp()
    inner[0].weight.requires_grad_(False)
    model = job.wrap(inner)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        job.loss(model, step).backward()
        job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()


@case()
def gradients_changed_in_place(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = job.loss(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.module[2].parameters(), 0.05)
        model.module[0].bias.grad.mul_(3)
        model.module[0].weight.grad.data.add_(0.01)
        with torch.no_grad():
            model.module[3].weight.grad[0] = 0.5
            torch._foreach_mul_([p.grad for p in model.module[3].parameters()], 0.25)
        model.module[5].weight.grad = torch.ones_like(model.module[5].weight)
        optimizer.step()
        job.see_loss(loss)
        job.see("kept", [p.grad for p in model.parameters()])


@case()
def gradients_changed_through_kept_references(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    train(job, model, optimizer, 1)
    kept = [p.grad for p in model.parameters()]
    views = [gradient.view(-1) for gradient in kept[:3]]
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        job.loss(model, step).backward()
        job.see("kept", kept)
        job.see("views", views)
        for gradient in kept:
            gradient.mul_(0.5)
        optimizer.step()


@case()
def gradients_changed_by_a_hook_of_the_step(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    calls: list[str] = []

    def halve(_optimizer: Any, *_: Any) -> None:
        calls.append("before")
        for p in model.parameters():
            p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_step_post_hook(lambda *_: job.see("after", list(model.parameters())))
    train(job, model, optimizer, 3)
    assert calls == ["before", "after"] * 3


def _autocast(dtype: torch.dtype, job: Job) -> None:
    """Each rank's gradient is rounded by itself, and so it is alone."""
    model = job.wrap(mlp().float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss_of(share: Share) -> torch.Tensor:
        with torch.autocast(torch.get_default_device().type, dtype):
            loss = nn.functional.mse_loss(model(share.x.float()).float(), share.y.float())
        job.see(f"loss of rank {share.rank}", loss)
        return loss

    for step in range(4):
        optimizer.zero_grad()
        job.backward_by_rank(model, loss_of, job.shares(step))
        if step == 2:
            job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()


def _loss_scaling(unscale: str, fused: bool, job: Job) -> None:
    """Step 1 overflows on the last rank and step 4 on the first: no rank may take them."""
    model = job.wrap(mlp().float())
    optimizer: Any = (
        torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        if fused
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=64.0, growth_interval=2)
    for step in range(6):

        def loss_of(share: Share, step: int = step) -> torch.Tensor:
            with torch.autocast(torch.get_default_device().type, torch.float16):
                loss = nn.functional.mse_loss(model(share.x.float()).float(), share.y.float())
            if (step, share.rank) in ((1, job.world_size - 1), (4, 0)):
                loss = loss * math.inf
            return scaler.scale(loss)

        optimizer.zero_grad()
        job.backward_by_rank(model, loss_of, job.shares(step))
        if unscale == "and clip":
            scaler.unscale_(optimizer)
            job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        elif unscale == "sometimes" and step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        job.see("scale", scaler.get_scale())
        job.see("values", list(model.parameters()))
    optimizer.zero_grad()
    job.see("state", optimizer.state_dict()["state"])


for _dtype, _unit in HALF.items():
    _title = str(_dtype).removeprefix("torch.")
    case(name=f"autocast {_title}", tolerance=FEW_ULPS, world_sizes=[2])(partial(_autocast, _dtype))
    case(name=f"autocast {_title}, uneven averages", tolerance=_unit, world_sizes=[3])(
        partial(_autocast, _dtype)
    )

for _unscale in ("never", "sometimes", "and clip"):
    for _fused in (False, True):
        _title = f"loss scaling, unscale {_unscale}{', fused' if _fused else ''}"
        _scaling = partial(_loss_scaling, _unscale, _fused)
        case(name=_title, tolerance=FEW_ULPS, world_sizes=[2])(_scaling)
        case(name=f"{_title}, uneven averages", tolerance=HALF[torch.float16], world_sizes=[3])(_scaling)


def _looked_at(what: str, job: Job) -> None:
    """Rank 0 looks at gradients, as a script that logs them does; then every rank changes them, twice and piecemeal."""
    model = job.wrap(mlp().float())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(
        torch.get_default_device().type, init_scale=8.0, enabled=what == "unscaling"
    )
    for step in range(5):
        if step != 3:  # the fourth accumulates onto what the third has changed
            optimizer.zero_grad()

        def loss_of(share: Share) -> torch.Tensor:
            return scaler.scale(nn.functional.mse_loss(model(share.x.float()), share.y.float()))

        job.backward_by_rank(model, loss_of, job.shares(step))
        if job.is_rank(0) and step in (1, 2, 3):
            assert nn.utils.clip_grad_norm_(model.parameters(), math.inf) > 0
            assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        scaler.unscale_(optimizer)
        job.see("norm", nn.utils.clip_grad_norm_(model.module[2].parameters(), 0.05))
        job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        if step == 2:
            job.see("clipped", [p.grad for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()


for _what in ("clipping", "unscaling"):
    case(name=f"{_what} after one rank has looked", tolerance=FEW_ULPS)(partial(_looked_at, _what))


@case()
def gradients_replaced_after_one_rank_has_looked(job: Job) -> None:
    """What the script has put there is the script's, and is clipped by each rank itself."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        job.loss(model, step).backward()
        if job.is_rank(0):
            assert model.module[0].weight.grad is not None
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1 * (step + 1))
        job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()


@case()
def local_gradients_clipped_after_looks(job: Job) -> None:
    """Under no_sync each rank clips what it has accumulated itself, whether it has looked at the average or not."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        job.loss(model, step).backward()
        if job.is_rank(0) or step == 2:
            assert model.module[0].weight.grad is not None
        job.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    if not job.alone:
        optimizer.zero_grad()
        with model.no_sync():
            job.loss(model, 10).backward()
            own = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e-3), own)
    optimizer.zero_grad()
