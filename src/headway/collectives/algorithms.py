"""Registers the collective algorithms by name, with their chunk programs and the names of their costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from headway.collectives.flat import (
    SEGMENTS,
    check_power_of_two,
    direct_all_gather,
    direct_reduce_scatter,
    doubling_all_gather,
    gloo_all_gather,
    gloo_all_reduce,
    gloo_all_to_all,
    halving_reduce_scatter,
    has_rounds_to_save,
    is_power_of_two,
    tree_all_gather,
    tree_reduce_scatter,
)
from headway.collectives.hierarchical import (
    Hosts,
    check_alike,
    differs_from_rings,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from headway.collectives.program import (
    ChunkProgram,
    ProgramOf,
    in_order,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from headway.collectives.servers import push_and_pull
from headway.errors import PlanError

ALL_REDUCE = "all_reduce"
REDUCE_SCATTER = "reduce_scatter"
ALL_GATHER = "all_gather"
ALL_TO_ALL = "all_to_all"
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
OF_LIBRARIES = (*KINDS, ALL_TO_ALL)
"""The kinds that libraries provide; Headway has no chunk program of its own for the last."""

RING = "ring"  # Headway's chunk programs
HIERARCHICAL = "hierarchical"  # rings within hosts and across them
DIRECT = "direct"  # every rank sends to every other one
HALVING_DOUBLING = "halving_doubling"  # partners halve and double what they hold
TREE = "tree"  # one tree per chunk
NATIVE = "native"  # the process group's own collectives, replayed as Gloo's
NCCL = "nccl"  # the process group's own collectives on NCCL: replayed, never chosen
SERVERS = "servers"  # every rank is a parameter server
COMPRESSED = "compressed"  # in recordings: the process group's own collective on a codec's output

GLOO_ALL_REDUCE = "gloo_all_reduce"

# ProcessGroupGloo serves its queue with two threads, in order, and does not report when a thread starts a collective.
GLOO_THREADS = 2


@dataclass(frozen=True)
class Algorithm:
    """One way to carry out collectives of some ``kinds``.

    ``programs`` returns the chunk programs of a kind for a number of pieces; ``cost_name`` the name of their cost in
    ``Cluster.algorithms``. ``is_library``: the process group runs it in a live job. ``probed`` lists groups of kinds that
    share a cost, with the pieces that a probe measures. ``follows_hosts``: programs depend on which ranks share a host.
    ``repeats``: some ranks represent all others (``ChunkProgram.rotation`` or ``mirrors``). ``check`` raises PlanError
    for unsupported hosts; ``differs`` says whether hosts are supported and the algorithm differs from rings there.
    """

    name: str
    kinds: tuple[str, ...]
    programs: Callable[[str, int], ProgramOf]
    cost_name: Callable[[str, int], str]
    is_library: bool = False
    probed: tuple[tuple[tuple[str, ...], int], ...] = ()
    follows_hosts: bool = False
    repeats: bool = True
    check: Callable[[Hosts], None] = lambda _hosts: None
    differs: Callable[[Hosts], bool] = lambda _hosts: True


def _rings(kind: str, pieces: int) -> ProgramOf:
    ring = {ALL_REDUCE: ring_all_reduce, REDUCE_SCATTER: ring_reduce_scatter, ALL_GATHER: ring_all_gather}[
        kind
    ]
    return ring if pieces == 1 else partial(ring, pieces=pieces)


def _hierarchical(kind: str, pieces: int) -> ProgramOf:
    programs = {
        ALL_REDUCE: hierarchical_all_reduce,
        REDUCE_SCATTER: hierarchical_reduce_scatter,
        ALL_GATHER: hierarchical_all_gather,
    }[kind]
    return partial(programs, pieces=pieces)


def _direct(kind: str, pieces: int) -> ProgramOf:
    direct = {REDUCE_SCATTER: direct_reduce_scatter, ALL_GATHER: direct_all_gather}[kind]
    return partial(direct, pieces=pieces)


def _halving_doubling(kind: str, _pieces: int) -> ProgramOf:
    return {REDUCE_SCATTER: halving_reduce_scatter, ALL_GATHER: doubling_all_gather}[kind]


def _trees(kind: str, _pieces: int) -> ProgramOf:
    return {REDUCE_SCATTER: tree_reduce_scatter, ALL_GATHER: tree_all_gather}[kind]


def _gloo(kind: str, pieces: int) -> ProgramOf:
    """Gloo's programs (``flat``). Its reduce-scatter moves as much as a full all-reduce, as measured."""
    if kind == ALL_TO_ALL:
        return gloo_all_to_all
    native = gloo_all_gather if kind == ALL_GATHER else gloo_all_reduce
    return native if pieces <= SEGMENTS else partial(native, pieces=pieces)


def _native_cost(kind: str, _pieces: int) -> str:
    return GLOO_ALL_REDUCE if kind == ALL_REDUCE else f"{NATIVE}_{kind}"


def _nccl(kind: str, pieces: int) -> ProgramOf:
    """NCCL's rings in pieces are like Headway's; its all-to-all sends and receives everything at once."""
    return gloo_all_to_all if kind == ALL_TO_ALL else _rings(kind, pieces)


_HALVES = (REDUCE_SCATTER, ALL_GATHER)
ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            RING,
            KINDS,
            _rings,
            lambda _kind, pieces: RING if pieces == 1 else f"{RING}_{pieces}",  # both halves share it
            probed=tuple((_HALVES, pieces) for pieces in (1, 2, 4)),
        ),
        Algorithm(
            HIERARCHICAL,
            KINDS,
            _hierarchical,
            lambda _kind, pieces: HIERARCHICAL if pieces == 1 else f"{HIERARCHICAL}_{pieces}",
            probed=tuple((_HALVES, pieces) for pieces in (1, 2)),
            follows_hosts=True,
            check=check_alike,
            differs=differs_from_rings,
        ),
        Algorithm(
            DIRECT,
            _HALVES,
            _direct,
            lambda _kind, pieces: DIRECT if pieces == 1 else f"{DIRECT}_{pieces}",
            probed=((_HALVES, 1),),
            differs=lambda hosts: hosts.world_size > 2,  # two ranks are a ring
        ),
        Algorithm(
            HALVING_DOUBLING,
            _HALVES,
            _halving_doubling,
            lambda _kind, _pieces: HALVING_DOUBLING,
            probed=((_HALVES, 1),),
            check=check_power_of_two,
            differs=lambda hosts: hosts.world_size > 2 and is_power_of_two(hosts.world_size),
        ),
        Algorithm(
            TREE,
            _HALVES,
            _trees,
            lambda _kind, _pieces: TREE,
            probed=((_HALVES, 1),),
            repeats=False,
            differs=has_rounds_to_save,
        ),
        Algorithm(
            NATIVE,
            OF_LIBRARIES,
            _gloo,
            _native_cost,
            is_library=True,
            probed=tuple(((kind,), 1) for kind in (*_HALVES, ALL_REDUCE)),
        ),
        Algorithm(
            SERVERS,
            (ALL_REDUCE,),
            lambda _kind, pieces: push_and_pull if pieces == 1 else partial(push_and_pull, pieces=pieces),
            lambda _kind, _pieces: SERVERS,
            probed=(((ALL_REDUCE,), 1),),
        ),
        Algorithm(NCCL, OF_LIBRARIES, _nccl, _native_cost, is_library=True),
    )
}

FOR_HALVES = tuple(
    name
    for name, algorithm in ALGORITHMS.items()
    if algorithm.probed and set(_HALVES) <= set(algorithm.kinds)
)
"""The algorithms that a plan may choose for the halves of a decoupled all-reduce."""


def cost_name(algorithm: str, kind: str, pieces: int = 1) -> str:
    """The name of a collective's cost in ``Cluster.algorithms``. Raises PlanError for an unknown algorithm."""
    return known_algorithm(algorithm, kind).cost_name(kind, pieces)


@cache
def program_of(
    algorithm: str,
    kind: str,
    pieces: int = 1,
    hosts: Hosts | None = None,
    shares: tuple[int, ...] = (),
    order: tuple[int, ...] = (),
) -> ProgramOf:
    """The chunk programs of a collective, for the live executor and for replay.

    A library's own collective is replayed as the library does it. ``hosts`` is for algorithms that depend on them,
    ``shares`` for servers, ``order`` for rings. Raises PlanError for an unknown name.
    """
    info = known_algorithm(algorithm, kind)
    programs: Callable[..., ChunkProgram] = info.programs(kind, pieces)
    if shares:
        assert algorithm == SERVERS, f"{algorithm} collectives have no shares"
        return partial(programs, shares=shares)
    if order:
        assert algorithm == RING, f"{algorithm} collectives have no order of ranks"
        return partial(in_order, program_of=programs, order=order)
    if not info.follows_hosts:
        return programs
    assert hosts is not None, f"{algorithm} collectives depend on hosts"
    return partial(programs, hosts=hosts)


def sent_bytes(
    algorithm: str, kind: str, world_size: int, size_bytes: int, hosts: Hosts | None = None
) -> float:
    """The bytes that a link carries in each direction in a collective of ``size_bytes``: what a rank sends.

    With several ``hosts``, what all ranks of the first host send to other hosts. Raises PlanError for an unknown name.
    """
    chunk_programs = program_of(algorithm, kind, hosts=hosts)
    here = hosts.ranks[0] if hosts is not None and len(hosts.ranks) > 1 else (0,)
    programs = [chunk_programs(rank, world_size) for rank in here]
    pieces = sum(step.run for program in programs for step in program.steps if step.send_to not in here)
    return size_bytes / world_size * pieces / programs[0].pieces


def known_algorithm(algorithm: str, kind: str) -> Algorithm:
    """The algorithm of that name. Raises PlanError if it is unknown or does not support ``kind``."""
    info = ALGORITHMS.get(algorithm)
    if info is None:
        raise PlanError("unknown collective algorithm", got=algorithm, expected=" or ".join(ALGORITHMS))
    if kind not in OF_LIBRARIES:
        raise PlanError("unknown collective kind", got=kind, expected=" or ".join(OF_LIBRARIES))
    if kind not in info.kinds:
        raise PlanError(
            f"{algorithm} does not support this collective", got=kind, expected=" or ".join(info.kinds)
        )
    return info
