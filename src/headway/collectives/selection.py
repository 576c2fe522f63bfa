"""Selection: which algorithm carries out a bucket's collective, and in how many pieces.

One rule for the live runtime, for replay and for predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.algorithms import (
    ALGORITHMS,
    ALL_GATHER,
    FOR_HALVES,
    GLOO_ALL_REDUCE,
    NATIVE,
    NCCL,
    REDUCE_SCATTER,
    RING,
    cost_name,
    program_of,
)
from headway.collectives.gloo import segments_for
from headway.collectives.program import ProgramOf, pieces_for


def _may_be_chosen(name: str) -> str:
    if name not in FOR_HALVES:
        raise ValueError(f"expected {' or '.join(FOR_HALVES)}")
    return name


AlgorithmName = Annotated[str, AfterValidator(_may_be_chosen)]
GLOO = "gloo"
NCCL_STEP_BYTES = 2**19  # buffers of 4 MiB in eight steps
MOST_PIECES = 64  # more would change next to nothing, and be many messages


class Selection(NamedTuple):
    """How one collective of some kind is carried out."""

    algorithm: str
    kind: str
    pieces: int = 1

    @property
    def program_of(self) -> ProgramOf:
        """Its chunk programs."""
        return program_of(self.algorithm, self.kind, self.pieces)

    @property
    def cost_names(self) -> tuple[str, ...]:
        """The names under which a cluster may hold its cost or one like it, the most fitting one first."""
        names = [cost_name(self.algorithm, self.kind, pieces) for pieces in (self.pieces, 1)]
        return tuple(
            dict.fromkeys([*names, *([GLOO_ALL_REDUCE] if ALGORITHMS[self.algorithm].is_library else [])])
        )

    def cost(self, cluster: Cluster) -> AlgorithmCost:
        """What it costs on ``cluster``.

        Where nobody measured it, a ring in pieces costs what one of whole chunks does, a native half what a native
        all-reduce does.
        """
        return next(
            (cluster.algorithms[n] for n in self.cost_names if n in cluster.algorithms), AlgorithmCost()
        )


@dataclass(frozen=True, slots=True)
class Algorithms:
    """The algorithm of each half of a decoupled all-reduce.

    NCCL has its own for both, whatever is said here.
    """

    reduce_scatter: AlgorithmName = "ring"
    all_gather: AlgorithmName = "ring"

    def select(self, kind: str, size_bytes: int, world_size: int, library: str = GLOO) -> Selection:
        """How a ``kind`` of a tensor of ``size_bytes`` is carried out over ``world_size`` ranks by ``library``."""
        if library == NCCL:
            return native(kind, size_bytes, world_size, library)
        algorithm = {REDUCE_SCATTER: self.reduce_scatter, ALL_GATHER: self.all_gather}[kind]
        pieces = pieces_for(size_bytes // world_size)
        return (
            Selection(algorithm, kind, pieces) if algorithm == RING else native(kind, size_bytes, world_size)
        )


def native(kind: str, size_bytes: int, world_size: int, library: str = GLOO) -> Selection:
    """The own ``kind`` of a process group of ``library``, of a tensor of ``size_bytes`` over ``world_size`` ranks.

    NCCL hands on what it receives in pieces of a step of its buffers (src/device, protocol Simple).
    """
    chunk_bytes = -(-size_bytes // world_size)
    if library == NCCL:
        return Selection(NCCL, kind, min(MOST_PIECES, max(1, -(-chunk_bytes // NCCL_STEP_BYTES))))
    return Selection(NATIVE, kind, segments_for(chunk_bytes))


RINGS = Algorithms()
