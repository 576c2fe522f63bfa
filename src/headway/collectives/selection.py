"""Selects the algorithm and the number of pieces for a bucket's collective.

The live runtime, replay and predictions share these rules.
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
MOST_PIECES = 64  # more would hardly help, and need many messages


class Selection(NamedTuple):
    """How one collective is carried out.

    ``hosts`` is set for algorithms that depend on them. ``shares`` are unequal shares of servers. ``server_hosts`` is the
    number of hosts without workers, if hosts serve instead of ranks. ``order`` is the order of ranks in a ring, if it is
    not rank order.
    """

    algorithm: str
    kind: str
    pieces: int = 1
    hosts: Hosts | None = None
    shares: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    server_hosts: int | None = None

    def on(self, hosts: Hosts) -> Selection:
        """The selection for ranks on ``hosts``. Raises PlanError if its algorithm does not support them."""
        info = ALGORITHMS[self.algorithm]
        info.check(hosts)
        check_order(self.order, hosts.world_size)
        return self._replace(hosts=hosts) if info.follows_hosts else self

    @property
    def program_of(self) -> ProgramOf:
        """The chunk programs. Raises PlanError if hosts serve, which is only predicted."""
        if self.server_hosts is not None:
            raise PlanError(
                "servers on hosts can only be predicted, not run", got=f"servers: {self.server_hosts}",
                expected="servers: null, so that each worker is a server",
            )  # fmt: skip
        return program_of(self.algorithm, self.kind, self.pieces, self.hosts, self.shares, self.order)

    @property
    def cost_names(self) -> tuple[str, ...]:
        """The names of its cost, or of similar ones, in a cluster; the best match first."""
        names = [cost_name(self.algorithm, self.kind, pieces) for pieces in (self.pieces, 1)]
        if ALGORITHMS[self.algorithm].is_library:
            names.append(GLOO_ALL_REDUCE)
        elif self.algorithm in FOR_HALVES:
            names += [cost_name(RING, self.kind, pieces) for pieces in (self.pieces, 1)]
        return tuple(dict.fromkeys(names))

    def is_timed_by_nccl(self, cluster: Cluster) -> bool:
        """Whether NCCL's own model predicts its time on ``cluster``."""
        return self.algorithm == NCCL and cluster.nccl is not None and self.kind in KINDS

    def cost(self, cluster: Cluster) -> AlgorithmCost:
        """The cost on ``cluster``.

        Without a measurement, a ring in pieces costs the same as one in whole chunks, a native half the same as a native
        all-reduce, and Headway's other halves the same as rings, because they send the same messages.
        """
        return next(
            (cluster.algorithms[n] for n in self.cost_names if n in cluster.algorithms), AlgorithmCost()
        )

    def scratch_numel(self, numel: int, world_size: int) -> int:
        """The scratch elements needed for a tensor of ``numel`` elements: the most of any rank, for any hosts.

        Algorithms that depend on hosts need no more than a ring.
        """
        info = ALGORITHMS[self.algorithm]
        algorithm = RING if info.is_library or info.follows_hosts else self.algorithm
        program = _program_with_most_scratch(algorithm, self.kind, self.pieces, world_size)
        return scratch_numel_of(program, numel)


@cache
def _program_with_most_scratch(algorithm: str, kind: str, pieces: int, world_size: int) -> ChunkProgram:
    """The program of the rank that needs the most scratch."""
    programs = program_of(algorithm, kind, pieces)
    first = programs(0, world_size)
    if ALGORITHMS[algorithm].repeats:
        return first
    by_rank = (programs(rank, world_size) for rank in range(world_size))
    return max(by_rank, key=lambda program: program.scratch_slots * program.slot_numel(world_size))


def check_order(order: tuple[int, ...], world_size: int) -> None:
    """Raise PlanError unless ``order`` is empty or a permutation of ``world_size`` ranks."""
    if order and sorted(order) != list(range(world_size)):
        raise PlanError(
            "ring_order does not contain every rank exactly once", got=" ".join(map(str, order)),
            expected=f"the ranks 0 to {world_size - 1} in any order, or nothing",
            fix="Leave out ring_order, or plan for the right number of workers.",
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

    Smaller buckets may use others: those of the first entry of ``by_size`` (sorted) that is at least as large. Rings use
    ``ring_order``, or rank order if that is empty. NCCL ignores all of this and uses its own.
    """

    reduce_scatter: AlgorithmName = "ring"
    all_gather: AlgorithmName = "ring"
    by_size: tuple[SizeClass, ...] = ()
    ring_order: tuple[int, ...] = ()

    def of(self, kind: str, size_bytes: float) -> AlgorithmName:
        """The algorithm of the half ``kind`` for a bucket of ``size_bytes``."""
        chosen: Algorithms | SizeClass = next((c for c in self.by_size if size_bytes <= c.size_bytes), self)
        return chosen.reduce_scatter if kind == REDUCE_SCATTER else chosen.all_gather

    def names(self, kind: str) -> list[AlgorithmName]:
        """The algorithms of the half ``kind`` over all sizes, small buckets first."""
        sizes = (*(size_class.size_bytes for size_class in self.by_size), math.inf)
        return list(dict.fromkeys(self.of(kind, size) for size in sizes))

    @property
    def repeat(self) -> bool:
        """Whether some ranks can represent all others in every algorithm."""
        names = {name for kind in (REDUCE_SCATTER, ALL_GATHER) for name in self.names(kind)}
        return not self.ring_order and all(ALGORITHMS[name].repeats for name in names)

    @property
    def in_words(self) -> list[str]:
        """The algorithms other than rings with their size limits, and the ring order, for tables."""
        limits: list[tuple[Algorithms | SizeClass, str]] = [(self, "")]
        limits += [(size_class, f" up to {size_class.size_bytes:,} bytes") for size_class in self.by_size]
        return [
            f"{name} {half}{limit}"
            for choice, limit in limits
            for half, name in (("reduce-scatter", choice.reduce_scatter), ("all-gather", choice.all_gather))
            if limit or name != RING
        ] + ([f"rings in the order {'-'.join(map(str, self.ring_order))}"] if self.ring_order else [])

    def check(self, hosts: Hosts) -> None:
        """Raise PlanError unless all algorithms support ranks on ``hosts``."""
        check_order(self.ring_order, hosts.world_size)
        for kind in (REDUCE_SCATTER, ALL_GATHER):
            for algorithm in self.names(kind):
                Selection(algorithm, kind).on(hosts)

    def select(self, kind: str, size_bytes: int, world_size: int, library: str = GLOO) -> Selection:
        """The selection for a ``kind`` of a tensor of ``size_bytes`` over ``world_size`` ranks with ``library``.

        Algorithms that depend on hosts still need them (``Selection.on``).
        """
        if library == NCCL:
            return native(kind, size_bytes, world_size, library)
        algorithm = self.of(kind, size_bytes)
        if ALGORITHMS[algorithm].is_library:
            return native(kind, size_bytes, world_size)
        order = self.ring_order if algorithm == RING else ()
        return Selection(algorithm, kind, pieces_for(size_bytes // world_size), order=order)


def native(kind: str, size_bytes: int, world_size: int, library: str = GLOO) -> Selection:
    """The library's own ``kind`` for a tensor of ``size_bytes`` over ``world_size`` ranks.

    NCCL forwards data in pieces of one buffer step (src/device, protocol Simple).
    """
    chunk_bytes = -(-size_bytes // world_size)
    if library == NCCL:
        return Selection(NCCL, kind, min(MOST_PIECES, max(1, -(-chunk_bytes // NCCL_STEP_BYTES))))
    return Selection(NATIVE, kind, segments_for(chunk_bytes))


RINGS = Algorithms()
