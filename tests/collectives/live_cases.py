"""What each rank does for the tests of the live executor and of the native forms; each returns what was wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from headway.collectives import executor, live
from headway.collectives.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    DIRECT,
    HALVING_DOUBLING,
    HIERARCHICAL,
    KINDS,
    NATIVE,
    REDUCE_SCATTER,
    RING,
    TREE,
)
from headway.collectives.hierarchical import Hosts
from headway.collectives.program import (
    chunk_bounds,
    owned_chunk,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scratch_numel,
)
from headway.collectives.selection import Selection

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int32, torch.int64)


def check_in_turn(rank: int, world_size: int, names: list[str]) -> list[str]:
    """Several of the cases below in one set of processes."""
    return [f"{name}: {wrong}" for name in names for wrong in globals()[name](rank, world_size)]


def check_rings(rank: int, world_size: int) -> list[str]:
    """Every dtype with every size and number of pieces; with a third of them where ranks are many."""
    group = _group()
    shapes = [(0, 1), (1, 2), (world_size - 1, 1), (7, 3), (world_size * 12, 2), (1001, 4)]
    problems = []
    for index, dtype in enumerate(FLOATS + INTEGERS):
        for numel, pieces in shapes if world_size <= 3 else shapes[index % 3 :: 3]:
            wrong = _check_ring(rank, world_size, group, _inputs(numel, dtype, world_size), pieces)
            problems += [f"{what}: {numel} {dtype}, {pieces} pieces" for what in wrong]
    return problems


def check_every_number_of_pieces(rank: int, world_size: int) -> list[str]:
    """One size, with as many pieces as there are elements and more."""
    group = _group()
    inputs = _inputs(world_size * 3 + 1, torch.int32, world_size)
    return [
        f"{what}: {pieces} pieces"
        for pieces in range(1, 6)
        for what in _check_ring(rank, world_size, group, inputs, pieces)
    ]


def check_without_torchscript(rank: int, world_size: int) -> list[str]:
    """The same loop as plain Python."""
    usual, executor.compiled = executor.compiled, lambda: executor.execute  # type: ignore[assignment]
    try:
        return check_every_number_of_pieces(rank, world_size)
    finally:
        executor.compiled = usual


def check_native(rank: int, world_size: int) -> list[str]:
    """The native forms do in place what the ring's do."""
    group = _group()
    problems = []
    for dtype in FLOATS + INTEGERS:
        for numel in (0, world_size, world_size * 250):
            inputs = _inputs(numel, dtype, world_size)
            own = slice(*chunk_bounds(numel, world_size)[rank])
            for algorithm in (RING, NATIVE):
                flat = inputs[rank].clone()
                scratch = torch.empty(scratch_numel(numel, world_size), dtype=dtype)
                live.collective(algorithm, REDUCE_SCATTER, rank, world_size)(flat, group, scratch)
                if not _near(flat[own], [part[own] for part in inputs]):
                    problems.append(f"{algorithm} reduce-scatter of {numel} {dtype}")
                flat[own] = inputs[rank][own]
                live.collective(algorithm, ALL_GATHER, rank, world_size)(flat, group, scratch)
                chunks = chunk_bounds(numel, world_size)
                whole = torch.cat([inputs[r][slice(*bounds)] for r, bounds in enumerate(chunks)])
                if not torch.equal(flat, whole):
                    problems.append(f"{algorithm} all-gather of {numel} {dtype}")
                flat = inputs[rank].clone()
                live.collective(algorithm, ALL_REDUCE, rank, world_size)(flat, group, scratch)
                if not _near(flat, inputs):
                    problems.append(f"{algorithm} all-reduce of {numel} {dtype}")
    return problems


def check_prepared_again_and_again(rank: int, world_size: int) -> list[str]:
    """What was prepared once reads its buffer again each time, and shares its scratch."""
    group = _group()
    flat = torch.empty(1000, dtype=torch.int64)
    scratch = torch.empty(scratch_numel(1000, world_size, 3), dtype=torch.int64)
    for algorithm in (RING, NATIVE) if flat.numel() % world_size == 0 else (RING,):
        actions = {kind: live.prepare(Selection(algorithm, kind, 3), flat, group, scratch) for kind in KINDS}
        for turn in range(20):
            flat.copy_(torch.arange(1000) * (rank + turn))
            if turn % 2:
                actions[REDUCE_SCATTER]()
                actions[ALL_GATHER]()
            else:
                actions[ALL_REDUCE]()
            if not torch.equal(flat, torch.arange(1000) * sum(r + turn for r in range(world_size))):
                return [f"{algorithm}, turn {turn}"]
    return []


def check_hierarchical(rank: int, world_size: int, places: str) -> list[str]:
    """Every dtype with sizes as awkward as can be, ranks on the hosts that have a letter each in ``places``."""
    group, hosts = _group(), Hosts.of_places(places)
    shapes = [(0, 1), (1, 2), (world_size - 1, 1), (world_size * 12, 2), (1001, 3)]
    problems = []
    for dtype in FLOATS + INTEGERS:
        for numel, pieces in shapes:
            inputs = _inputs(numel, dtype, world_size)
            wrong = _check_hierarchical(rank, world_size, group, inputs, pieces, hosts)
            problems += [f"{what}: {numel} {dtype}, {pieces} pieces" for what in wrong]
    return problems


def check_direct(rank: int, world_size: int) -> list[str]:
    """The same of direct halves."""
    return _check_halves(rank, world_size, DIRECT)


def check_halving_doubling(rank: int, world_size: int) -> list[str]:
    """The same of halving and doubling."""
    return _check_halves(rank, world_size, HALVING_DOUBLING)


def check_trees(rank: int, world_size: int) -> list[str]:
    """The same of trees."""
    return _check_halves(rank, world_size, TREE)


def _check_halves(rank: int, world_size: int, algorithm: str) -> list[str]:
    group = _group()
    problems = []
    for dtype in FLOATS + INTEGERS:
        for numel, pieces in [(0, 1), (1, 2), (world_size - 1, 1), (world_size * 12, 2), (1001, 3)]:
            inputs = _inputs(numel, dtype, world_size)
            own = slice(*chunk_bounds(numel, world_size)[rank])
            needed = Selection(algorithm, REDUCE_SCATTER, pieces).scratch_numel(numel, world_size)
            flat, scratch = torch.empty(numel, dtype=dtype), torch.empty(needed, dtype=dtype)
            scatter, gather = (
                live.prepare(Selection(algorithm, kind, pieces), flat, group, scratch)
                for kind in (REDUCE_SCATTER, ALL_GATHER)
            )
            for turn in range(3):
                flat.copy_(inputs[rank])
                scatter(tag=2 * turn)
                if not _near(flat[own], [part[own] for part in inputs]):
                    problems.append(f"reduce-scatter: {numel} {dtype}, {pieces} pieces")
                gather(tag=2 * turn + 1)
                if not _near(flat, inputs):
                    problems.append(f"all-gather: {numel} {dtype}, {pieces} pieces")
    return problems


def _check_hierarchical(
    rank: int,
    world_size: int,
    group: dist.ProcessGroup,
    inputs: list[torch.Tensor],
    pieces: int,
    hosts: Hosts,
) -> Iterator[str]:
    numel, dtype = inputs[0].numel(), inputs[0].dtype
    bounds = chunk_bounds(numel, world_size)
    own = slice(*bounds[owned_chunk(rank, world_size)])
    flat, scratch = torch.empty(numel, dtype=dtype), torch.empty(numel * 2 + 2, dtype=dtype)
    runs = {
        kind: live.prepare(Selection(HIERARCHICAL, kind, pieces, hosts), flat, group, scratch)
        for kind in KINDS
    }
    flat.copy_(inputs[rank])
    runs[REDUCE_SCATTER]()
    if not _near(flat[own], [part[own] for part in inputs]):
        yield "reduce-scatter"
    flat.zero_()
    flat[own] = inputs[rank][own]
    runs[ALL_GATHER]()
    if not torch.equal(flat, torch.cat([inputs[r][slice(*bounds[r])] for r in range(world_size)])):
        yield "all-gather"
    flat.copy_(inputs[rank])
    runs[ALL_REDUCE]()
    if not _near(flat, inputs):
        yield "all-reduce"
    everyones = [torch.empty_like(flat) for _ in range(world_size)]
    if numel:
        dist.all_gather(everyones, flat, group=group)
        if not all(torch.equal(theirs, flat) for theirs in everyones):
            yield "all-reduce, the same on every rank"


def check_two_groups_at_a_time(rank: int, world_size: int) -> list[str]:
    """Programs on different groups do not meet."""
    problems: list[str] = []
    groups = [_group(), _group()]

    def work(number: int) -> None:
        flat = torch.empty(5000, dtype=torch.int32)
        scratch = torch.empty(scratch_numel(5000, world_size, 2), dtype=torch.int32)
        prepared = live.Prepared(ring_all_reduce(rank, world_size, 2), flat, groups[number], scratch)
        for turn in range(30):
            flat.fill_(turn + number)
            prepared.run()
            if not bool((flat == world_size * (turn + number)).all()):
                problems.append(f"group {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def run_while_a_peer_is_gone(rank: int, world_size: int) -> str:
    """What a ring raises whose last rank never takes part."""
    executor.compiled()  # takes a while the first time
    group = _group()
    program = ring_reduce_scatter(rank, world_size)
    flat, scratch = torch.ones(100), torch.empty(scratch_numel(100, world_size))
    live.run(program, flat, group, scratch)
    if rank == world_size - 1:
        return ""
    try:
        live.run(program, flat, group, scratch)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _check_ring(
    rank: int, world_size: int, group: dist.ProcessGroup, inputs: list[torch.Tensor], pieces: int
) -> Iterator[str]:
    numel, dtype = inputs[0].numel(), inputs[0].dtype
    scratch = torch.empty(scratch_numel(numel, world_size, pieces), dtype=dtype)
    bounds = chunk_bounds(numel, world_size)
    own = slice(*bounds[owned_chunk(rank, world_size)])

    scattered = inputs[rank].clone()
    live.run(ring_reduce_scatter(rank, world_size, pieces), scattered, group, scratch)
    if not torch.equal(scattered[own], _summed_around(rank, [part[own] for part in inputs])):
        yield "reduce-scatter, bit by bit in its own order"

    reduced = inputs[rank].clone()
    live.run(ring_all_reduce(rank, world_size, pieces), reduced, group, scratch)
    chunks = [_summed_around(r, [part[slice(*bounds[r])] for part in inputs]) for r in range(world_size)]
    if not torch.equal(reduced, torch.cat(chunks)):
        yield "all-reduce, bit by bit in its own order and so the same on every rank"
    if not _near(reduced, inputs):
        yield "all-reduce against the exact sum"
    native = inputs[rank].clone()
    if numel:
        dist.all_reduce(native, group=group)
    if dtype not in FLOATS and not torch.equal(reduced, native):
        yield "all-reduce against torch's"

    gathered = torch.zeros(numel, dtype=dtype)
    gathered[own] = inputs[rank][own]
    live.run(ring_all_gather(rank, world_size, pieces), gathered, group, scratch)
    if not torch.equal(gathered, torch.cat([inputs[r][slice(*bounds[r])] for r in range(world_size)])):
        yield "all-gather"


def _summed_around(rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order in which a ring adds chunk ``rank``: from the next rank around to itself."""
    world_size = len(parts)
    total = parts[(rank + 1) % world_size].clone()
    for distance in range(2, world_size + 1):
        total = parts[(rank + distance) % world_size] + total
    return total if world_size > 1 else parts[0]


def _near(result: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Whether ``result`` is the sum of ``parts``: exactly for integers, which wrap around.

    ``world_size - 1`` rounded additions in any order are off by at most that many ulps of the sum of absolute
    values (Higham, Accuracy and Stability, 4.2, with half an ulp an addition to spare).
    """
    stacked = torch.stack(parts)
    if result.dtype not in FLOATS:
        return torch.equal(result, stacked.sum(0, dtype=result.dtype))
    exact, size = stacked.double().sum(0), stacked.double().abs().sum(0)
    return bool(
        ((result.double() - exact).abs() <= (len(parts) - 1) * torch.finfo(result.dtype).eps * size).all()
    )


def _inputs(numel: int, dtype: torch.dtype, world_size: int) -> list[torch.Tensor]:
    """Every rank's tensor, the same for whoever asks."""
    generator = torch.Generator().manual_seed(numel + 1000 * world_size)
    make: Callable[[], torch.Tensor]
    if dtype in FLOATS:
        make = lambda: torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    else:
        info = torch.iinfo(dtype)
        make = lambda: torch.randint(info.min // 2, info.max, (numel,), generator=generator).to(dtype)  # noqa: E731
    return [make() for _ in range(world_size)]


def _group() -> dist.ProcessGroup:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group
