"""Direct halves: every rank sends to every other one, all at once, as chunk programs.

As many messages and bytes as in a ring, but nothing waits for what came before: a small tensor takes the latency of one
message rather than of ``world_size - 1``. What that costs is memory, as all that is added up may arrive before any of
it is: nearly as much as the tensor has. And where hosts have several workers, each of them sends to every worker of
the others, so that their links carry many times what they do in a ring.
"""

from __future__ import annotations

from functools import lru_cache

from headway.collectives.program import ChunkProgram, Step, owned_chunk


@lru_cache(maxsize=4096)
def direct_reduce_scatter(rank: int, world_size: int, pieces: int = 1) -> ChunkProgram:
    """Every chunk goes to its owner, which adds them up from the rank before it around to the one behind it."""
    own = owned_chunk(rank, world_size)
    steps = tuple(
        Step(
            send_piece=owned_chunk(rank + distance, world_size) * pieces + piece,
            send_to=(rank + distance) % world_size,
            receive_piece=own * pieces + piece,
            receive_from=(rank - distance) % world_size,
            reduce=True,
        )
        for distance in range(1, world_size)
        for piece in range(pieces)
    )
    return _direct_program("direct_reduce_scatter", rank, world_size, steps, pieces)


@lru_cache(maxsize=4096)
def direct_all_gather(rank: int, world_size: int, pieces: int = 1) -> ChunkProgram:
    """Every owner sends its chunk to all others."""
    own = owned_chunk(rank, world_size)
    steps = tuple(
        Step(
            send_piece=own * pieces + piece,
            send_to=(rank + distance) % world_size,
            receive_piece=owned_chunk(rank - distance, world_size) * pieces + piece,
            receive_from=(rank - distance) % world_size,
            reduce=False,
        )
        for distance in range(1, world_size)
        for piece in range(pieces)
    )
    return _direct_program("direct_all_gather", rank, world_size, steps, pieces)


def _direct_program(
    name: str, rank: int, world_size: int, steps: tuple[Step, ...], pieces: int
) -> ChunkProgram:
    """All receives are posted at the beginning: a receive that is posted later is announced behind what is sent."""
    lookahead = max(1, len(steps))
    return ChunkProgram(name, rank, world_size, world_size, steps, pieces, lookahead, rotation=1)
