"""Ranks of the tests of settings: they run the files that were written, and say what torch made of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.interop.settings import ddp, fsdp2
from headway.interop.settings.request import SettingsRequest
from headway.job import Job
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.plan import Plan
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.ddp import runtime
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.stock import named_buckets
from headway.strategies.registry import policy_named

STEPS = 4
GATHERS = {
    "all_gather_single",
    "all_gather_into_tensor",
}  # the latter is FSDP2's in earlier versions of torch
SCATTERS = {"reduce_scatter_single", "reduce_scatter_tensor"}


def layers(count: int = 6) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(40, 40) for _ in range(count)))


def asked_of(module: nn.Module, name: str, options: dict[str, Any]) -> SettingsRequest:
    spec = model_spec(module)
    strategy = policy_named(name)(**options)
    return SettingsRequest(Plan.data_parallel(strategy, dist.get_world_size(), spec), (spec,))


def imported(text: str) -> dict[str, Any]:
    """What a file defines."""
    names: dict[str, Any] = {}
    exec(compile(text, "settings", "exec"), names)
    return names


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 40, generator=torch.Generator().manual_seed(100 * step + rank))


# DDP ---------------------------------------------------------------------------------------------------


def real_buckets(
    rank: int, _world_size: int, cases: list[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """For each case, the sizes of the buckets that the plan decides, and those that DDP says it has."""
    found = []
    for name, options in cases:
        module = layers()
        asked = asked_of(module, name, options)
        assert asked.data is not None
        schedule = asked.data.decide(Job.of(model_spec(module), 2))
        assert isinstance(schedule, BucketSchedule)
        wrapped = imported(ddp.settings(asked).files[ddp.FILE])["wrap"](module)
        for step in range(3):  # the second one has the buckets of the first's order, the third one says so
            wrapped(batch(step, rank)).square().mean().backward()
        logged = wrapped._get_ddp_logging_data()
        found.append(
            {
                "planned": [list(bucket.parameters) for bucket in schedule.buckets],
                "real": [list(bucket) for bucket in named_buckets(wrapped)],
                "planned_bytes": [bucket.size_bytes for bucket in schedule.buckets],
                "real_bytes": [int(size) for size in logged["rebuilt_bucket_sizes"].split(",")],
            }
        )
    return found


def hooked(rank: int, _world_size: int) -> list[bool]:
    """Whether gradients under the hook of the settings are those of the plan itself, but for the type's rounding."""
    found = []
    for dtype in ("float16", "bfloat16"):
        asked = asked_of(layers(), "ddp", {"bucket_cap_mb": 0.01, "wire": [{"dtype": dtype}]})
        assert isinstance(asked.data, DistributedDataParallelStrategy)
        names = imported(ddp.settings(asked).files[ddp.FILE])
        if dtype == "bfloat16":
            _refused_on_gloo(names)
        theirs, ours = names["wrap"](layers()), runtime.wrap(layers(), asked.data)
        plain = DistributedDataParallel(layers())
        for model in (ours, theirs, plain):
            model(batch(0, rank)).square().mean().backward()
        rounding = 4 * torch.finfo(getattr(torch, dtype)).eps
        alike = all(
            torch.allclose(torch.tensor(one), torch.tensor(other), rtol=rounding, atol=rounding * 1e-3)
            for one, other in zip(_gradients(ours), _gradients(theirs), strict=True)
        )
        found.append(alike and _gradients(ours) != _gradients(plain))
    return found


def _refused_on_gloo(names: dict[str, Any]) -> None:
    """See torch refuse its hook for bfloat16 where there is no NCCL; under another name it takes it."""
    with pytest.raises(TypeError, match="NCCL"):
        names["wrap"](layers())
    hook = names["bf16_compress_hook"]

    def renamed(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    renamed.__annotations__.clear()
    names["bf16_compress_hook"] = renamed


def _gradients(model: nn.Module) -> list[list[float]]:
    return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]


# FSDP2 -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A parameter of its own, modules that are called, and one whose inner module is used without being called."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.scale = nn.Parameter(torch.ones(40)) if own else None
        self.first = nn.Linear(40, 40)
        self.attention = nn.MultiheadAttention(40, 4, batch_first=True)
        self.norm = nn.LayerNorm(40)
        self.last = nn.Linear(40, 40)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs if self.scale is None else inputs * self.scale)[None]
        hidden = self.norm(self.attention(hidden, hidden, hidden, need_weights=False)[0])
        out: torch.Tensor = self.last(hidden)
        return out


def sharded(rank: int, world_size: int, own: bool, channels: int) -> dict[str, Any]:
    """The groups, the collectives of a step, how far gathers are ahead, and parameters next to one process's."""
    model = Net(own)
    reference = copy.deepcopy(model)
    spec = model_spec(model)
    strategy = DecoupledStrategy(bucket_cap_bytes=8000, channels=channels)
    asked = SettingsRequest(Plan.data_parallel(strategy, world_size, spec), (spec,))
    settings = fsdp2.settings(asked)
    defined = imported(settings.files[fsdp2.FILE])
    events: list[str] = []
    _watch(model, [group[0] for group in defined["GROUPS"]], events)
    model = defined["shard"](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        events.append("step")
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        alone.zero_grad()
        losses = [reference(batch(step, each)).square().mean() for each in range(world_size)]
        torch.stack(losses).mean().backward()
        alone.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    last = len(events) - events[::-1].index("step")
    return {
        "groups": defined["GROUPS"],
        "lacks": list(settings.lacks),
        "events": events[last:],
        "largest_difference": max(float((p.full_tensor() - q).abs().max()) for p, q in pairs),
    }


class Tied(nn.Module):
    """The last layer has the first one's weights, those between are frozen but for one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(40, 40, bias=False)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, 40)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.middle(self.frozen(self.first(inputs)).tanh()).tanh())
        return out


def _train_both(model: nn.Module, reference: nn.Module, rank: int, world_size: int) -> None:
    """Some steps of ``model`` on this rank's batches, and of ``reference`` on those of all."""
    optimizers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for each in (model, reference)
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        losses = [reference(batch(step, each)).square().mean() for each in range(world_size)]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def sharded_tied_and_frozen(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters after training next to one process's, and which of them are sharded."""
    model = Tied()
    reference = copy.deepcopy(model)
    spec = model_spec(model)
    strategy = DecoupledStrategy(bucket_cap_bytes=2000)
    asked = SettingsRequest(Plan.data_parallel(strategy, world_size, spec), (spec,))
    model = imported(fsdp2.settings(asked).files[fsdp2.FILE])["shard"](model)
    _train_both(model, reference, rank, world_size)
    sharded = {name: p for name, p in model.named_parameters() if hasattr(p, "full_tensor")}
    whole = dict(reference.named_parameters())
    return {
        "largest_difference": max(
            float((p.full_tensor() - whole[n]).abs().max()) for n, p in sharded.items()
        ),
        "frozen is whole": not any(name.startswith("frozen") for name in sharded),
        "parameters": sorted(sharded),
        "expected parameters": sorted(name for name, p in whole.items() if p.requires_grad),
    }


def with_passes(rank: int, world_size: int, tool: str) -> float:
    """The largest difference of parameters from those of one process under the plan's own passes, after training."""
    passes = (Precision(dtype="bfloat16", modules=("0", "2")), Recompute(modules=("1", "3")))
    model, reference = layers(), layers()
    spec = model_spec(model)
    strategy = policy_named("decoupled" if tool == "fsdp2" else "ddp")()
    plan = Plan.data_parallel(strategy, world_size, spec).model_copy(update={"passes": passes})
    asked = SettingsRequest(plan, (spec,))
    if tool == "fsdp2":
        model = imported(fsdp2.settings(asked).files[fsdp2.FILE])["shard"](model)
    else:
        model = imported(ddp.settings(asked).files[ddp.FILE])["wrap"](model)
    for one in passes:
        one.apply(reference, None)
    _train_both(model, reference, rank, world_size)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    whole = ((p.full_tensor() if hasattr(p, "full_tensor") else p, q) for p, q in pairs)
    return max(float((p - q).abs().max()) for p, q in whole)


def _watch(model: nn.Module, names: list[str], events: list[str]) -> None:
    """Note collectives as they are asked for, and when the first module of a group begins to compute."""
    for call in GATHERS | SCATTERS:
        original = getattr(dist, call, None)

        def noted(*arguments: Any, _call: str = call, _original: Any = original, **options: Any) -> Any:
            events.append("gather" if _call in GATHERS else "scatter")
            return _original(*arguments, **options)

        if original is not None:
            setattr(dist, call, noted)
    for name in names:
        module = model.get_submodule(name)
        forward = module.forward

        def begun(*arguments: Any, _forward: Any = forward, _name: str = name, **options: Any) -> Any:
            events.append(_name)
            return _forward(*arguments, **options)

        module.forward = begun
