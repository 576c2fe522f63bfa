"""Collective algorithms by name: what a plan may choose, what it costs on a cluster, and what carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

from headway.collectives.gloo import SEGMENTS, gloo_all_gather, gloo_all_reduce
from headway.collectives.program import ProgramOf, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from headway.collectives.servers import push_and_pull
from headway.errors import PlanError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ALL_REDUCE = "all_reduce"
REDUCE_SCATTER = "reduce_scatter"
ALL_GATHER = "all_gather"
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)

RING = "ring"  # Headway's chunk programs
NATIVE = "native"  # the process group's own collectives, of Gloo where replay plays them
NCCL = "nccl"  # a process group's own as NCCL does them: replayed, never chosen
SERVERS = "servers"  # every rank a parameter server

GLOO_ALL_REDUCE = "gloo_all_reduce"

# ProcessGroupGloo serves its queue with two threads, in order. It does not say when one takes a collective up.
GLOO_THREADS = 2

Collective = Callable[["torch.Tensor", "dist.ProcessGroup", "torch.Tensor"], None]
"""Carries out one collective in place: (flat tensor, group, scratch)."""


@dataclass(frozen=True)
class Algorithm:
    """One way to carry out collectives of some ``kinds``.

    ``programs`` gives the chunk programs of a kind in so many pieces, ``cost_name`` the name under which
    ``Cluster.algorithms`` holds what that costs. ``is_library`` says that live the process group does it by itself.
    ``probed`` are the kinds that share a cost, each with the pieces in which a probe measures them.
    """

    name: str
    kinds: tuple[str, ...]
    programs: Callable[[str, int], ProgramOf]
    cost_name: Callable[[str, int], str]
    is_library: bool = False
    probed: tuple[tuple[tuple[str, ...], int], ...] = ()


def _rings(kind: str, pieces: int) -> ProgramOf:
    ring = {ALL_REDUCE: ring_all_reduce, REDUCE_SCATTER: ring_reduce_scatter, ALL_GATHER: ring_all_gather}[
        kind
    ]
    return ring if pieces == 1 else partial(ring, pieces=pieces)


def _gloo(kind: str, pieces: int) -> ProgramOf:
    """What Gloo does (``collectives.gloo``): its reduce-scatter moves as much as a whole all-reduce, as measured."""
    native = gloo_all_gather if kind == ALL_GATHER else gloo_all_reduce
    return native if pieces <= SEGMENTS else partial(native, pieces=pieces)


def _native_cost(kind: str, _pieces: int) -> str:
    return GLOO_ALL_REDUCE if kind == ALL_REDUCE else f"{NATIVE}_{kind}"


_HALVES = (REDUCE_SCATTER, ALL_GATHER)
ALGORITHMS: dict[str, Algorithm] = {
    each.name: each
    for each in (
        Algorithm(
            RING,
            KINDS,
            _rings,
            lambda _kind, pieces: RING if pieces == 1 else f"{RING}_{pieces}",  # both halves share it
            probed=tuple((_HALVES, pieces) for pieces in (1, 2, 4)),
        ),
        Algorithm(
            NATIVE,
            KINDS,
            _gloo,
            _native_cost,
            is_library=True,
            probed=tuple(((kind,), 1) for kind in (*_HALVES, ALL_REDUCE)),
        ),
        Algorithm(
            SERVERS,
            (ALL_REDUCE,),
            lambda _kind, _pieces: push_and_pull,
            lambda _kind, _pieces: SERVERS,
            probed=(((ALL_REDUCE,), 1),),
        ),
        # NCCL's rings, in its pieces, are like our own.
        Algorithm(NCCL, KINDS, _rings, _native_cost, is_library=True),
    )
}

FOR_HALVES = tuple(
    name for name, each in ALGORITHMS.items() if each.probed and set(_HALVES) <= set(each.kinds)
)
"""Those that a plan may choose for the halves of a decoupled all-reduce."""


def cost_name(algorithm: str, kind: str, pieces: int = 1) -> str:
    """The name under which ``Cluster.algorithms`` holds what a collective costs.

    Raises PlanError for an unknown name.
    """
    return _known(algorithm, kind).cost_name(kind, pieces)


@cache
def program_of(algorithm: str, kind: str, pieces: int = 1) -> ProgramOf:
    """The chunk programs of a collective, for the live executor and for replay.

    A library's own collective is replayed as what it does. Raises PlanError for an unknown name.
    """
    return _known(algorithm, kind).programs(kind, pieces)


def sent_bytes(algorithm: str, kind: str, world_size: int, size_bytes: int) -> float:
    """What each rank sends to its neighbour in a collective of a tensor of ``size_bytes``.

    Raises PlanError for an unknown name.
    """
    program = program_of(algorithm, kind)(0, world_size)
    return size_bytes / world_size * len(program.steps) / program.pieces


def collective(algorithm: str, kind: str, rank: int, world_size: int, pieces: int = 1) -> Collective:
    """What carries a collective out on this rank.

    All do the same in place: after a reduce-scatter ``owned_chunk`` holds sums and the rest is undefined, an
    all-gather starts from it. ``pieces`` is for rings. The native halves need a numel that is a multiple of the world
    size. Raises PlanError for an unknown name.
    """
    from headway.collectives import live, native

    if _known(algorithm, kind).is_library:
        return native.COLLECTIVES[kind]
    return partial(live.run, program_of(algorithm, kind, pieces)(rank, world_size))


class Run(Protocol):
    """A collective bound to its tensors."""

    def __call__(self, tag: int = 0) -> None:
        """Run it. ``tag`` is the same on all ranks (``live.Prepared.run``)."""


def prepare(
    algorithm: str,
    kind: str,
    flat: torch.Tensor,
    group: dist.ProcessGroup,
    scratch: torch.Tensor,
    pieces: int = 1,
    second: dist.ProcessGroup | None = None,
) -> Run:
    """``collective`` bound to its tensors, to be called over and over at the least cost a call.

    It is called with a tag for its messages, the same on all ranks. ``second`` is for rings of two ranks. See
    ``live.Prepared`` for both.
    """
    from headway.collectives import live

    if not _known(algorithm, kind).is_library:
        program = program_of(algorithm, kind, pieces)(group.rank(), group.size())
        return live.Prepared(program, flat, group, scratch, second).run
    action = collective(algorithm, kind, group.rank(), group.size())

    def run(tag: int = 0) -> None:
        del tag  # the process group counts its own collectives
        action(flat, group, scratch)

    return run


def _known(algorithm: str, kind: str) -> Algorithm:
    found = ALGORITHMS.get(algorithm)
    if found is None:
        raise PlanError(
            "there is no such collective algorithm", got=algorithm, expected=" or ".join(ALGORITHMS)
        )
    if kind not in KINDS:
        raise PlanError("there is no such collective kind", got=kind, expected=" or ".join(KINDS))
    if kind not in found.kinds:
        raise PlanError(
            f"{algorithm} supports no such collective", got=kind, expected=" or ".join(found.kinds)
        )
    return found
