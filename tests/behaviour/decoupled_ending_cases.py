"""How ranks end under the decoupled all-reduce: in order, without a word, by failures and signals."""

from __future__ import annotations

import ast
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from tests.behaviour.decoupled_runtime_cases import model, step
from torch import nn
from torch.distributed import destroy_process_group  # as scripts import it, before anything is wrapped

from headway.errors import CommunicationError, HeadwayError, UnsupportedError
from headway.scheduling.buckets import GATHER_MODES, GatherMode
from headway.strategies.decoupled import wrapper
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.live.channels import observer as observing


def destroyed_with_work_in_flight(rank: int, world_size: int) -> dict[str, Any]:
    """The group is destroyed right after step(): parameters must be up to date and plain."""
    usual_s = sys.getswitchinterval()
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    step(wrapped, optimizer, rank)
    destroy_process_group()
    assert all(type(p) is nn.Parameter for p in wrapped.parameters())
    assert not [t for t in threading.enumerate() if t.name == "headway-communication"]
    with torch.no_grad():
        value = wrapped(torch.ones(1, 6, dtype=torch.float64)).sum().item()
    refused = ""
    try:
        wrapped(torch.ones(1, 6, dtype=torch.float64))
    except ValueError as error:
        refused = str(error)
    return {"value": value, "interval_restored": sys.getswitchinterval() == usual_s, "refused": refused}


def steps_elsewhere() -> None:
    """An optimizer of something else steps: a moment at which a rank may wait."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def collected_while_a_lock_is_held(rank: int, world_size: int) -> list[float]:
    """The collector finds a wrapped model while a thread is started, to ask peers for gradients of another one."""
    gone = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    step(gone, torch.optim.SGD(gone.parameters(), lr=0.01), rank)
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01), rank)
    inner, cycle = gone.module, list[Any]([gone])
    cycle.append(cycle)
    gc.collect()
    del gone, cycle
    start = ThreadPoolExecutor._adjust_thread_count

    def collect_and_start(self: ThreadPoolExecutor) -> None:
        gc.collect()
        start(self)

    ThreadPoolExecutor._adjust_thread_count = collect_and_start  # type: ignore[method-assign]
    looked = [float(p.grad.sum()) for p in wrapped.parameters() if p.grad is not None]
    assert any(type(p) is not nn.Parameter for p in inner.parameters()), "it was found, and left for later"
    steps_elsewhere()
    assert all(type(p) is nn.Parameter for p in inner.parameters())
    return [*looked, *(float(p.detach().sum()) for p in inner.parameters())]


def collected(rank: int, world_size: int) -> dict[str, Any]:
    """Wrapped models that go out of use leave plain parameters and no threads, and can be wrapped again."""
    inner = model()
    for index in range(3):
        wrapped = DecoupledDataParallel(inner, bucket_cap_mb=0.0004)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        step(wrapped, optimizer, rank, index)
        cycle: list[Any] = [wrapped]
        cycle.append(cycle)
        del wrapped, cycle
        if index == 1:  # garbage is collected by whichever thread allocates
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join()
        else:
            gc.collect()
            steps_elsewhere()
            assert all(type(p) is nn.Parameter for p in inner.parameters())
    threads = [t.name for t in threading.enumerate()]
    return {
        "threads": threads.count("headway-communication"),
        "peers": threads.count("headway-peers"),
        "sum": sum(p.sum().item() for p in inner.parameters()),
    }


def state_outlives_its_wrapper(rank: int, world_size: int) -> dict[str, Any]:
    """Each wrapper is dropped behind a step: the sharded state is whole for one rank that looks, and serves the next.

    A rank may look, wrap again or train without a wrapper when another has not dropped its own yet.
    """
    results = {}
    for name, wrap in (("stock", nn.parallel.DistributedDataParallel), ("ours", DecoupledDataParallel)):
        inner = model()
        optimizer = torch.optim.Adam(inner.parameters(), lr=0.01)
        looked = []
        for index in range(3):
            wrapped = wrap(inner)
            step(wrapped, optimizer, rank, index)
            if rank == index:
                time.sleep(0.3)
            del wrapped
            if rank == 0 and index == 1:
                looked = [state["exp_avg"].sum().item() for state in optimizer.state_dict()["state"].values()]
        optimizer.step()
        results[name] = [p.detach().flatten().tolist() for p in inner.parameters()]
        results[f"{name} looked"] = looked
    return results


_kept: list[Any] = []


def collected_on_one_rank(rank: int, world_size: int) -> list[float]:
    """Rank 0 keeps its model, and looks at gradients, when the other's is gone; then the group is destroyed."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    step(wrapped, optimizer, rank)
    inner = wrapped.module
    if rank:
        del wrapped, optimizer
        gc.collect()
        dist.barrier()
    else:
        dist.barrier()
        for parameter in wrapped.parameters():
            assert parameter.grad is not None
    dist.destroy_process_group()
    return [float(p.detach().sum()) for p in inner.parameters()]


def ends_while_another_saves(rank: int, world_size: int, how: str) -> None:
    """Rank 1 comes to its end while rank 0 has yet to save an optimizer's state, of which rank 1 has a share."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    for index in range(2):
        step(wrapped, optimizer, rank, index)
    if how == "the model is kept":
        _kept.append(wrapped)
    if rank == 1:
        if how == "the script exits":
            sys.exit(0)
        return
    time.sleep(1.0)
    moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    assert sum(m.numel() for m in moments) == sum(p.numel() for p in wrapped.parameters())
    assert all((m != 0).any() for m in moments)


def leaves_without_a_word(rank: int, world_size: int) -> None:
    """Rank 1 ends its script right after step(), rank 0 is late and needs its part of the gathers."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    step(wrapped, optimizer, rank)
    if rank == 1:
        sys.exit(0)
    time.sleep(0.5)
    wrapped.state_dict()
    sys.exit(0)


def raises(rank: int, world_size: int) -> None:
    """One rank raises in the middle; nobody may hang."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    step(wrapped, optimizer, rank)
    if rank == 1:
        raise KeyError("a fault of the script")
    step(wrapped, optimizer, rank)
    list(wrapped.state_dict().values())
    step(wrapped, optimizer, rank)


def an_update_fails(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1's optimizer has a learning rate that is none, as its channels' threads find out."""
    parsing: list[str] = []
    parse = ast.parse

    def noted(*arguments: Any, **options: Any) -> Any:
        parsing.append(threading.current_thread().name)
        return parse(*arguments, **options)

    ast.parse = noted
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    step(wrapped, optimizer, rank)
    wrapped.flush()
    if rank == 1:
        optimizer.param_groups[0]["lr"] = "fast"
    found = {"error": "", "message": "", "cause": ""}
    try:
        for index in range(3):
            step(wrapped, optimizer, rank, index)
            list(wrapped.state_dict().values())
    except HeadwayError as error:
        cause = type(error.__cause__).__name__
        found = {"error": type(error).__name__, "message": str(error), "cause": cause}
    ast.parse = parse
    return {**found, "parsing": parsing}


def disagreeing(rank: int, world_size: int) -> dict[str, str]:
    """Rank 1 leaves out its third step, once in each form; then what watches its collectives fails."""
    found: dict[str, str] = {}
    for gather in GATHER_MODES:
        wrapped = wrapper.wrap(model(), DecoupledStrategy(bucket_cap_bytes=100, gather=gather))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        found[gather] = _said_by(lambda: _train(wrapped, optimizer, rank, leaves_out=2 if rank == 1 else -1))  # noqa: B023
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    if rank == 1:
        observing.set_observer(_Failing())
    found["observer"] = _said_by(lambda: _train(wrapped, optimizer, rank))
    observing.set_observer(None)
    return found


def interrupted(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1's script ends before its last step, which rank 0 has taken; rank 0 saves what there is."""
    found: dict[str, Any] = {}
    for gather in reversed(GATHER_MODES):
        wrapped = wrapper.wrap(model(), DecoupledStrategy(bucket_cap_bytes=100, gather=gather))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
        before: list[torch.Tensor] = []
        for index in range(3):
            before = [p.detach().clone() for p in wrapped.parameters()]
            optimizer.zero_grad()
            wrapped(torch.full((2, 6), float(rank + 1), dtype=torch.float64)).sum().backward()
            if index < 2 or rank == 0 or gather == "gradients":
                optimizer.step()
        if gather == "gradients":  # what has been reduced needs nobody any more
            wrapped.flush()
            continue
        if rank == 1:
            return {}
        found["said"] = _said_by(wrapped.state_dict)
        found["missing"] = wrapped.recover()
        found["as before"] = all(
            torch.equal(p, q) for p, q in zip(wrapped.state_dict().values(), before, strict=True)
        )
        found["state"] = _said_by(lambda: list(optimizer.state.values()))  # noqa: B023
    return found


def emergency(rank: int, world_size: int, gather: GatherMode) -> dict[str, Any]:
    """Rank 1 raises between two steps; rank 0 catches what that does to it, and saves an emergency checkpoint."""
    wrapped = wrapper.wrap(model(), DecoupledStrategy(bucket_cap_bytes=100, gather=gather))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    try:
        for index in range(9):
            if (rank, index) == (1, 3):
                raise ValueError("a bad sample")
            optimizer.zero_grad()
            wrapped(torch.full((2, 6), float(rank + 1), dtype=torch.float64)).sum().backward()
            optimizer.step()
    except CommunicationError:
        missing = wrapped.recover()
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (
            sum(alone(torch.full((2, 6), float(r + 1), dtype=torch.float64)).sum() for r in (0, 1)) / 2
        ).backward()
        optimizer.step()
    saved = wrapped.module.state_dict()
    return {
        "as after three steps": all(torch.allclose(saved[k], v) for k, v in alone.state_dict().items()),
        "missing": missing,
    }


def _train(wrapped: Any, optimizer: torch.optim.Optimizer, rank: int, leaves_out: int = -1) -> None:
    for index in range(6):
        optimizer.zero_grad()
        wrapped(torch.full((2, 6), float(index + rank + 1), dtype=torch.float64)).sum().backward()
        if index != leaves_out:
            optimizer.step()
    wrapped.flush()


def _said_by(act: Callable[[], object]) -> str:
    try:
        act()
    except HeadwayError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Failing(observing.NullObserver):
    """Fails as a recorder that has run out of memory."""

    def collective(self, done: observing.Collective) -> None:
        raise MemoryError("no room for another event")


def killed(rank: int, world_size: int) -> str:
    """Rank 1 is killed in the middle of a step."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    step(wrapped, optimizer, rank)
    message = ""
    try:
        for index in range(50):
            if rank == 1 and index == 3:
                wrapped.module[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            step(wrapped, optimizer, rank, index)
            wrapped.flush()
    except CommunicationError as error:
        message = str(error)
        again = ""
        try:
            wrapped.state_dict()
            step(wrapped, optimizer, rank)
        except CommunicationError as error_again:
            again = str(error_again)
        assert again
    assert message
    return message


def forked(rank: int, world_size: int) -> list[int]:
    """A forked process may not wait for a thread that it does not have; its end disturbs nobody."""
    wrapped = DecoupledDataParallel(model(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    step(wrapped, optimizer, rank)
    statuses = []
    for reads in (True, False):
        child = os.fork()
        if child == 0:
            status = 3
            try:
                if reads:
                    wrapped.state_dict()
            except UnsupportedError:
                status = 4
            del wrapped
            gc.collect()
            os._exit(status)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    step(wrapped, optimizer, rank)
    return statuses
