"""Chunk programs: collectives as values.

A program says, for one rank, which chunk of a flat tensor goes to whom in which round and what is done with
the chunk that arrives. The live executor runs it on point-to-point messages; replay expands it into
transfers on links. Both read the same value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange of one rank: it sends a chunk and receives another at the same time."""

    send_chunk: int
    send_to: int
    receive_chunk: int
    receive_from: int
    reduce: bool  # add what arrives to the own chunk; otherwise it replaces the own chunk


@dataclass(frozen=True, slots=True)
class ChunkProgram:
    """The rounds of one rank over a tensor cut into ``chunks`` pieces (see ``chunk_bounds``)."""

    algorithm: str
    rank: int
    world_size: int
    chunks: int
    rounds: tuple[Round, ...]


def owned_chunk(rank: int, world_size: int) -> int:
    """The chunk whose sum ``rank`` holds after a ring reduce-scatter, and brings to a ring all-gather."""
    return (rank + 1) % world_size


def chunk_bounds(numel: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Cut ``numel`` elements into ``chunks`` runs whose sizes differ by one at most: (start, end) of each.

    Some runs are empty where ``numel < chunks``.
    """
    base, extra = divmod(numel, chunks)
    bounds = []
    start = 0
    for index in range(chunks):
        end = start + base + (1 if index < extra else 0)
        bounds.append((start, end))
        start = end
    return tuple(bounds)


@lru_cache(maxsize=4096)
def ring_reduce_scatter(rank: int, world_size: int) -> ChunkProgram:
    """The ring reduce-scatter (Patarasuk and Yuan, 2009): ``world_size - 1`` rounds of one chunk each way.

    Round ``t`` sends chunk ``rank - t`` onwards, with the sums gathered so far.
    """
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    rounds = tuple(
        Round((rank - t) % world_size, right, (rank - t - 1) % world_size, left, reduce=True)
        for t in range(world_size - 1)
    )
    return ChunkProgram("ring_reduce_scatter", rank, world_size, world_size, rounds)


@lru_cache(maxsize=4096)
def ring_all_gather(rank: int, world_size: int) -> ChunkProgram:
    """The ring all-gather that follows: round ``t`` sends on what the round before brought."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    rounds = tuple(
        Round((rank + 1 - t) % world_size, right, (rank - t) % world_size, left, reduce=False)
        for t in range(world_size - 1)
    )
    return ChunkProgram("ring_all_gather", rank, world_size, world_size, rounds)


@lru_cache(maxsize=4096)
def ring_all_reduce(rank: int, world_size: int) -> ChunkProgram:
    """Reduce-scatter, then all-gather: what Gloo and NCCL document for large tensors."""
    rounds = ring_reduce_scatter(rank, world_size).rounds + ring_all_gather(rank, world_size).rounds
    return ChunkProgram("ring_all_reduce", rank, world_size, world_size, rounds)
