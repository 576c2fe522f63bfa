"""Selection: which algorithm carries out a bucket's collective, and in how many pieces.

One rule for the live runtime, for replay and for predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.algorithms import (
    ALGORITHMS,
    ALL_GATHER,
    FOR_HALVES,
    GLOO_ALL_REDUCE,
    KINDS,
    NATIVE,
    NCCL,
    REDUCE_SCATTER,
    RING,
    cost_name,
    program_of,
)
from headway.collectives.flat import segments_for
from headway.collectives.hierarchical import Hosts
from headway.collectives.program import ChunkProgram, ProgramOf, pieces_for, scratch_numel_of
from headway.errors import PlanError


def _may_be_chosen(name: str) -> str:
    if name not in FOR_HALVES:
        raise ValueError(f"expected {' or '.join(FOR_HALVES)}")
    return name


AlgorithmName = Annotated[str, AfterValidator(_may_be_chosen)]
GLOO = "gloo"
NCCL_STEP_BYTES = 2**19  # buffers of 4 MiB in eight steps
MOST_PIECES = 64  # more would change next to nothing, and be many messages


class Selection(NamedTuple):
    """How one collective of some kind is carried out: over ``hosts``, where its algorithm follows them.

    ``shares`` are those that servers have, where they are unequal, and ``server_hosts`` how many hosts without workers
    serve, where not ranks but hosts do; ``order`` is that in which ranks stand in a ring,
    where it is not that of their numbers.
    """

    algorithm: str
    kind: str
    pieces: int = 1
    hosts: Hosts | None = None
    shares: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    server_hosts: int | None = None

    def on(self, hosts: Hosts) -> Selection:
        """The same among ranks on ``hosts``. Raises PlanError where its algorithm cannot do with them."""
        known = ALGORITHMS[self.algorithm]
        known.check(hosts)
        check_order(self.order, hosts.world_size)
        return self._replace(hosts=hosts) if known.follows_hosts else self

    @property
    def program_of(self) -> ProgramOf:
        """Its chunk programs. Raises PlanError where hosts serve, which is predicted alone."""
        if self.server_hosts is not None:
            raise PlanError(
                "servers on hosts are predicted, and have no messages of ranks", got=f"servers: {self.server_hosts}",
                expected="servers: null, where each worker is one",
            )  # fmt: skip
        return program_of(self.algorithm, self.kind, self.pieces, self.hosts, self.shares, self.order)

    @property
    def cost_names(self) -> tuple[str, ...]:
        """The names under which a cluster may hold its cost or one like it, the most fitting one first."""
        names = [cost_name(self.algorithm, self.kind, pieces) for pieces in (self.pieces, 1)]
        if ALGORITHMS[self.algorithm].is_library:
            names.append(GLOO_ALL_REDUCE)
        elif self.algorithm in FOR_HALVES:
            names += [cost_name(RING, self.kind, pieces) for pieces in (self.pieces, 1)]
        return tuple(dict.fromkeys(names))

    def is_timed_by_nccl(self, cluster: Cluster) -> bool:
        """Whether NCCL's own model says how long it takes on ``cluster``."""
        return self.algorithm == NCCL and cluster.nccl is not None and self.kind in KINDS

    def cost(self, cluster: Cluster) -> AlgorithmCost:
        """What it costs on ``cluster``.

        Where nobody measured it, a ring in pieces costs what one of whole chunks does, a native half what a native
        all-reduce does, and our other halves what rings do: they are made of the same messages.
        """
        return next(
            (cluster.algorithms[n] for n in self.cost_names if n in cluster.algorithms), AlgorithmCost()
        )

    def scratch_numel(self, numel: int, world_size: int) -> int:
        """How many elements it needs as scratch for a tensor of ``numel`` elements, whatever ranks share a host.

        What follows hosts needs no more than a ring. Where ranks are not alike it is what the one needs that needs
        most.
        """
        known = ALGORITHMS[self.algorithm]
        algorithm = RING if known.is_library or known.follows_hosts else self.algorithm
        program = _of_the_neediest(algorithm, self.kind, self.pieces, world_size)
        return scratch_numel_of(program, numel)


@cache
def _of_the_neediest(algorithm: str, kind: str, pieces: int, world_size: int) -> ChunkProgram:
    """The program of a rank that needs as much scratch as any."""
    programs = program_of(algorithm, kind, pieces)
    first = programs(0, world_size)
    if ALGORITHMS[algorithm].repeats:
        return first
    each = (programs(rank, world_size) for rank in range(world_size))
    return max(each, key=lambda program: program.scratch_slots * program.slot_numel(world_size))


def check_order(order: tuple[int, ...], world_size: int) -> None:
    """Raise PlanError for an order that does not have each of ``world_size`` ranks once. There may be none."""
    if order and sorted(order) != list(range(world_size)):
        raise PlanError(
            "ring_order does not have every rank once", got=" ".join(map(str, order)),
            expected=f"the ranks 0 to {world_size - 1} in some order, or nothing",
            fix="Leave out ring_order, or plan for as many workers as there are.",
        )  # fmt: skip


class SizeClass(BaseModel):
    """The algorithms of buckets of up to some size: an entry of ``by_size`` of ``decoupled``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int = Field(ge=1, le=10**12)
    """The size of a bucket at most, as it is sent."""

    reduce_scatter: AlgorithmName
    """The algorithm of the first half."""

    all_gather: AlgorithmName
    """The algorithm of the second half."""


@dataclass(frozen=True, slots=True)
class Algorithms:
    """The algorithm of each half of a decoupled all-reduce.

    Smaller buckets may have others: those of the first of ``by_size``, which grow, that is as large as they are. In
    rings ranks stand in ``ring_order``; where there is none, in that of their numbers. NCCL has its own for all,
    whatever is said here.
    """

    reduce_scatter: AlgorithmName = "ring"
    all_gather: AlgorithmName = "ring"
    by_size: tuple[SizeClass, ...] = ()
    ring_order: tuple[int, ...] = ()

    def of(self, kind: str, size_bytes: float) -> AlgorithmName:
        """The algorithm of a half ``kind`` of a bucket of ``size_bytes``."""
        own: Algorithms | SizeClass = next((c for c in self.by_size if size_bytes <= c.size_bytes), self)
        return own.reduce_scatter if kind == REDUCE_SCATTER else own.all_gather

    def names(self, kind: str) -> list[AlgorithmName]:
        """The algorithms that a half ``kind`` may have, those of small buckets first."""
        sizes = (*(each.size_bytes for each in self.by_size), math.inf)
        return list(dict.fromkeys(self.of(kind, size) for size in sizes))

    @property
    def repeat(self) -> bool:
        """Whether in each of them some ranks stand for all others."""
        names = {name for kind in (REDUCE_SCATTER, ALL_GATHER) for name in self.names(kind)}
        return not self.ring_order and all(ALGORITHMS[name].repeats for name in names)

    @property
    def in_words(self) -> list[str]:
        """Those that are not rings, and up to which size of buckets; the order of ranks in rings."""
        limits: list[tuple[Algorithms | SizeClass, str]] = [(self, "")]
        limits += [(each, f" up to {each.size_bytes:,} bytes") for each in self.by_size]
        return [
            f"{name} {half}{limit}"
            for own, limit in limits
            for half, name in (("reduce-scatter", own.reduce_scatter), ("all-gather", own.all_gather))
            if limit or name != RING
        ] + ([f"rings in the order {'-'.join(map(str, self.ring_order))}"] if self.ring_order else [])

    def check(self, hosts: Hosts) -> None:
        """Raise PlanError where they cannot do with ranks on ``hosts``."""
        check_order(self.ring_order, hosts.world_size)
        for kind in (REDUCE_SCATTER, ALL_GATHER):
            for algorithm in self.names(kind):
                Selection(algorithm, kind).on(hosts)

    def select(self, kind: str, size_bytes: int, world_size: int, library: str = GLOO) -> Selection:
        """How a ``kind`` of a tensor of ``size_bytes`` is carried out over ``world_size`` ranks by ``library``.

        What follows hosts has yet to be told them (``Selection.on``).
        """
        if library == NCCL:
            return native(kind, size_bytes, world_size, library)
        algorithm = self.of(kind, size_bytes)
        if ALGORITHMS[algorithm].is_library:
            return native(kind, size_bytes, world_size)
        order = self.ring_order if algorithm == RING else ()
        return Selection(algorithm, kind, pieces_for(size_bytes // world_size), order=order)


def native(kind: str, size_bytes: int, world_size: int, library: str = GLOO) -> Selection:
    """The own ``kind`` of a process group of ``library``, of a tensor of ``size_bytes`` over ``world_size`` ranks.

    NCCL hands on what it receives in pieces of a step of its buffers (src/device, protocol Simple).
    """
    chunk_bytes = -(-size_bytes // world_size)
    if library == NCCL:
        return Selection(NCCL, kind, min(MOST_PIECES, max(1, -(-chunk_bytes // NCCL_STEP_BYTES))))
    return Selection(NATIVE, kind, segments_for(chunk_bytes))


RINGS = Algorithms()
