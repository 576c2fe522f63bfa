"""What the ranks of ``test_partial_all_reduce`` do."""

from __future__ import annotations

import hashlib
import os
import signal
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from tests import limits
from tests.behaviour.decentralised.coordinating import Client
from tests.behaviour.decentralised.job import FEATURES, MOMENTUM, RATE, loss, model, rows, values
from tests.scheduling.group_schedules import pairs_in_turn
from torch import nn

from headway.strategies.partial_all_reduce.rounds import Context, Round
from headway.strategies.partial_all_reduce.runtime import PartialAllReduce, wrap

SECRET = b"a secret of tests"
TIME_LIMIT_S = 3.0


def _wrapped(rank: int, port: int, module: nn.Module, **options: Any) -> PartialAllReduce:
    limit_s = limits.stretched(TIME_LIMIT_S)
    coordinator = Client(port, rank)
    return wrap(
        module, coordinator, worker=rank, host="127.0.0.1", secret=SECRET,
        **{"time_limit_s": limit_s, "join_timeout_s": 4 * limit_s, **options},
    )  # fmt: skip


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)


def _step(wrapped: nn.Module, optimizer: torch.optim.Optimizer, rank: int, iteration: int) -> None:
    optimizer.zero_grad()
    loss(wrapped, rank, iteration).backward()
    optimizer.step()


def _as_json(each: Round) -> dict[str, Any]:
    return {**asdict(each), "ending": each.ending.value}


def trains(rank: int, _world_size: int, port: int, steps: int, options: dict[str, Any]) -> Any:
    """An ordinary loop; returns the rounds of it and what it ended with."""
    rounds: list[dict[str, Any]] = []
    module = model()
    optimizer = _sgd(module)
    options = {"initial": "own", "observer": lambda each: rounds.append(_as_json(each)), **options}
    wrapped = _wrapped(rank, port, module, **options)
    for iteration in range(steps):
        _step(wrapped, optimizer, rank, iteration)
    wrapped.flush()
    ended = values(module)
    contexts = wrapped._contexts.kept
    wrapped.close()
    dist.barrier()
    return {"rounds": rounds, "values": ended, "contexts": contexts, "rooms": wrapped._server.board.rooms}


def scheduled(rank: int, world_size: int, steps: int, staleness: int) -> Any:
    rounds: list[dict[str, Any]] = []
    module = model()
    optimizer = _sgd(module)
    wrapped = wrap(
        module, pairs_in_turn(world_size), optimizer, host="127.0.0.1", staleness=staleness,
        time_limit_s=limits.stretched(TIME_LIMIT_S), observer=lambda each: rounds.append(_as_json(each)),
    )  # fmt: skip
    for iteration in range(steps):
        _step(wrapped, optimizer, rank, iteration)
    wrapped.flush()
    ended = values(module)
    finished = wrapped.finish(timeout_s=limits.stretched(30.0))
    dist.barrier()
    return {"rounds": rounds, "values": ended, "final": values(module), "workers": finished.workers}


# Workers that fail -------------------------------------------------------------------------------------


def _large() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 400_000, bias=False), nn.Linear(400_000, 3, bias=False))


def _digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()


def _fails_in_the_middle(kind: int, at: int) -> None:
    """This process gets signal ``kind`` when it has begun the all-reduce number ``at``."""
    submit, begun = Context.submit, [0]

    def submitted(self: Context, flat: torch.Tensor) -> Any:
        work = submit(self, flat)
        begun[0] += 1
        if begun[0] == at:
            os.kill(os.getpid(), kind)
        return work

    Context.submit = submitted  # type: ignore[method-assign]


def one_fails(rank: int, world_size: int, port: int, kind: str, staleness: int) -> Any:
    """The last rank is killed or stopped in the middle of its third averaging. All go on until each has had more."""
    culprit = world_size - 1
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid-{rank}", str(os.getpid()))
    if rank == culprit:
        _fails_in_the_middle(signal.SIGKILL if kind == "killed" else signal.SIGSTOP, at=3)
    module = _large()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    before, torn = [""], []
    rounds: list[Round] = []

    def remember(*_: Any) -> None:
        before[0] = _digest(module)

    def observe(each: Round) -> None:
        rounds.append(each)
        if each.ending.value == "aborted":
            torn.append(_digest(module) != before[0])

    optimizer.register_step_post_hook(remember)  # before averaging
    wrapped = _wrapped(rank, port, module, observer=observe, staleness=staleness)
    after = 0
    live = [f"enough-{each}" for each in range(world_size) if kind == "stopped" or each != culprit]
    while not store.check(live):
        optimizer.zero_grad()
        wrapped(rows(rank, len(rounds))[0].float()).square().mean().backward()
        optimizer.step()
        aborted = [index for index, each in enumerate(rounds) if each.ending.value == "aborted"]
        after = sum(each.ending.value == "committed" for each in rounds[aborted[0] :]) if aborted else 0
        if kind == "stopped" and rank == 0 and after >= 2:
            os.kill(int(store.get(f"pid-{culprit}")), signal.SIGCONT)
        if after >= 3:
            store.set(f"enough-{rank}", "")
    finished = wrapped.finish(timeout_s=limits.stretched(40.0))
    return {
        "endings": [each.ending.value for each in rounds], "sizes": [len(each.members) for each in rounds],
        "torn": torn, "workers": finished.workers, "digest": _digest(module),
    }  # fmt: skip


# Workers that come later -------------------------------------------------------------------------------


def _state_digest(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    moments = [
        optimizer.state[p][key] for p in module.parameters() for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    tensors = [*module.parameters(), *module.buffers(), *moments]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def one_joins(rank: int, world_size: int, port: int, known: bool) -> Any:
    """The last rank begins when the others have made five steps; all go on for five more."""
    late = rank == world_size - 1
    module = model()
    if late:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    digests: dict[int, list[str]] = {}
    store = dist.distributed_c10d._get_default_store()
    if late:
        store.wait(["five steps"])
    wrapped = _wrapped(rank, port, module, optimizer=optimizer if known else None)
    joined_at = wrapped.iteration
    if late and known:
        digests[joined_at] = [_state_digest(module, optimizer)]
    store.set(f"joined-{rank}", "")
    optimizer.register_step_post_hook(  # before averaging
        lambda *_: digests.setdefault(wrapped.iteration + 1, []).append(_state_digest(module, optimizer))
    )
    left = 5
    while left:
        together = store.check([f"joined-{world_size - 1}"])
        _step(wrapped, optimizer, rank, wrapped.iteration)
        digests.setdefault(wrapped.iteration, []).append(_state_digest(module, optimizer))
        left -= together
        if wrapped.iteration == 5 and rank == 0:
            store.set("five steps", "")
    finished = wrapped.finish(timeout_s=limits.stretched(30.0))
    dist.barrier()
    return {"joined_at": joined_at, "digests": digests, "workers": finished.workers, "values": values(module),
            "steps": sorted({float(optimizer.state[p]["step"]) for p in module.parameters()})}  # fmt: skip


def another_model(rank: int, _world_size: int, port: int) -> str:
    """The second rank joins with another model, and is refused."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        wrapped = _wrapped(rank, port, model())
        store.set("there", "")
        store.wait(["refused"])
        wrapped.close()
        return ""
    store.wait(["there"])
    try:
        _wrapped(rank, port, model(width=9))
    except ValueError as error:
        return str(error)
    finally:
        store.set("refused", "")
    return "taken"
