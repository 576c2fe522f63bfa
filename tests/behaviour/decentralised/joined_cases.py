"""What the ranks of ``test_joined`` do: ``headway.parallelize`` with plans of partial all-reduce."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from typing import Any

import torch
import torch.distributed as dist
from tests import limits
from tests.behaviour.decentralised.cases import _as_json, _sgd, _step
from tests.behaviour.decentralised.job import FEATURES, model, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.rpc import interface
from headway.strategies.live.module_spec import model_spec
from headway.strategies.partial_all_reduce.coordinator import child
from headway.strategies.partial_all_reduce.wrapper import PartialDataParallel

END_S = 30.0


def _planned(rank: int, world_size: int, module: nn.Module, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A model under a plan with ``options``, its optimizer, and its rounds so far."""
    rounds: list[dict[str, Any]] = []
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(rank)  # all begin with rank 0's
    optimizer = _sgd(module)
    strategy = headway.strategy("partial-all-reduce", **options)
    plan = headway.Plan.data_parallel(strategy, world_size, model_spec(module))
    wrapped = headway.parallelize(
        module, optimizer, plan, observer=lambda each: rounds.append(_as_json(each))
    )
    return wrapped, optimizer, rounds


def trains(rank: int, world_size: int, options: dict[str, Any], steps: int) -> Any:
    module = model()
    wrapped, optimizer, rounds = _planned(rank, world_size, module, options)
    for iteration in range(steps):
        _step(wrapped, optimizer, rank, iteration)
    wrapped.flush()
    ended = values(module)
    found = wrapped.coordinator
    ranks = headway.finish(wrapped, timeout_s=limits.stretched(END_S))
    dist.barrier()
    return {
        "rounds": rounds, "values": ended, "final": values(module), "ranks": ranks,
        "is_ddp": isinstance(wrapped, DistributedDataParallel), "generator": getattr(found, "generator", None),
        "names": sorted(wrapped.state_dict()),
    }  # fmt: skip


def trains_on(rank: int, world_size: int, places: str, options: dict[str, Any], steps: int) -> Any:
    """As ``trains``, with a host's name for each rank."""
    interface.host_name = lambda: places[rank]
    return trains(rank, world_size, options, steps)


def freezes(rank: int, world_size: int, options: dict[str, Any], begins_frozen: bool) -> Any:
    """A layer is frozen or thawed on the way, by rank 0 a step later; what only this rank counts is in buffers."""
    module = model()
    seen, levels = torch.zeros((), dtype=torch.int64), torch.tensor([0.0, -torch.inf])
    module.register_buffer("seen", seen)
    module.register_buffer("levels", levels)
    first = module.get_submodule("0")
    first.requires_grad_(not begins_frozen)
    wrapped, optimizer, rounds = _planned(rank, world_size, module, options)
    for iteration in range(8):
        if iteration == 3 + (rank == 0):
            first.requires_grad_(begins_frozen)
        seen += rank + 1
        levels[0] = rank
        _step(wrapped, optimizer, rank, iteration)
    wrapped.eval()
    module.requires_grad_(False)
    ranks = headway.finish(wrapped, timeout_s=limits.stretched(END_S))
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    return {"state": state, "ranks": ranks, "endings": [each["ending"] for each in rounds]}


def the_first_is_killed(rank: int, world_size: int) -> Any:
    """Rank 0, which has the coordinator, is killed after three steps: the others go on and finish."""
    module = model()
    wrapped, optimizer, rounds = _planned(rank, world_size, module, {"groups": "all"})
    wrapped.coordinator.granted(0.0)
    for iteration in range(8):
        if rank == 0 and iteration == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        _step(wrapped, optimizer, rank, iteration)
    ranks = headway.finish(wrapped, timeout_s=limits.stretched(END_S))
    return {"endings": [each["ending"] for each in rounds], "ranks": ranks, "final": values(module)}


def _refusal(act: Any) -> str:
    try:
        act()
    except headway.HeadwayError as error:
        return str(error)
    return "not refused"


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What is refused on every rank."""
    strategy: Any = headway.strategy("partial-all-reduce", groups="pairs")

    def wrapped(**options: Any) -> Any:
        return lambda: PartialDataParallel(model(), strategy=strategy, **options)

    groups = [dist.new_group([each]) for each in range(world_size)]
    found = {
        "mixed_precision": _refusal(wrapped(mixed_precision=object())),
        "process_group": _refusal(wrapped(process_group=groups[rank])),
        "unknown option": _refusal(wrapped(patience=2)),
        "SyncBatchNorm": _refusal(
            lambda: PartialDataParallel(
                nn.SyncBatchNorm.convert_sync_batchnorm(model()), strategy=strategy
            )
        ),
    }  # fmt: skip
    first = wrapped()()
    static = PartialDataParallel(
        model().float(),
        strategy=headway.strategy("partial-all-reduce", groups="static"),  # type: ignore[arg-type]
    )
    found["GradScaler"] = _refusal(lambda: _scaled_step(static))
    static._set_static_graph()
    headway.finish(static, timeout_s=limits.stretched(END_S))
    found["one model"] = _refusal(wrapped())
    found["compiled as a whole"] = _refusal(first.compile)
    found["register_comm_hook"] = _refusal(lambda: first.register_comm_hook(None, None))
    headway.finish(first, timeout_s=limits.stretched(END_S))
    second = wrapped()()  # after the first has finished
    headway.finish(second, timeout_s=limits.stretched(END_S))
    return {name: said for name, said in found.items() if name not in said}


def _scaled_step(wrapped: nn.Module) -> None:
    optimizer, scaler = _sgd(wrapped), torch.amp.GradScaler("cpu")
    scaler.scale(wrapped(torch.ones(4, FEATURES)).square().mean()).backward()
    scaler.step(optimizer)


def other_groups(rank: int, world_size: int, address: str, secret: str) -> str:
    """The coordinator that the environment names forms other groups than the plan."""
    os.environ[child.ADDRESS_VARIABLE], os.environ[child.SECRET_VARIABLE] = address, secret
    said = _refusal(lambda: _planned(rank, world_size, model(), {"groups": "pairs", "seed": 3}))
    dist.barrier()
    return said


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def answers_are_lost(
    rank: int, world_size: int, address: str, secret: str, pid: int, restart: list[str]
) -> Any:
    """Rank 1 hears the third decision never: the coordinator is killed when it has told it, or was about to.

    With ``restart`` nobody answers until rank 1's time for the vote is over; then it starts that command.
    """
    os.environ[child.ADDRESS_VARIABLE], os.environ[child.SECRET_VARIABLE] = address, secret
    module = model()
    wrapped, optimizer, rounds = _planned(rank, world_size, module, {"groups": "all"})
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        _kill_at_decision(wrapped.coordinator, pid, at=3)
    if restart:
        wrapped._rounds._time_limit_s = 1.0
    iteration, again = 0, None
    while not store.check([f"enough-{each}" for each in range(world_size)]):
        _step(wrapped, optimizer, rank, iteration)
        iteration += 1
        endings = [each["ending"] for each in rounds]
        if rank == 1 and restart and again is None and "uncertain" in endings:
            again = subprocess.Popen(restart, stdin=subprocess.PIPE)  # ends with this process
        if endings.count("committed") >= 5:
            store.set(f"enough-{rank}", "")
        time.sleep(0.01)  # alone it makes many steps
    wrapped.flush()
    ended = values(module)
    steps = wrapped.iteration
    headway.finish(wrapped, timeout_s=limits.stretched(END_S))
    return {"rounds": rounds, "values": ended, "steps": steps}


def _kill_at_decision(client: Any, pid: int, at: int) -> None:
    from headway.strategies.partial_all_reduce.coordinator import messages

    hear, seen = client._on_message, [0]

    def heard(state: Any, message: Any) -> None:
        if isinstance(message, messages.Decided) and message.committed is not None:
            seen[0] += 1
            if seen[0] == at:
                os.kill(pid, signal.SIGKILL)
                return
        hear(state, message)

    client._on_message = heard
