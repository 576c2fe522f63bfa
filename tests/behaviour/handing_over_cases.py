"""What ranks do for the tests of stock DDP in the place of a decoupled model's engine."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.behaviour.adaptive_models import adaptive
from tests.behaviour.tuning_cases import OPTIMIZERS, STEPS, Script, batch, forms_of, net, schedule_of, seen
from torch import nn

from headway.errors import PlanError, UnsupportedError
from headway.recording.description import strategy_in_force
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.proposals import Setting, Trial
from headway.strategies.adaptive.tuner import tune
from headway.strategies.adaptive.wrapper import AdaptiveDataParallel
from headway.strategies.candidates import Candidate
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decisions import DECISIONS_VARIABLE
from headway.strategies.decoupled import deferred
from headway.strategies.decoupled.buckets import LiveBucket
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.shortlist import candidate
from headway.strategies.live.channels import retirement
from headway.strategies.live.module_spec import model_spec
from headway.strategies.parameter_server.policy import ParameterServerStrategy


def _hooks(module: nn.Module) -> int:
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in module.modules())


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if "headway" in thread.name)


def _live_buckets() -> int:
    gc.collect()
    return sum(isinstance(each, LiveBucket) for each in gc.get_objects())


def _state_of_the_process(wrapped: AdaptiveDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "stock": wrapped.is_stock,
        "hooks": _hooks(wrapped.module),
        "watched state": type(optimizer.state) is not defaultdict,
        "own zero_grad": "zero_grad" in optimizer.__dict__,
        "registered": deferred.anything_registered(),
        "ordinary": all(type(parameter) is nn.Parameter for parameter in wrapped.parameters()),
        "interval": round(sys.getswitchinterval(), 6),
        "buckets": _live_buckets(),
        "threads": _threads(),
        "in force": strategy_in_force(wrapped)[0],
    }


def what_is_left(rank: int, world_size: int) -> Any:
    """A few steps in each form, and what the process and the wrapper have of ours behind them."""
    before = _descriptors()
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512))
    optimizer = OPTIMIZERS["adam"](wrapped.parameters())
    script = Script(wrapped, optimizer, rank, world_size)
    calls: list[int] = []
    wrapped.register_forward_hook(lambda *_: calls.append(1))
    names = list(wrapped.state_dict())
    found: dict[str, Any] = {}

    def steps(name: str) -> None:
        script.run(3)
        found[name] = _state_of_the_process(wrapped, optimizer)

    steps("ours")
    wrapped.use_stock_ddp(DistributedDataParallelStrategy(bucket_cap_mb=0.0002), keep_connections=True)
    assert wrapped.strategy.bucket_cap_mb == 0.0002
    steps("smaller buckets")
    found["buckets"] = [len(wrapped.reducer._get_zeros_like_grad_buckets())]
    wrapped.use_stock_ddp(keep_connections=True)
    assert wrapped.strategy == wrapped.stock_strategy
    steps("aside")
    found["buckets"].append(len(wrapped.reducer._get_zeros_like_grad_buckets()))
    reducer = weakref.ref(wrapped.reducer)
    wrapped.reschedule(schedule_of(model_spec(wrapped.module), 300, "gradients", 2))
    steps("ours again")
    wrapped.use_stock_ddp()
    steps("for good")
    found["for good"]["descriptors"] = _descriptors() - before
    wrapped.reschedule(schedule_of(model_spec(wrapped.module), 300, "parameters", 1))
    steps("back")
    assert list(wrapped.state_dict()) == names
    return {"found": found, "calls": len(calls), "reducer": reducer() is None, **seen(wrapped, optimizer)}


def what_is_left_alone(world_size: int) -> Any:
    model = net()
    script = Script(model, OPTIMIZERS["adam"](model.parameters()), -1, world_size)
    for _ in range(6):
        script.run(3)
    return seen(model, script.optimizer)


def through_servers(rank: int, world_size: int) -> Any:
    """Ours, servers, other servers, stock DDP, servers and ours again, with what scripts do meanwhile."""
    before = _descriptors()
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512))
    script = Script(wrapped, OPTIMIZERS["adam"](wrapped.parameters()), rank, world_size)
    script.sometimes_evaluate = script.sometimes_accumulate = True
    unequal = ParameterServerStrategy(bucket_cap_mb=0.0002, shares=tuple(range(1, world_size + 1)), pieces=2)
    found: dict[str, Any] = {}

    def steps(name: str) -> None:
        script.run(4)
        found[name] = _state_of_the_process(wrapped, script.optimizer)

    steps("ours")
    wrapped.use_stock_ddp(ParameterServerStrategy(), keep_connections=True)
    steps("servers")
    wrapped.use_stock_ddp(unequal, keep_connections=True)
    assert wrapped.strategy == unequal
    steps("unequal")
    wrapped.use_stock_ddp(keep_connections=True)
    steps("stock")
    wrapped.use_stock_ddp(unequal)
    steps("servers again")
    with pytest.raises(PlanError, match="server shares"):
        wrapped.use_stock_ddp(ParameterServerStrategy(shares=(1,) * (world_size + 1)))
    wrapped.reschedule(schedule_of(model_spec(wrapped.module), 300, "parameters", 1))
    steps("ours again")
    wrapped.use_stock_ddp()
    steps("for good")
    retirement.end_unused()
    return {"found": found, "descriptors": _descriptors() - before, **seen(wrapped, script.optimizer)}


def through_servers_alone(world_size: int) -> Any:
    model = net()
    script = Script(model, OPTIMIZERS["adam"](model.parameters()), -1, world_size)
    script.sometimes_accumulate = True
    for _ in range(7):
        script.run(4)
    return seen(model, script.optimizer)


def joined_through_servers(rank: int, world_size: int, initial: bool) -> Any:
    """Uneven inputs, one rank without any, under stock DDP and while servers carry gradients."""
    found = []
    for strategy in (DistributedDataParallelStrategy(), ParameterServerStrategy(bucket_cap_mb=0.0002)):
        wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512))
        wrapped.use_stock_ddp(strategy)
        optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
        with wrapped.join(divide_by_initial_world_size=initial):
            for step in range(4 * rank):
                optimizer.zero_grad()
                x, y = batch(step, rank, world_size)
                nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
        found.append(seen(wrapped, optimizer) | {"in force": wrapped.strategy.name})
    return found


def frozen_in_turns(rank: int, world_size: int) -> Any:
    """Halves of a model are frozen in turns while servers carry its gradients, over the connections that they have."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512))
    wrapped.use_stock_ddp(ParameterServerStrategy(bucket_cap_mb=0.0002))
    optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
    channels = []
    for step in range(12):
        _freeze_half(wrapped, step)
        optimizer.zero_grad()
        x, y = batch(step, rank, world_size)
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
        channels.append(
            sorted(each.native_id or 0 for each in threading.enumerate() if "headway" in each.name)
        )
    return seen(wrapped, optimizer) | {"kept": channels[0] != [] and channels == [channels[0]] * 12}


def frozen_in_turns_alone(world_size: int) -> Any:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(12):
        _freeze_half(model, step)
        optimizer.zero_grad()
        x, y = batch(step, -1, world_size)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return seen(model, optimizer)


def _freeze_half(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(step % 3 == 0 or number % 2 == step % 2)


class AlternatesWithStock:
    """Proposes schedules of ours and stock DDP in turns, and says that the trial numbered ``best`` is best."""

    learns = False

    def __init__(self, best: int) -> None:
        self._best = best
        self._left: list[Candidate] = []
        self.settings: list[Setting] = []

    def begin(self, setting: Setting) -> None:
        self.settings.append(setting)
        model, stock_ddp = setting.question.model, setting.question.stock
        schedules: list[BucketSchedule] = [
            schedule_of(model, 200, "parameters", 1), schedule_of(model, 400, "gradients", 2)
        ]  # fmt: skip
        ours = [candidate(f"number {n}", schedule, model) for n, schedule in enumerate(schedules)]
        stock = [] if stock_ddp is None else [Candidate(name="stock DDP", strategy=stock_ddp)]
        self._left = [ours[0], *stock, ours[1], *stock, ours[0], *stock]

    def is_ready(self) -> bool:
        return True

    def propose(self) -> Candidate | None:
        return self._left.pop(0) if self._left else None

    def tell(self, candidate: Candidate, measured_ms: float) -> None:
        assert measured_ms > 0

    def choose(self, trials: Sequence[Trial]) -> int:
        return min(self._best, len(trials) - 1)


def tuned_in_turns(rank: int, world_size: int, name: str, best: int, decisions: str) -> Any:
    """A tuner that goes over to stock DDP and back several times, with what scripts do meanwhile."""
    logging.getLogger("headway").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DECISIONS_VARIABLE, decisions)
        wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=524), bucket_cap_mb=0.0005)
        tune(wrapped, AlternatesWithStock(best))
        script = Script(wrapped, OPTIMIZERS[name](wrapped.parameters()), rank, world_size)
        script.sometimes_evaluate = script.sometimes_accumulate = True
        forms: list[str] = []
        script.run(
            STEPS, lambda _step: forms.append("stock" if wrapped.is_stock else wrapped.schedule.gather)
        )
    return seen(wrapped, script.optimizer) | {
        "forms": forms,
        "engine": wrapped.engine is not None,
        "strategy": wrapped.tuning.strategy.describe(),
        "verdict": wrapped.tuning.verdict,
        "written": Path(decisions).exists(),
    }


def several_backwards(rank: int, world_size: int) -> Any:
    """Two forwards and then two backwards, of which stock DDP would reduce one."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=512), tune=True)
    optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for number in (step, step + 1000):
            x, y = batch(number, rank, world_size)
            losses.append(nn.functional.mse_loss(wrapped(x), y))
        for loss in losses:
            loss.backward()
        optimizer.step()
    return seen(wrapped, optimizer) | {"forms": forms_of(wrapped.tuning), "said": wrapped.tuning.describe()}


def several_backwards_alone(world_size: int) -> Any:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in (step, step + 1000):
            x, y = batch(number, -1, world_size)
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return seen(model, optimizer)


class _Opaque:
    """What nobody takes apart."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class _Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.opaque = False

    def forward(self, x: torch.Tensor) -> Any:
        found = self.inner(x)
        return _Opaque(found) if self.opaque else found


class _Looks:
    def before_forward(self, *, learning: bool) -> None: ...


def counted_backwards(rank: int, world_size: int) -> list[int]:
    """How many backwards were counted under stock DDP after each of several kinds."""
    wrapped: Any = adaptive(_Returning(), DecoupledStrategy(bucket_cap_bytes=512))
    wrapped.use_stock_ddp()
    wrapped.tuner = _Looks()
    x, y = batch(0, rank, world_size)
    found = []
    for _ in range(2):  # attacks on inputs, and the training behind them
        attacked = x.clone().requires_grad_()
        torch.autograd.grad(nn.functional.mse_loss(wrapped(attacked), y), attacked)
    found.append(wrapped.reductions)
    nn.functional.mse_loss(wrapped(x), y).backward()
    found.append(wrapped.reductions)
    (wrapped(x).sum() + wrapped(2 * x).sum()).backward()
    found.append(wrapped.reductions)
    with wrapped.no_sync():
        wrapped(x).sum().backward()
    found.append(wrapped.reductions)
    wrapped.module.opaque = True
    wrapped(x).value.sum().backward()
    found.append(wrapped.reductions)
    return found


def refused(rank: int, world_size: int) -> list[str]:
    """Moments at which nothing can be handed over."""
    found = []

    def trying(act: Any) -> None:
        try:
            act()
        except UnsupportedError as error:
            found.append(str(error))

    wrapped: Any = adaptive(net(), DecoupledStrategy(), process_group=None)
    with wrapped.join():
        trying(wrapped.use_stock_ddp)
        wrapped(batch(0, rank, world_size)[0]).sum().backward()
    loss = wrapped(batch(1, rank, world_size)[0]).sum()
    next(wrapped.parameters()).register_hook(lambda _: trying(wrapped.use_stock_ddp))
    loss.backward()
    assert not wrapped.is_stock
    assert isinstance(wrapped.stock_strategy, DistributedDataParallelStrategy)
    return found


def refused_by_stock_ddp(rank: int, world_size: int) -> Any:
    """A model that stock DDP refuses is trained as before."""
    model = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    wrapped: Any = adaptive(model, DecoupledStrategy(bucket_cap_bytes=256), tune=True)
    model[1].eval()  # else it would want a GPU
    script = Script(wrapped, OPTIMIZERS["sgd"](wrapped.parameters()), rank, world_size)
    script.run(STEPS)
    with pytest.raises(UnsupportedError, match="stock DDP cannot have this model"):
        wrapped.use_stock_ddp()
    script.run(2)
    return {
        "digest": seen(wrapped, script.optimizer)["digest"], "forms": forms_of(wrapped.tuning),
        "said": wrapped.tuning.describe(), "hooks": _hooks(wrapped.module),
    }  # fmt: skip


def refused_on_one_rank(rank: int, world_size: int) -> Any:
    """A rank that alone has no memory for stock DDP's buckets: no rank goes over."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=256))
    script = Script(wrapped, OPTIMIZERS["sgd"](wrapped.parameters()), rank, world_size)
    script.run(2)
    begin = wrapped._stock.begin

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    if rank == 1:
        wrapped._stock.begin = fails
    with pytest.raises(UnsupportedError, match="no room" if rank == 1 else "another rank has failed"):
        wrapped.use_stock_ddp()
    was_stock = wrapped.is_stock
    script.run(2)
    wrapped._stock.begin = begin
    wrapped.use_stock_ddp()
    script.run(2)
    return was_stock, wrapped.is_stock, seen(wrapped, script.optimizer)["digest"]


def alone_in_the_job(rank: int, world_size: int) -> Any:
    """A single worker that is to be tuned, which takes the same steps in the reference."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=256), tune=True)
    script = Script(wrapped, OPTIMIZERS["adam"](wrapped.parameters()), rank, world_size)
    script.run(STEPS)
    return seen(wrapped, script.optimizer) | {"stock": wrapped.is_stock, "said": wrapped.tuning.describe()}


class _TriesStock:
    """Tries stock DDP alone, for longer than anybody trains."""

    learns = False

    def begin(self, setting: Setting) -> None:
        assert setting.question.stock is not None
        self._stock = Candidate(name="stock DDP", strategy=setting.question.stock)

    def is_ready(self) -> bool:
        return True

    def propose(self) -> Candidate | None:
        return self._stock

    def tell(self, candidate: Candidate, measured_ms: float) -> None:
        """Nothing is decided."""

    def choose(self, trials: Sequence[Trial]) -> int:
        raise AssertionError(trials)


def handed_over_while_stock_is_tried(rank: int, world_size: int) -> Any:
    """The script hands its steps over by hand just when the tuner tries stock DDP."""
    wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=256))
    tune(wrapped, _TriesStock())
    script = Script(wrapped, OPTIMIZERS["sgd"](wrapped.parameters()), rank, world_size)
    script.run(8)
    tried = wrapped.is_stock and wrapped.tuner is not None
    wrapped.use_stock_ddp(DistributedDataParallelStrategy(bucket_cap_mb=0.001))
    script.run(4)
    return tried, wrapped.tuner is None, wrapped.strategy.describe(), wrapped.tuning.ended_early
