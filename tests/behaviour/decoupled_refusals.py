"""Everything that the decoupled all-reduce refuses, each with a script that would otherwise train wrongly."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from headway.errors import UnsupportedError, UserError
from headway.strategies.decoupled.wrapper import DecoupledDataParallel

REFUSALS: dict[str, tuple[str, Callable[[], Any]]] = {}


def refused(expected: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(script: Callable[[], Any]) -> Callable[[], Any]:
        REFUSALS[script.__name__] = (expected, script)
        return script

    return register


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def wrapped(module: nn.Module | None = None, **options: Any) -> DecoupledDataParallel:
    return DecoupledDataParallel(model() if module is None else module, **options)


def loss(module: nn.Module) -> torch.Tensor:
    result: torch.Tensor = module(torch.ones(3, 4)).sum()
    return result


for _option, _value in {
    "static_graph": True, "mixed_precision": object(), "device_ids": [0],
    "output_device": 0, "delay_all_reduce_named_params": [("a", 1)], "device_mesh": object(),
    "skip_all_reduce_unused_params": True, "bucket_cap_mb_list": [1, 2],
}.items():  # fmt: skip
    REFUSALS[f"option {_option}"] = (_option, lambda o=_option, v=_value: wrapped(**{o: v}))  # type: ignore[misc]


@refused("register_comm_hook")
def communication_hook() -> None:
    wrapped().register_comm_hook(None, lambda *_: None)


@refused("already wrapped")
def wrapped_inside() -> None:
    wrapped(nn.Sequential(DistributedDataParallel(model())))


@refused("another wrapped model")
def wrapped_twice() -> None:
    inner = model()
    first = wrapped(inner)
    wrapped(inner)
    del first


@refused("share memory without being one")
def tied_by_data() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    wrapped(nn.Sequential(first, second))


@refused("changed a gradient after it had been taken")
def hook_registered_after_wrapping() -> None:
    net = wrapped()

    def clear(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.zero_()

    list(net.parameters())[-1].register_post_accumulate_grad_hook(clear)
    loss(net).backward()


@refused("cannot be compiled as a whole")
def compiled_as_a_whole() -> None:
    wrapped().compile()


@refused("compiled in place")
def compiled_in_place() -> None:
    inner = model()
    inner[0].compile()
    wrapped(inner)


@refused("compiled after it was wrapped")
def compiled_later() -> None:
    ours = wrapped()
    ours.module[2].compile()
    loss(ours)


@refused("sparse gradients")
def sparse_embedding() -> None:
    wrapped(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))


@refused("TorchScript")
def scripted() -> None:
    wrapped(nn.Sequential(torch.jit.script(nn.Linear(4, 2))))


@refused("subclasses of Parameter")
def parameter_subclass() -> None:
    class Special(nn.Parameter):
        pass

    inner = model()
    inner[0].weight = Special(torch.ones(4, 4))
    wrapped(inner)


@refused("subclasses of Parameter")
def uninitialised() -> None:
    wrapped(nn.Sequential(nn.LazyLinear(3)))


@refused("on meta")
def other_device() -> None:
    wrapped(nn.Linear(4, 2, device="meta"))


@refused("dtype")
def complex_parameters() -> None:
    wrapped(nn.Linear(4, 2, dtype=torch.complex64))


@refused("ignore")
def ignored_parameters() -> None:
    inner = model()
    inner._ddp_params_and_buffers_to_ignore = ["0.bias"]  # type: ignore[assignment]
    wrapped(inner)


@refused("inside backward")
def optimizer_in_backward() -> None:
    inner = model()
    next(inner.parameters())._in_backward_optimizers = []  # type: ignore[attr-defined]
    wrapped(inner)


class Half(nn.Module):
    """Uses one of its layers."""

    def __init__(self, *, nested: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.nested = nested

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.first, x, use_reentrant=True) if self.nested else self.first(x)


@refused("second.weight")
def unused_parameter() -> None:
    ours = wrapped(Half())
    loss(ours).backward()


@refused("without a gradient")
def unused_parameter_under_nested_backward() -> None:
    ours = wrapped(Half(nested=True))
    x = torch.ones(3, 4, requires_grad=True)
    ours(x).sum().backward()
    ours(x)


@refused("without a gradient")
def interrupted_backward() -> None:
    def interrupt(_gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    ours = wrapped()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    handle = ours.module[0].weight.register_hook(interrupt)
    try:
        loss(ours).backward()
    except KeyboardInterrupt:
        handle.remove()
    optimizer.step()


class LooksUp(nn.Module):
    """Sparse gradients that no layer tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(rows, self.weight, sparse=True)


@refused("sparse")
def sparse_gradient() -> None:
    ours = wrapped(LooksUp())
    ours(torch.tensor([1, 2])).sum().backward()


@refused("create_graph")
def gradient_of_gradient() -> None:
    ours = wrapped()
    loss(ours).backward(create_graph=True)


@refused("dtype or device was changed")
def converted_later() -> None:
    ours = wrapped().double()
    ours(torch.ones(3, 4, dtype=torch.float64)).sum().backward()


@refused("even if changed back")
def converted_to_and_fro() -> None:
    ours = wrapped()
    loss(ours).backward()
    ours.double().float()
    loss(ours).backward()


@refused("received a gradient again")
def shared_parameter_in_nested_backwards() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.shared = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
            return x

    ours = wrapped(Shared(), bucket_cap_mb=1e-6)
    loss(ours).backward()


@refused("during backward")
def gradient_read_during_backward() -> None:
    ours = wrapped(bucket_cap_mb=1e-6)
    ours.module[0].weight.register_hook(lambda _: ours.module[2].weight.grad.sum())
    loss(ours).backward()


@refused("changed a gradient after")
def gradient_replaced_by_a_hook() -> None:
    ours = wrapped()
    for parameter in ours.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss(ours).backward()


@refused("a copy of a decoupled model")
def trained_copy() -> None:
    import copy

    loss(copy.deepcopy(wrapped()))


def check_all(rank: int, world_size: int) -> list[str]:
    """Run every script; say what was not refused as expected."""
    problems = []
    for name, (expected, script) in REFUSALS.items():
        try:
            script()
        except UnsupportedError as error:
            if expected not in str(error):
                problems.append(f"{name}: {error}")
            if "\n" in str(error):
                problems.append(f"{name}: more than one line")
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__} {error}")
        else:
            problems.append(f"{name}: not refused")
        gc.collect()
    return problems


def disagreement(rank: int, world_size: int) -> str:
    """Ranks with different models."""
    try:
        DecoupledDataParallel(nn.Linear(4, 2 + rank))
    except UserError as error:
        return str(error)
    return ""
