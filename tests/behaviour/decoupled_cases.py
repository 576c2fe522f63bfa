"""Training scripts that must see the same numbers alone on the whole batch, under stock DDP, and decoupled.

Every script takes a ``Kit`` and shows it what it sees. The kit wraps models in one of three ways and hands out the
whole batch or this rank's part of it.
"""

from __future__ import annotations

import collections
import copy
import io
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from headway.strategies.decoupled.wrapper import DecoupledDataParallel

PER_RANK = 4
WIDTH = 6

Script = Callable[["Kit"], None]
ALONE: dict[str, Script] = {}  # comparable with one process that sees the whole batch, and with DDP
LIKE_DDP: dict[str, Script] = {}  # comparable with DDP only


class Kit:
    """How a script gets its model wrapped, its data, and its findings noted."""

    def __init__(self, way: str, rank: int, world_size: int, cap_mb: float) -> None:
        self.way = way
        self.rank = rank
        self.world_size = world_size
        self.cap_mb = cap_mb
        self.seen: list[tuple[str, torch.Tensor]] = []

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        if self.way == "decoupled":
            return DecoupledDataParallel(module, bucket_cap_mb=self.cap_mb, **options)
        if self.way == "ddp":
            return DistributedDataParallel(module, bucket_cap_mb=25, **options)
        return Alone(module)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        rows = PER_RANK * self.world_size
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        if self.way != "alone":
            mine = slice(self.rank * PER_RANK, (self.rank + 1) * PER_RANK)
            x, y = x[mine], y[mine]
        return x, y

    def loss(self, model: Any, step: int) -> torch.Tensor:
        x, y = self.batch(step)
        return nn.functional.mse_loss(model(x), y)

    def see(self, what: str, tensors: Any) -> None:
        if isinstance(tensors, dict):
            tensors = list(_leaves(tensors))
        elif isinstance(tensors, torch.Tensor | float | int):
            tensors = [tensors]
        for index, tensor in enumerate(tensors):
            value = torch.full((1,), math.nan) if tensor is None else torch.as_tensor(tensor)
            self.seen.append((f"{what}[{index}]", value.detach().double().clone()))


class Alone(nn.Module):
    """Stands in for a wrapper where there is one process only."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def no_sync(self) -> Any:
        return nullcontext()


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor | float | int):
        yield value


def alone(script: Script) -> Script:
    ALONE[script.__name__] = script
    return script


def like_ddp(script: Script) -> Script:
    LIKE_DDP[script.__name__] = script
    return script


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def train(kit: Kit, model: Any, optimizer: Any, steps: int = 4, start: int = 0) -> None:
    """The plainest loop; the losses show whether parameters were right, without reading parameters."""
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = kit.loss(model, step)
        loss.backward()
        optimizer.step()
        kit.see("loss", mean(kit, loss))


def mean(kit: Kit, value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    if kit.way != "alone":
        dist.all_reduce(value)
        value /= kit.world_size
    return value


def finish(kit: Kit, model: Any, *optimizers: Any) -> None:
    for optimizer in optimizers:
        kit.see("optimizer state", optimizer.state_dict()["state"])
    kit.see("parameters", model.parameters())
    kit.see("gradients", [p.grad for p in model.parameters()])


@alone
def backward_through_a_step(kit: Kit) -> None:
    model = kit.wrap(mlp())
    optimizer = sgd(model)
    train(kit, model, optimizer, 1)
    stale = kit.loss(model, 5)
    train(kit, model, optimizer, 1, 1)
    try:
        stale.backward()  # needs parameters as they were before the step
    except RuntimeError as error:
        kit.see("refused", float("modified by an inplace operation" in str(error)))


@alone
def states_at_any_moment(kit: Kit) -> None:
    model = kit.wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss = kit.loss(model, step)
        kit.see("model before backward", dict(model.state_dict()))
        loss.backward()
        kit.see("model before step", dict(model.state_dict()))
        kit.see("optimizer before step", optimizer.state_dict()["state"])
        optimizer.step()
        if step == 0:
            kit.see("model after step", {k.removeprefix("module."): v for k, v in model.state_dict().items()})
        if step == 1:
            kit.see("optimizer after step", optimizer.state_dict()["state"])
        if step == 2:
            file = io.BytesIO()
            torch.save({"model": model.module, "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=False)
            kit.see("saved", saved["model"].parameters())
            kit.see("saved", saved["optimizer"]["state"])
            assert all(type(p) is nn.Parameter for p in saved["model"].parameters())
    finish(kit, model, optimizer)


@alone
def copies_at_any_moment(kit: Kit) -> None:
    model = kit.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        kit.loss(model, step).backward()
        copied = copy.deepcopy(model.module)
        assert all(type(p) is nn.Parameter for p in copied.parameters())
        kit.see("copy before step", copied.parameters())
        optimizer.step()
        copied = copy.deepcopy(model.module if step % 2 else model)
        assert all(type(p) is nn.Parameter for p in copied.parameters())
        kit.see("copy after step", copied.parameters())
        one = copy.deepcopy(model.module[0].weight)
        assert type(one) is nn.Parameter
        train(kit, model, optimizer, 1, step + 30)
        kit.see("copy later", copied.parameters())
        other = copy.deepcopy(optimizer)
        kit.see("copied optimizer", other.state_dict()["state"])
    finish(kit, model, optimizer)


@alone
def replaced_optimizer_state(kit: Kit) -> None:
    model = kit.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        train(kit, model, optimizer, 2, step)
        optimizer.state = collections.defaultdict(dict)
        train(kit, model, optimizer, 1, step + 10)
        optimizer.state.clear()
    finish(kit, model, optimizer)


@alone
def parameters_left_out_of_a_forward(kit: Kit) -> None:
    model = kit.wrap(mlp())
    optimizer = sgd(model)
    for step in range(3):
        train(kit, model, optimizer, 1, step)
        x, _ = kit.batch(60)
        with model.no_sync():  # the head alone, which leaves the other updates due
            mean_head = model.module[5](torch.tanh(x[:, :5])).mean()
            kit.see("head", mean(kit, mean_head))
    finish(kit, model, optimizer)


def _save_matrix_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if op in (torch.ops.aten.addmm.default, torch.ops.aten.mul.Tensor, torch.ops.aten.add_.Tensor):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@alone
def forwards_under_modes(kit: Kit) -> None:
    model = kit.wrap(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        train(kit, model, optimizer, 1, step)
        optimizer.zero_grad()
        x, y = kit.batch(step + 10)
        contexts = partial(create_selective_checkpoint_contexts, _save_matrix_products)
        made = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        nn.functional.mse_loss(made, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with FlopCounterMode(display=False) as flops:
            loss = kit.loss(model, step)
        kit.see("flops", float(flops.get_total_flops()) / len(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = kit.loss(model, step)
        loss.backward()
        optimizer.step()
    finish(kit, model, optimizer)


@alone
def gradients_that_share_storage(kit: Kit) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))
            self.right = nn.Parameter(torch.linspace(0, 1, WIDTH).view(1, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, torch.cat([self.left, self.right]))

    model = kit.wrap(Joined().double())
    optimizer = sgd(model)
    train(kit, model, optimizer)
    finish(kit, model, optimizer)


@like_ddp
def copies_that_are_evaluated(kit: Kit) -> None:
    torch.manual_seed(7)
    model = kit.wrap(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double())
    optimizer = sgd(model)
    train(kit, model, optimizer, 2)
    copied = copy.deepcopy(model).eval()
    with torch.no_grad():
        kit.see("copy", kit.loss(copied, 3))
    kit.see("copy", copied.parameters())
    train(kit, model, optimizer, 2)
    finish(kit, model, optimizer)


def compare(
    rank: int, world_size: int, caps_mb: list[float], only: list[str] | None = None
) -> dict[str, Any]:
    """Run every script in every way; return what disagreed, and how many values were compared."""
    problems: list[str] = []
    compared = 0
    for name, script in {**ALONE, **LIKE_DDP}.items():
        if only and name not in only:
            continue
        expected: dict[str, list[tuple[str, torch.Tensor]]] = {}
        ways = ["alone", "ddp"] if name in ALONE else ["ddp"]
        for way in ways:
            kit = Kit(way, rank, world_size, 25)
            script(kit)
            expected[way] = kit.seen
        for cap_mb in caps_mb:
            kit = Kit("decoupled", rank, world_size, cap_mb)
            script(kit)
            compared += len(kit.seen)
            for way in ways:
                problems += _differences(f"{name} (cap {cap_mb}) against {way}", kit.seen, expected[way])
            if name in ALONE:
                problems += _differences_between_ranks(name, kit.seen)
    return {"problems": problems[:20], "compared": compared, "scripts": len(ALONE) + len(LIKE_DDP)}


def _differences(
    name: str, seen: list[tuple[str, torch.Tensor]], expected: list[tuple[str, torch.Tensor]]
) -> list[str]:
    if len(seen) != len(expected):
        return [f"{name}: saw {len(seen)} values, expected {len(expected)}"]
    for (what, ours), (other, theirs) in zip(seen, expected, strict=True):
        tolerance = 1e-5 if "loss_scaling" in name else 1e-10
        if what != other or ours.shape != theirs.shape:
            return [f"{name}: saw {what} {tuple(ours.shape)}, expected {other} {tuple(theirs.shape)}"]
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
            return [f"{name}: {what} differs by {(ours - theirs).abs().max().item():.3g}"]
    return []


def _differences_between_ranks(name: str, seen: list[tuple[str, torch.Tensor]]) -> list[str]:
    flat = torch.cat([value.reshape(-1).nan_to_num(123.0) for _, value in seen])
    first = flat.clone()
    dist.broadcast(first, 0)
    return [] if torch.equal(first, flat) else [f"{name}: ranks differ in their bits"]
