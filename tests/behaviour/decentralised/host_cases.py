"""What the ranks of ``test_hosts`` do: plans under which the ranks of a host are one worker."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import warnings
from typing import Any

import torch
import torch.distributed as dist
from tests import limits
from tests.behaviour.decentralised.cases import _as_json, _sgd, _step
from tests.behaviour.decentralised.job import loss, model, values
from tests.behaviour.decentralised.joined_cases import END_S, _refusal
from tests.behaviour.decentralised.recorded_cases import FIRST, STOP
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.recording.attach import record
from headway.strategies.live.module_spec import model_spec
from headway.strategies.partial_all_reduce.host_wrapper import HostDataParallel


def _wrapped(
    rank: int, module: nn.Module, optimizer: torch.optim.Optimizer, places: str, options: dict[str, Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """A model under a plan, whose ranks are on the host that has a letter in ``places``, and its rounds so far."""
    os.environ["HEADWAY_HOST"] = places[rank]
    rounds: list[dict[str, Any]] = []
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(rank)  # all begin with rank 0's
    strategy = headway.strategy("partial-all-reduce", within_hosts="all-reduce", **options)
    plan = headway.Plan.data_parallel(strategy, dist.get_world_size(), model_spec(module))
    wrapped = headway.parallelize(
        module, optimizer, plan, observer=lambda each: rounds.append(_as_json(each))
    )
    return wrapped, rounds


def _digest(module: nn.Module) -> str:
    tensors = [*module.parameters(), *module.buffers()]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def trains(
    rank: int, _world_size: int, places: str, options: dict[str, Any], steps: int, accumulation: int
) -> Any:
    """Returns the rounds of this rank, what it held after each step, what it ended with, and the final model."""
    module = model()
    optimizer = _sgd(module)
    wrapped, rounds = _wrapped(rank, module, optimizer, places, options)
    held = []
    for iteration in range(steps):
        optimizer.zero_grad()
        for part in range(accumulation):
            waits = wrapped.no_sync() if part < accumulation - 1 else contextlib.nullcontext()
            with waits:
                loss(wrapped, rank, accumulation * iteration + part).backward()
        optimizer.step()
        held.append(hashlib.sha256(repr([p.tolist() for p in module.parameters()]).encode()).hexdigest())
    wrapped.flush()
    ended = values(module)
    ranks = headway.finish(wrapped, timeout_s=limits.stretched(END_S))
    dist.barrier()
    return {
        "rounds": rounds, "values": ended, "final": values(module), "digest": _digest(module), "held": held,
        "ranks": ranks, "is_ddp": isinstance(wrapped, DistributedDataParallel),
        "names": sorted(wrapped.state_dict()), "finite": all(torch.isfinite(p).all() for p in module.parameters()),
    }  # fmt: skip


def skips(rank: int, _world_size: int, places: str) -> Any:
    """A scaler's step that overflows on one rank alone is no step of its host, and one of the other host."""
    module = model().float()
    optimizer = _sgd(module)
    wrapped, rounds = _wrapped(rank, module, optimizer, places, {"groups": "all"})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    scales = []
    for iteration in range(4):
        optimizer.zero_grad()
        inputs = torch.ones(4, 6) * (iteration + 1)
        out = wrapped(inputs).square().mean()
        factor = float("inf") if (iteration, rank) == (1, 3) else 1.0
        scaler.scale(out * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    steps = wrapped.iteration
    ranks = headway.finish(wrapped, timeout_s=limits.stretched(END_S))
    dist.barrier()
    return {
        "steps": steps,
        "scales": scales,
        "ranks": ranks,
        "digest": _digest(module),
        "rounds": len(rounds),
    }


def one_is_killed(rank: int, _world_size: int, places: str, victim: int) -> Any:
    """``victim`` is killed before its third step; ranks of its host end with an error, and others go on."""
    module = model()
    optimizer = _sgd(module)
    wrapped, rounds = _wrapped(rank, module, optimizer, places, {"groups": "all"})
    said = ""
    try:
        for iteration in range(8):
            if rank == victim and iteration == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            _step(wrapped, optimizer, rank, iteration)
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
        wrapped.close()
        return {"said": said, "steps": wrapped.iteration}
    ranks = headway.finish(wrapped, timeout_s=limits.stretched(END_S))
    endings = [each["ending"] for each in rounds]
    return {
        "said": said,
        "steps": wrapped.iteration,
        "ranks": ranks,
        "endings": endings,
        "digest": _digest(module),
    }


def restores(rank: int, _world_size: int, places: str, options: dict[str, Any]) -> Any:
    """Three steps, a checkpoint, two steps; then the two again from the checkpoint."""
    module = model()
    optimizer = _sgd(module)
    wrapped, _ = _wrapped(rank, module, optimizer, places, options)
    for iteration in range(3):
        _step(wrapped, optimizer, rank, iteration)
    saved = wrapped.checkpoint()
    saved = {**saved, "model": {name: value.clone() for name, value in saved["model"].items()}}
    saved["optimizer"] = {
        **saved["optimizer"],
        "state": {
            key: {name: value.clone() for name, value in own.items()}
            for key, own in saved["optimizer"]["state"].items()
        },
    }
    found = []
    for _ in range(2):
        for iteration in range(3, 5):
            _step(wrapped, optimizer, rank, iteration)
        wrapped.flush()
        found.append(values(module))
        dist.barrier()
        wrapped.restore(saved)
    refused = _refusal(lambda: wrapped.restore({**saved, "iteration": 3 + rank}))
    wrapped.close()
    dist.barrier()
    return {"found": found, "refused": refused, "iteration": saved["iteration"]}


def all_on_one(rank: int, world_size: int) -> Any:
    """One host: a warning, and what DistributedDataParallel trains."""
    results = []
    said: list[str] = []
    for planned in (True, False):
        module = model()
        optimizer = _sgd(module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if planned:
                wrapped, _ = _wrapped(rank, module, optimizer, "a" * world_size, {})
                said = [str(each.message) for each in caught if "one host" in str(each.message)]
            else:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.add_(rank)
                wrapped = DistributedDataParallel(module)
        for iteration in range(3):
            _step(wrapped, optimizer, rank, iteration)
        ranks = headway.finish(wrapped)
        results.append(values(module))
    return {"same": results[0] == results[1], "said": said, "ranks": ranks}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    os.environ["HEADWAY_HOST"] = "ab"[rank]
    strategy: Any = headway.strategy("partial-all-reduce", groups="pairs", within_hosts="all-reduce")

    def wrapped(**options: Any) -> Any:
        return lambda: HostDataParallel(model(), **{"strategy": strategy, **options})

    static: Any = headway.strategy(
        "partial-all-reduce", groups="static", within_hosts="all-reduce", hosts=[2, 2]
    )
    found = {
        "do not add up": _refusal(wrapped(strategy=static)),
        "mixed_precision": _refusal(wrapped(mixed_precision=object())),
        "process_group": _refusal(wrapped(process_group=dist.new_group(list(range(world_size))))),
    }
    first = wrapped()()
    found["one model"] = _refusal(wrapped())
    found["compiled as a whole"] = _refusal(first.compile)
    found["join()"] = _refusal(first.join)
    headway.finish(first, timeout_s=limits.stretched(END_S))
    second = wrapped()()  # after the first has finished
    headway.finish(second, timeout_s=limits.stretched(END_S))
    return {name: said for name, said in found.items() if name not in said}


def recorded(rank: int, _world_size: int, places: str, folder: str, staleness: int) -> Any:
    """An ordinary loop, recorded; returns this rank's rounds."""
    module = model()
    optimizer = _sgd(module)
    with record(folder, first_step=FIRST, stop_step=STOP):
        wrapped, rounds = _wrapped(rank, module, optimizer, places, {"groups": "all", "staleness": staleness})
        for iteration in range(STOP + 2):
            _step(wrapped, optimizer, rank, iteration)
        wrapped.flush()
        wrapped.close()
        dist.barrier()
    return rounds
