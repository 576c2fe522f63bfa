"""Ranks of the tests of compressed gradients, and the same training in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.compression.cast import Cast
from headway.compression.codec import Codec, Gradients, Reduced, Reduction
from headway.errors import HeadwayError, UserError
from headway.ext.testing import reduced
from headway.integrations.parallelize import parallelize
from headway.integrations.plan_injection import install, uninstall
from headway.measuring.codecs import codec_costs
from headway.plan import Plan
from headway.recording.description import strategy_in_force
from headway.strategies.ddp.compressed import Compressing
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.ddp.runtime import KEPT, REMEMBERED, compressing_of
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.module_spec import model_spec

STEPS, ROWS = 6, 4
Log = list[list[list[str]]]
"""Of each step the buckets in the order of their reduction, each as the names of its parameters."""


class Net(nn.Module):
    """Layers of which one is used in some steps only, by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(20, 30), nn.Linear(30, 30), nn.Linear(30, 12)
        self.never = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if use:
            x = torch.tanh(self.sometimes(x))
        found: torch.Tensor = self.last(x)
        return found


def net(*, some_unused: bool) -> nn.Module:
    torch.manual_seed(3)
    model = Net().double()
    if not some_unused:
        del model.never
    return model


def is_used(step: int, rank: int, *, some_unused: bool) -> bool:
    """By nobody in the step 2, by everybody in steps 0 and 3, by some in the others."""
    return not some_unused or step in (0, 3) or (step != 2 and (step + rank) % 2 == 0)


def loss_of(model: nn.Module, step: int, rank: int, *, some_unused: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, 20, generator=generator, dtype=torch.float64)
    found: torch.Tensor = model(x, is_used(step, rank, some_unused=some_unused)).square().mean()
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of parameters with different settings."""
    weights: list[nn.Parameter] = [p for p in model.parameters() if p.dim() > 1]
    others: list[nn.Parameter] = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "lr": 0.05, "momentum": 0.0}]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.9)


def values(model: nn.Module) -> list[list[float]]:
    return [p.flatten().tolist() for p in model.parameters()]


def trained(
    rank: int, _world_size: int, cases: list[tuple[dict[str, Any], float | None, int, bool]]
) -> list[dict[str, Any]]:
    """Parameters after training under each of ``cases`` (codec, cap in MiB, accumulated passes, some unused)."""
    found = []
    logged: list[list[str]] = []
    reduce = Compressing.reduce

    def watched(self: Compressing, bucket: Any) -> Any:
        logged.append([self.names[self._keys[id(p)]] for p in bucket.parameters()])
        return reduce(self, bucket)

    Compressing.reduce = watched  # type: ignore[method-assign]
    for options, cap, accumulate, some_unused in cases:
        model = net(some_unused=some_unused)
        optimizer = optimizer_of(model)
        strategy = DistributedDataParallelStrategy.model_validate({"bucket_cap_mb": cap, "wire": [options]})
        wrapped: Any = parallelize(model, optimizer, strategy, find_unused_parameters=some_unused)
        log: Log = []
        for step in range(STEPS):
            optimizer.zero_grad()
            logged.clear()
            for part in range(accumulate):
                wrapped.require_backward_grad_sync = part == accumulate - 1
                loss_of(wrapped, step + 10 * part, rank, some_unused=some_unused).backward()
            optimizer.step()
            log.append(list(logged))
        found.append({"values": values(model), "log": log})
    return found


def alone(
    codec: Codec, log: Log, world_size: int, accumulate: int, *, some_unused: bool
) -> list[list[float]]:
    """The same in one process, where ranks take turns: buckets as in ``log``."""
    model = net(some_unused=some_unused)
    optimizer = optimizer_of(model)
    named = dict(model.named_parameters())
    key_of = {name: key for key, name in enumerate(named)}
    kept = [{name: torch.zeros_like(p) for name, p in named.items()} for _ in range(world_size)]
    memory: list[dict[int, torch.Tensor]] = [{} for _ in range(world_size)]
    for step in range(STEPS):
        gradients: list[dict[str, torch.Tensor]] = []
        for rank in range(world_size):
            optimizer.zero_grad()
            for part in range(accumulate):
                loss_of(model, step + 10 * part, rank, some_unused=some_unused).backward()
            gradients.append({name: p.grad for name, p in named.items() if p.grad is not None})
        optimizer.zero_grad()
        used = {name for each in gradients for name in each}
        for names in log[step]:
            mean = _bucket(codec, names, named, key_of, gradients, kept, memory)
            for name, own in zip(names, mean, strict=True):
                named[name].grad = own if name in used else None
        optimizer.step()
    return values(model)


def _bucket(
    codec: Codec,
    names: Sequence[str],
    named: dict[str, nn.Parameter],
    key_of: dict[str, int],
    gradients: list[dict[str, torch.Tensor]],
    kept: list[dict[str, torch.Tensor]],
    memory: list[dict[int, torch.Tensor]],
) -> list[torch.Tensor]:
    """The mean of the gradients of ``names``; a rank without one sends nothing of it, and keeps what it had."""
    shapes = [tuple(named[name].shape) for name in names]
    world_size = len(gradients)
    ranks = []
    for rank, own in enumerate(gradients):
        parts = [
            own[name] + kept[rank][name] if name in own else torch.zeros_like(named[name]) for name in names
        ]
        flat = torch.cat([part.detach().reshape(-1) for part in parts])
        ranks.append(Gradients(flat, shapes, [key_of[n] for n in names], rank, world_size, memory[rank]))
    done, _ = reduced(codec, ranks)
    sizes = [named[name].numel() for name in names]
    if codec.feeds_back:
        for rank, each in enumerate(done):
            for name, part in zip(names, each.kept.split(sizes), strict=True):
                before = 0 if name in gradients[rank] else kept[rank][name]
                kept[rank][name] = part.view_as(named[name]) + before
    pieces = done[0].mean.split(sizes)
    return [piece.view_as(named[name]).clone() for piece, name in zip(pieces, names, strict=True)]


def resumed(rank: int, _world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train on after a state was saved and loaded, without it, and without a break; what refuses a state."""

    def begun() -> tuple[Any, torch.optim.Optimizer]:
        model = net(some_unused=False)
        optimizer = optimizer_of(model)
        strategy = DistributedDataParallelStrategy.model_validate({"wire": [options]})
        return parallelize(model, optimizer, strategy), optimizer

    def steps(wrapped: Any, optimizer: torch.optim.Optimizer, which: range) -> None:
        for step in which:
            optimizer.zero_grad()
            loss_of(wrapped, step, rank, some_unused=False).backward()
            optimizer.step()

    wrapped, optimizer = begun()
    steps(wrapped, optimizer, range(3))
    saved = {
        "model": {name: p.clone() for name, p in wrapped.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    state = headway.compression_state(wrapped)
    saved["optimizer"]["state"] = {
        key: {name: own.clone() for name, own in each.items()}
        for key, each in saved["optimizer"]["state"].items()
    }
    steps(wrapped, optimizer, range(3, STEPS))
    found: dict[str, Any] = {"without a break": values(wrapped)}
    for name, given in (("with its state", state), ("without", None)):
        again, its_optimizer = begun()
        again.load_state_dict(saved["model"])
        its_optimizer.load_state_dict(saved["optimizer"])
        if given is not None:
            headway.load_compression_state(again, given)
        steps(again, its_optimizer, range(3, STEPS))
        found[name] = values(again)
    foreign = {"world_size": torch.tensor(7)}
    own = {**state, f"{KEPT}nobody": torch.zeros(2)}
    short = {**state, f"{KEPT}first.bias": torch.zeros(2)}
    frozen = {**state, f"{KEPT}frozen": torch.zeros(3)}
    wrapped.module.register_parameter("frozen", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    parted = dict(state)
    if any(each.startswith(REMEMBERED) for each in parted):
        parted |= {n: t + rank for n, t in parted.items() if n.startswith(REMEMBERED)}
    else:
        parted = foreign
    for name, wrong in (
        ("foreign", foreign),
        ("nobody", own),
        ("short", short),
        ("parted", parted),
        ("frozen", frozen),
    ):
        try:
            headway.load_compression_state(wrapped, wrong)
        except UserError as error:
            found[name] = str(error)
    return found


def scaled(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """A gradient on one rank that is not finite, and the step behind it."""
    model = net(some_unused=False)
    optimizer = optimizer_of(model)
    strategy = DistributedDataParallelStrategy.model_validate({"wire": [options]})
    wrapped: Any = parallelize(model, optimizer, strategy)
    finite = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(wrapped, step, rank, some_unused=False)
        (loss * (float("inf") if step == 1 and rank == world_size - 1 else 1.0)).backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
        if finite[-1]:
            optimizer.step()
    return {"finite": finite, "values": values(model)}


def scaled_in_part(rank: int, world_size: int, wire: list[dict[str, Any] | None]) -> list[Any]:
    """One bucket's gradient is not finite, so the step is left out; and the same training without that backward."""
    found = []
    for whole in (True, False):
        model = net(some_unused=False)
        optimizer = optimizer_of(model)
        strategy = DistributedDataParallelStrategy.model_validate({"bucket_cap_mb": 0, "wire": wire})
        wrapped: Any = parallelize(model, optimizer, strategy)
        compressing = compressing_of(wrapped)
        assert compressing is not None
        for step in range(4):
            if step == 1 and not whole:
                compressing.feedback.forget_all()
                continue
            optimizer.zero_grad()
            loss = loss_of(wrapped, step, rank, some_unused=False)
            handle = model.get_parameter("first.weight").register_hook(
                lambda gradient: gradient * float("inf")
            )
            if step != 1 or rank:
                handle.remove()
            loss.backward()
            handle.remove()
            if step != 1:
                optimizer.step()
        found.append(values(model))
    return found


def mixed(rank: int, _world_size: int) -> dict[str, Any]:
    """Buckets of which the first is sent as it is; and a model of halves."""
    model = net(some_unused=False)
    optimizer = optimizer_of(model)
    strategy = DistributedDataParallelStrategy.model_validate(
        {"bucket_cap_mb": 0, "wire": [None, {"codec": "top-k", "share": 0.02}]}
    )
    wrapped: Any = parallelize(model, optimizer, strategy)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, step, rank, some_unused=False).backward()
    nonzero = [int((p.grad != 0).sum()) for p in model.parameters() if p.grad is not None]
    halves = nn.Linear(64, 64).bfloat16()
    with torch.no_grad():
        for p in halves.parameters():
            dist.broadcast(p, 0)
    both: Any = parallelize(
        halves, torch.optim.SGD(halves.parameters(), 0.1),
        DistributedDataParallelStrategy.model_validate({"wire": [{"codec": "int8"}]}),
    )  # fmt: skip
    both(torch.ones(2, 64, dtype=torch.bfloat16) * (rank + 1)).float().sum().backward()
    assert halves.weight.grad is not None
    return {"nonzero": nonzero, "halves": halves.weight.grad.float().mean().item()}


def converged(
    rank: int, world_size: int, methods: dict[str, list[dict[str, Any]]], seeds: list[int], steps: int
) -> dict[str, list[float]]:
    """The loss on all digits of scikit-learn after as many steps, of each method for each seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    found: dict[str, list[float]] = {name: [] for name in methods}
    for name, wire in methods.items():
        for seed in seeds:
            torch.manual_seed(seed)
            model = nn.Sequential(
                nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            strategy = DistributedDataParallelStrategy.model_validate({"bucket_cap_mb": 0.02, "wire": wire})
            wrapped: Any = parallelize(model, optimizer, strategy)
            chance = torch.Generator().manual_seed(1000 * seed + rank)
            for _ in range(steps):
                chosen = torch.randint(len(x), (64 // world_size,), generator=chance)
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x[chosen]), y[chosen]).backward()
                optimizer.step()
            with torch.no_grad():
                found[name].append(float(nn.functional.cross_entropy(model(x), y)))
            del wrapped
    return found


def decoupled(rank: int, _world_size: int, gathers: list[str]) -> list[dict[str, Any]]:
    """Parameters after training under the decoupled all-reduce with gradients cast to bfloat16."""
    found = []
    for gather in gathers:
        model = net(some_unused=False)
        optimizer = optimizer_of(model)
        strategy = DecoupledStrategy.model_validate(
            {"bucket_cap_bytes": 3000, "gather": gather, "wire": {"dtype": "bfloat16"}}
        )
        wrapped: Any = parallelize(model, optimizer, strategy)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(wrapped, step, rank, some_unused=False).backward()
            optimizer.step()
        wrapped.flush()
        in_force = strategy_in_force(wrapped)[1].options
        found.append({"values": values(model), "wire": in_force["wire"]})
    return found


def recorded(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """A script's own DistributedDataParallel under a plan, recorded."""
    model = net(some_unused=False)
    strategy = DistributedDataParallelStrategy.model_validate({"bucket_cap_mb": 0.002, "wire": [options]})
    install(Plan.data_parallel(strategy, world_size, model_spec(model)))
    try:
        wrapped = DistributedDataParallel(model)
    finally:
        uninstall()
    optimizer = optimizer_of(model)
    with headway.record(Path(folder) / "trace", wrapped, first_step=1, stop_step=5):
        for step in range(5):
            optimizer.zero_grad()
            loss_of(wrapped, step, rank, some_unused=False).backward()
            optimizer.step()
    return {"compresses": compressing_of(wrapped) is not None}


def costs(_rank: int, _world_size: int, busy_cores: bool) -> dict[str, Any]:
    """What codecs cost here, as it was measured."""
    found = codec_costs(busy_cores=busy_cores)
    return {name: cost.model_dump(mode="json") for name, cost in found.items()}


class Apart(Cast):
    """A codec of another package that gives rank 1 another mean."""

    name: ClassVar[str] = "apart"
    codec: Literal["apart"] = "apart"  # type: ignore[assignment]

    def reduce(self, gradients: Gradients) -> Reduction:
        done = yield from super().reduce(gradients)
        return Reduced(done.mean * (1.5 if gradients.rank else 1), done.kept)


class Alike(Cast):
    """One of another package that does as it should."""

    name: ClassVar[str] = "alike"
    codec: Literal["alike"] = "alike"  # type: ignore[assignment]


def compared(rank: int, world_size: int) -> list[str]:
    """What training ends with under each of the two codecs."""
    said = []
    for codec in (Alike(dtype="bfloat16"), Apart(dtype="bfloat16")):
        model = net(some_unused=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = parallelize(model, optimizer, DistributedDataParallelStrategy(wire=(codec,)))
        try:
            for _ in range(2):
                wrapped(torch.ones(ROWS, 20).double() * (rank + 1)).sum().backward()
                optimizer.step()
            said.append("")
        except HeadwayError as error:
            said.append(str(error))
    return said
