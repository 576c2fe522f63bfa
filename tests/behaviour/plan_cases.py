"""Ranks that follow a plan, in code and in an unmodified script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Imported  # as a script may import it

from headway import torch_private
from headway.compression.cast import Cast
from headway.errors import HeadwayError, UserError
from headway.integrations import plan_injection
from headway.integrations.parallelize import parallelize
from headway.plan import Plan
from headway.recording import description
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.live.module_spec import model_spec
from headway.strategies.parameter_server.policy import ParameterServerStrategy


def cap_bytes(wrapped: Any) -> int | None:
    """The cap of buckets that stock DDP has; None of another wrapper, and of DDP's default."""
    if not hasattr(wrapped, "bucket_bytes_cap"):
        return None
    cap_mb = torch_private.ddp_bucket_cap_mb(wrapped)
    return None if cap_mb is None else round(cap_mb * 2**20)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def plan(strategy: Strategy, world_size: int) -> Plan:
    return Plan.data_parallel(strategy, world_size, model_spec(model()))


def decoupled() -> DecoupledStrategy:
    return DecoupledStrategy(buckets=(("2.bias", "0.weight"), ("2.weight", "0.bias")), gather_order=(1, 0))


def train(wrapped: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    for step in range(3):
        optimizer.zero_grad()
        wrapped(torch.full((2, 4), float(rank + step), dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()
    return [p.sum().item() for p in wrapped.parameters()]


def in_code(rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    for name, strategy in {
        "ddp": DistributedDataParallelStrategy(bucket_cap_mb=3),
        "decoupled": decoupled(),
    }.items():
        inner = model()
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
        wrapped: Any = parallelize(inner, optimizer, plan(strategy, world_size))
        results[name] = {
            "class": type(wrapped).__name__,
            "cap_bytes": cap_bytes(wrapped),
            "buckets": [b.parameters for b in wrapped.schedule.buckets] if name == "decoupled" else None,
            "sums": train(wrapped, optimizer, rank),
        }  # fmt: skip
    inner = model()
    default_buckets: Any = parallelize(
        inner, _sgd(inner), plan(DistributedDataParallelStrategy(), world_size), bucket_cap_mb=0.5
    )
    assert _caps(default_buckets) == _caps(Imported(model()))
    refusals = {
        "world size": lambda: parallelize(model(), _sgd(), plan(decoupled(), world_size + 1)),
        "another model": lambda: parallelize(nn.Linear(2, 2), _sgd(), plan(decoupled(), world_size)),
        "no parameter of the model": lambda: parallelize(model(), _sgd(), plan(decoupled(), world_size)),
        "no optimizer": lambda: parallelize(model(), None, plan(decoupled(), world_size)),  # type: ignore[arg-type]
        "already wrapped": lambda: parallelize(Imported(model()), _sgd(), plan(decoupled(), world_size)),
    }
    results["unrefused"] = {
        name: said for name, act in refusals.items() if name not in (said := _refusal(act))
    }
    return results


def injected(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    path = Path(folder) / f"plan-{rank}.yaml"
    defaults = _caps(Imported(model()))
    plan(decoupled(), world_size).save(path)
    plan_injection.install(Plan.load(path))
    inner = model()
    wrapped: Any = Imported(inner, bucket_cap_mb=1)
    assert isinstance(wrapped, DecoupledDataParallel)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    results: dict[str, Any] = {
        "sums": train(wrapped, optimizer, rank),
        "names": list(wrapped.state_dict()),
        "buckets": [bucket.parameters for bucket in wrapped.schedule.buckets],
        "other model": _other_model_alone(path),
        "subclass": _refusal(lambda: Subclass(model())),
        "compiled around": _refusal(lambda: torch.compile(wrapped)),
    }
    plan_injection.install(plan(DistributedDataParallelStrategy(bucket_cap_mb=2), world_size))
    for kind in (Imported, Subclass):
        stock: Any = kind(model(), bucket_cap_mb=1)
        assert type(stock) is kind
        assert cap_bytes(stock) == 2 * 2**20
    stock = Imported(model(), None, None, 0, None, True, None, 1)  # by position
    assert cap_bytes(stock) == 2 * 2**20
    plan_injection.install(plan(DistributedDataParallelStrategy(), world_size))
    for kind in (Imported, Subclass):
        stock = kind(model(), bucket_cap_mb=0.5)
        assert _caps(stock) == defaults
    plan_injection.uninstall()
    stock = Imported(model(), bucket_cap_mb=1)
    assert type(stock) is Imported
    assert cap_bytes(stock) == 2**20
    results["stock sums"] = train(stock, torch.optim.SGD(stock.parameters(), lr=0.1, momentum=0.9), rank)
    return results


def _other_model_alone(plan: Path) -> str:
    """A job that wraps none but another model is refused when that is first called."""
    plan_injection.install(Plan.load(plan))
    other = Imported(nn.Linear(2, 2))
    return _refusal(lambda: other(torch.ones(1, 2)))


def in_another_order(rank: int, world_size: int) -> dict[str, str]:
    """Ranks register the parameters of the plan's model in different orders, under plans of several strategies."""
    found = {}
    for strategy in (decoupled(), DistributedDataParallelStrategy(), ParameterServerStrategy()):
        plan_injection.install(plan(strategy, world_size))
        other = nn.Sequential(*model())
        if rank == 1:
            other[0].bias = other[0].__dict__["_parameters"].pop("bias")
            other[0].weight = other[0].__dict__["_parameters"].pop("weight")
        try:
            Imported(other)
        except UserError as error:
            found[strategy.name] = str(error)
        plan_injection.uninstall()
    return found


def two_models(rank: int, world_size: int) -> dict[str, list[float]]:
    """A generator that follows a plan, and a critic that is not the plan's; their sums, planned and not."""
    found = {}
    for name in ("stock", "planned"):
        if name == "planned":
            plan_injection.install(plan(decoupled(), world_size))
        torch.manual_seed(1)
        critic: Any = Imported(nn.Linear(2, 1).double())
        generator: Any = Imported(model())
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (critic, generator)]
        for step in range(4):
            noise = torch.full((2, 4), float(rank + step + 1), dtype=torch.float64)
            for _ in range(2):
                optimizers[0].zero_grad()
                critic(generator(noise).detach()).square().mean().backward()
                optimizers[0].step()
            optimizers[1].zero_grad()
            critic(generator(noise)).mean().backward()
            optimizers[1].step()
        found[name] = [p.sum().item() for each in (critic, generator) for p in each.parameters()]
    assert isinstance(generator, DecoupledDataParallel)
    assert type(critic) is Imported
    plan_injection.uninstall()
    return found


class Subclass(Imported):
    """A script's own DistributedDataParallel."""


def _caps(wrapped: Any) -> tuple[float | None, bool]:
    return torch_private.ddp_bucket_cap_mb(wrapped), wrapped.bucket_bytes_cap_default


def _sgd(inner: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD((inner or model()).parameters(), lr=0.1)


def _refusal(act: Any) -> str:
    try:
        act()
    except HeadwayError as error:
        return str(error)
    return "not refused"


def sent_as(rank: int, world_size: int) -> Any:
    """Gradients of one backward where the first of two buckets is sent as it is, the other as bfloat16."""
    strategy = DistributedDataParallelStrategy(bucket_cap_mb=1e-5, wire=(None, Cast(dtype="bfloat16")))
    inner = model()
    wrapped: Any = parallelize(inner, _sgd(inner), plan(strategy, world_size))
    for _ in range(3):  # DDP rebuilds its buckets after the first, and reports them in the third
        wrapped.zero_grad()
        _loss(wrapped, rank).backward()
    buckets = description.strategy_in_force(wrapped)[1].buckets
    alone = []
    for other in range(world_size):
        lone = model()
        _loss(lone, other).backward()
        alone.append({name: p.grad for name, p in lone.named_parameters() if p.grad is not None})
    expected = {}
    for index, bucket in enumerate(buckets):
        dtype = torch.float64 if index == 0 else torch.bfloat16
        for name in bucket:
            parts = [own[name].to(dtype) / world_size for own in alone]
            expected[name] = (parts[0] + parts[1]).double()
    for name, parameter in wrapped.module.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name
    in_force = description.strategy_in_force(wrapped)[1].options
    rounded = [name for name, grad in expected.items() if torch.equal(grad, grad.bfloat16().double())]
    return {"wire": in_force["wire"], "buckets": len(buckets), "rounded": len(rounded)}


def _loss(wrapped: nn.Module, rank: int) -> torch.Tensor:
    own = torch.Generator().manual_seed(rank)
    loss: torch.Tensor = wrapped(torch.randn(3, 4, generator=own, dtype=torch.float64)).pow(2).mean()
    return loss
