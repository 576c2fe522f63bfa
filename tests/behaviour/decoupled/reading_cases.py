"""Cases: whoever looks at parameters, gradients or optimizer state, whenever and on any rank, sees what is true."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.behaviour.decoupled.job import CPU, CUDA, Job, case, mlp, sgd, state_of, train
from torch import nn
from torch.optim import swa_utils

Reader = Callable[[Any], Any]


def _printed(model: Any) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d\.\d+", "".join(map(repr, model.parameters())))]


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def _copied(model: Any) -> list[torch.Tensor]:
    copied = copy.deepcopy(model.module)
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    return list(copied.parameters())


VALUES: dict[str, Reader] = {
    "state_dict": lambda model: {k: v.clone() for k, v in model.state_dict().items()},
    "state_dict of the module": lambda model: {k: v.clone() for k, v in model.module.state_dict().items()},
    "torch.save": _saved,
    "parameters made of parameters": lambda model: [nn.Parameter(p).detach().clone() for p in model.parameters()],
    "constructed as parameters": lambda model: [type(p)(p).detach().clone() for p in model.parameters()],
    "printing": _printed,
    "data": lambda model: [p.data.clone() for p in model.parameters()],
    "detach": lambda model: [p.detach().clone() for p in model.parameters()],
    "numpy": lambda model: [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()],
    "force numpy": lambda model: [torch.from_numpy(p.numpy(force=True).copy()) for p in model.parameters()],
    "arithmetic": lambda model: [(p * 2).detach() for p in model.parameters()],
    "item and tolist": lambda model: [model.module[3].bias[0].item(), model.module[5].bias.tolist()],
    "norms": lambda model: [[p.norm().item() for p in model.parameters()],
                            list(torch._foreach_norm(list(model.parameters())))],
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "deepcopy": _copied,
    "out argument": lambda model: torch.add(
        model.module[0].bias.detach(), 1, out=torch.empty(8, dtype=torch.float64)
    ),
    "functional_call": lambda model: torch.func.functional_call(
        model.module, {k: v.detach() for k, v in model.module.named_parameters()}, torch.ones(1, 6, dtype=torch.float64)
    ).detach(),
    "memory": lambda model: [
        torch.frombuffer(bytearray(bytes(p.detach().numpy().data)), dtype=torch.float64) for p in model.parameters()
    ],
}  # fmt: skip

GRADIENTS: dict[str, Reader] = {
    "grad": lambda model: [p.grad for p in model.parameters()],
    "norm of grad": lambda model: [0.0 if p.grad is None else p.grad.norm().item() for p in model.parameters()],
    "one grad": lambda model: model.module[2].weight.grad,
    "total norm": lambda model: nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ),
}  # fmt: skip


def _reading(read: Reader, everybody: bool, job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    looks = everybody or job.is_rank(0)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if looks and step != 1:
            job.see("cleared", read(model))
        loss = job.loss(model, step)
        if looks and step == 3:
            job.see("after forward", read(model))
        loss.backward()
        if looks and step != 2:
            job.see("after backward", read(model))
        optimizer.step()
        if looks and step != 0:
            job.see("after step", read(model))
        job.see_loss(loss)


ONLY_IN_MEMORY = ("numpy", "memory")
FEW = ("state_dict", "data", "grad")  # enough for another number of ranks
for _kind, _readers in (("values", VALUES), ("gradients", GRADIENTS)):
    for _name, _read in _readers.items():
        _world_sizes = [2, 3] if _name in FEW else [2]
        _devices = [CPU] if _name in ONLY_IN_MEMORY else [CPU, CUDA]
        case(name=f"{_kind} by {_name} on rank 0", world_sizes=_world_sizes, devices=_devices)(
            partial(_reading, _read, False)
        )
        if _name in FEW:
            case(name=f"{_kind} by {_name} on every rank")(partial(_reading, _read, True))


@case()
def gradients_on_rank_0_alone_on_some_steps(job: Job) -> None:
    """As logging does it; with accumulation, and with gradients that outlive their step."""
    model = job.wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(5):
        with model.no_sync():
            job.loss(model, 10 * step + 1).backward()
        job.loss(model, 10 * step).backward()
        if job.is_rank(0) and step in (1, 2, 4):
            job.see("before", [p.grad for p in model.parameters()])
        optimizer.step()
        if job.is_rank(0) and step in (0, 2):
            job.see("after", [p.grad for p in model.parameters()])
        if step != 2:
            optimizer.zero_grad()


@case()
def optimizer_state_on_rank_0_alone(job: Job) -> None:
    for make in (partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.1, momentum=0.9)):
        model = job.wrap(mlp())
        optimizer = make(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            if job.is_rank(0) and step == 2:
                job.see("cleared", state_of(optimizer))
            loss = job.loss(model, step)
            loss.backward()
            if job.is_rank(0) and step in (1, 2):
                job.see("after backward", copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
            if job.is_rank(0) and step != 1:
                job.see("after step", state_of(optimizer))
            if job.is_rank(job.world_size - 1) and step == 3:
                job.see("on the last rank", [list(state.values()) for state in optimizer.state.values()])
            job.see_loss(loss)


@case()
def reads_on_different_ranks_at_different_moments(job: Job) -> None:
    """No two ranks look at the same thing at the same time."""
    model = job.wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        loss = job.loss(model, step)
        loss.backward()
        if job.is_rank(step % job.world_size):
            job.see(f"gradients in step {step}", [p.grad for p in model.parameters()])
        optimizer.step()
        if job.is_rank((step + 1) % job.world_size):
            job.see(f"state in step {step}", state_of(optimizer))
            job.see(f"values in step {step}", list(model.parameters()))
        job.see_loss(loss)


def _averaging(everybody: bool, job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    keeps = everybody or job.is_rank(0)
    ema = swa_utils.AveragedModel(model.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    swa = swa_utils.AveragedModel(model.module)
    mine = {name: value.clone() for name, value in model.module.state_dict().items()}
    for step in range(4):
        train(job, model, optimizer, 1, step)
        if not keeps:
            continue
        ema.update_parameters(model.module)
        if step % 2:
            swa.update_parameters(model.module)
        for name, p in model.module.named_parameters():
            mine[name].mul_(0.9).add_(p.data, alpha=0.1)
    if keeps:
        job.see("averages", [list(ema.parameters()), list(swa.parameters()), mine])
        with torch.no_grad():
            x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
            job.see("evaluated", [ema(x), swa(x)])


case(name="averaged models on every rank")(partial(_averaging, True))
case(name="averaged models on rank 0")(partial(_averaging, False))


@case()
def averaged_model_of_the_wrapper(job: Job) -> None:
    """A copy of the wrapper itself, as ``AveragedModel(ddp_model)`` makes it."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for step in range(3):
        train(job, model, optimizer, 1, step)
        ema.update_parameters(model)
        with torch.no_grad():
            job.see_loss(job.loss(ema, 40))
    job.see("averages", list(ema.parameters()))


def _parametrized(inner: nn.Sequential) -> nn.Sequential:
    for index in (0, 2):
        nn.utils.parametrizations.weight_norm(inner[index])
    nn.utils.parametrizations.spectral_norm(inner[5], n_power_iterations=1)
    return inner


@case()
def weights_computed_of_parameters(job: Job) -> None:
    inner = _parametrized(mlp()).eval()  # in eval the spectral norm's vectors, which are buffers, stand still
    model = job.wrap(inner)
    optimizer = sgd(model)
    for step in range(4):
        train(job, model, optimizer, 1, step)
        if job.is_rank(0):
            job.see("computed", [model.module[index].weight for index in (0, 2, 5)])


@case()
def weights_computed_in_a_hook(job: Job) -> None:
    """The old weight_norm, whose forward pre-hook was there before the model was wrapped."""
    inner = mlp()
    nn.utils.weight_norm(inner[0])
    nn.utils.weight_norm(inner[2], dim=1)
    model = job.wrap(inner)
    optimizer = sgd(model)
    for step in range(4):
        train(job, model, optimizer, 1, step)
        with torch.no_grad():
            job.see_loss(job.loss(model, 40))


@case()
def penalty_computed_of_parameters(job: Job) -> None:
    """The loss reads parameters outside any layer, before and after forward."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        before = sum(p.pow(2).sum() for p in model.module[0].parameters())
        loss = job.loss(model, step) + 0.01 * before + 0.01 * model.module[5].weight.abs().sum()
        loss.backward()
        optimizer.step()
        job.see_loss(loss)


@case()
def values_changed_right_after_the_step(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        train(job, model, optimizer, 1, step)
        model.module[0].weight.data.clamp_(-0.2, 0.2)
        train(job, model, optimizer, 1, step + 10)
        with torch.no_grad():
            model.module[2].weight.mul_(0.9)
            torch._foreach_mul_(list(model.parameters()), 0.99)
        train(job, model, optimizer, 1, step + 20)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
        train(job, model, optimizer, 1, step + 30)
        nn.init.constant_(model.module[5].bias, 0.25)
        model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        train(job, model, optimizer, 1, step + 40)
        model.module[5].bias.data = model.module[5].bias.data.clone()


@case()
def values_read_through_kept_references(job: Job) -> None:
    """These cannot be asked first, so that they must be right when the step returns."""
    model = job.wrap(mlp())
    optimizer = sgd(model)
    kept = model.state_dict()
    arrays = [p.detach().numpy() for p in list(model.parameters())[:2] if p.device.type == CPU]
    views = [p.data.view(-1) for p in model.parameters()]
    for step in range(3):
        train(job, model, optimizer, 1, step)
        job.see("kept", [kept, views, [torch.from_numpy(array.copy()) for array in arrays]])


@case()
def gradients_by_autograd_grad(job: Job) -> None:
    model = job.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        train(job, model, optimizer, 1, step)
        loss = job.loss(model.module, step)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        job.see("autograd.grad", [job.mean(grad) for grad in grads])
        job.see("grad", [p.grad for p in model.parameters()])
