"""What each rank does for the tests of messages' times; returns what the tests look at."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from headway.collectives import executor, live
from headway.collectives.algorithms import KINDS, RING, program_of
from headway.collectives.live import Transfer
from headway.collectives.program import scratch_numel

Message = tuple[bool, int, int, int, int]  # sends, peer, bytes, posted, done
SHAPES = [(0, 1), (1, 2), (7, 3), (1001, 1), (1001, 2), (1200, 3)]


def in_turn(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """Several of the cases below in one set of processes."""
    return {name: globals()[name](rank, world_size) for name in names}


def rings_without_torchscript(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The same with the loop as plain Python."""
    return rings(rank, world_size, scripted=False)


def rings(rank: int, world_size: int, scripted: bool = True) -> list[dict[str, Any]]:
    """Every kind of collective in several sizes, once with its messages wanted and once without."""
    usual = executor.compiled
    if not scripted:
        executor.compiled = lambda: executor.execute  # type: ignore[assignment]
    try:
        group = _group(list(range(world_size)))
        return [
            {"kind": kind, "numel": numel, "pieces": pieces, **_ring(kind, numel, pieces, group)}
            for kind in KINDS
            for numel, pieces in SHAPES
        ]
    finally:
        executor.compiled = usual


def _ring(kind: str, numel: int, pieces: int, group: dist.ProcessGroup) -> dict[str, Any]:
    own = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank()), dtype=torch.float64)
    unseen, seen = own.clone(), own.clone()
    _prepared(kind, unseen, pieces, group).run()
    prepared = _prepared(kind, seen, pieces, group)
    begin_ns = time.monotonic_ns()
    with live.collected() as found:
        prepared.run(tag=3)
    end_ns = time.monotonic_ns()
    return {
        "same": bool(torch.equal(unseen.view(torch.int64), seen.view(torch.int64))),
        "span": [begin_ns, end_ns],
        "messages": _plain(found),
    }


def nobody_wants_them(rank: int, world_size: int) -> dict[str, Any]:
    """What the loop returns where nobody asked, and where somebody did."""
    prepared = _prepared("all_reduce", torch.ones(100), 2, _group(list(range(world_size))))
    returned = []

    def noted(*arguments: Any) -> list[int]:
        returned.append(executor.compiled()(*arguments))
        return returned[-1]

    prepared._execute = noted
    prepared.run()
    with live.collected():
        prepared.run()
    prepared.run()
    return {"lengths": [len(times) for times in returned], "wanted": live.wanted() is not None}


def inside_each_other(rank: int, world_size: int) -> dict[str, list[int]]:
    """Who collects inside of another block has what runs there, and the outer has the rest; also where it fails."""
    group = _group(list(range(world_size)))
    small, large = (_prepared("all_gather", torch.ones(world_size * n), 1, group) for n in (1, 2))
    with live.collected() as outer:
        small.run()
        with live.collected() as inner:
            large.run()
        try:
            with live.collected() as failed:
                small.run()
                raise ValueError
        except ValueError:
            pass
        small.run()
    large.run()
    return {name: [one.size_bytes for one in found if one.sends]
            for name, found in (("outer", outer), ("inner", inner), ("failed", failed))}  # fmt: skip


def concurrent(rank: int, world_size: int) -> list[list[int]]:
    """The sizes that three threads saw, each of its own collectives on its own group; the last one asked for none."""
    groups = [_group(list(range(world_size))) for _ in range(3)]
    ready = threading.Barrier(3)
    seen: list[list[int]] = [[], [], []]

    def work(number: int) -> None:
        prepared = _prepared("all_reduce", torch.ones(world_size * (number + 1) * 100), 2, groups[number])
        ready.wait(30)
        for _ in range(20):
            if number == 2:
                prepared.run()
                seen[number] += [one.size_bytes for one in live.wanted() or ()]
                continue
            with live.collected() as found:
                prepared.run()
            seen[number] += [one.size_bytes for one in found]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def subgroups(rank: int, world_size: int) -> list[Message]:
    """Messages of a ring through every other rank; two such rings side by side, with a second group for each."""
    halves = [[each for each in range(world_size) if each % 2 == half] for half in range(2)]
    groups = [_group(half) for half in halves]
    seconds = [_group(half) for half in halves]
    own = rank % 2
    with live.collected() as found:
        _prepared("all_reduce", torch.ones(8), 1, groups[own], seconds[own]).run()
    return _plain(found)


def a_peer_is_gone(rank: int, world_size: int) -> dict[str, Any]:
    """What is collected of a ring whose last rank never takes part."""
    group = _group(list(range(world_size)))
    prepared = _prepared("reduce_scatter", torch.ones(100), 1, group)
    prepared.run()
    if rank == world_size - 1:
        return {}
    with live.collected() as found:
        try:
            prepared.run()
        except RuntimeError as error:
            return {"error": str(error), "messages": _plain(found)}
    return {"error": ""}


def _prepared(
    kind: str,
    flat: torch.Tensor,
    pieces: int,
    group: dist.ProcessGroup,
    second: dist.ProcessGroup | None = None,
) -> live.Prepared:
    program = program_of(RING, kind, pieces)(group.rank(), group.size())
    scratch = torch.empty(scratch_numel(flat.numel(), group.size(), pieces), dtype=flat.dtype)
    return live.Prepared(program, flat, group, scratch, second)


def _plain(found: list[Transfer]) -> list[Message]:
    return [(one.sends, one.peer, one.size_bytes, one.posted_ns, one.done_ns) for one in found]


def _group(ranks: list[int]) -> Any:
    return dist.new_group(ranks)  # for ranks outside of it no process group
