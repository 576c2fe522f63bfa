"""Gloo's own collectives as chunk programs: what replay plays for those of a process group on Gloo.

Gloo's all-reduce (gloo/allreduce.cc) is a ring to the left whose chunks are cut into two segments, or more where one
would be larger than 1 MiB. Two segments are in flight at a time: a rank posts the receive and the send of one when it
is through with the last but one before it. The gather begins when the reduction is over. Its all-gather
(gloo/allgather.cc) is a ring to the right, of halves of chunks. torch makes its reduce-scatter of a whole all-reduce.
Its all-to-all (gloo/alltoall.cc) posts every send and receive immediately.
"""

from __future__ import annotations

from functools import lru_cache

from headway.collectives.program import ChunkProgram, Step

SEGMENTS = 2
MAX_SEGMENT_BYTES = 2**20
UNDER_WAY = 2


def segments_for(chunk_bytes: int) -> int:
    """Into how many segments Gloo's all-reduce cuts chunks of this size."""
    return max(SEGMENTS, -(-chunk_bytes // MAX_SEGMENT_BYTES))


@lru_cache(maxsize=4096)
def gloo_all_reduce(rank: int, world_size: int, pieces: int = SEGMENTS) -> ChunkProgram:
    """The reduction, in which chunk ``rank`` becomes whole, and the gather."""
    scatter = _steps(rank, world_size, pieces, first_chunk=rank + 1, to_the_right=False, reduce=True)
    gather = _steps(
        rank, world_size, pieces, first_chunk=rank, to_the_right=False, reduce=False, first=len(scatter)
    )
    return ChunkProgram(
        "gloo_all_reduce", rank, world_size, world_size, scatter + gather, pieces, UNDER_WAY, rotation=1
    )


@lru_cache(maxsize=4096)
def gloo_all_gather(rank: int, world_size: int, pieces: int = SEGMENTS) -> ChunkProgram:
    """Every rank's chunk to all others; always in halves, whatever ``pieces`` says of other collectives."""
    del pieces
    steps = _steps(rank, world_size, SEGMENTS, first_chunk=rank, to_the_right=True, reduce=False)
    return ChunkProgram(
        "gloo_all_gather", rank, world_size, world_size, steps, SEGMENTS, UNDER_WAY, rotation=1
    )


@lru_cache(maxsize=4096)
def gloo_all_to_all(rank: int, world_size: int) -> ChunkProgram:
    """A chunk of this rank to every other rank, and theirs to it. Only replayed: they land in another tensor."""
    steps = tuple(
        Step(
            send_piece=(rank + turn) % world_size,
            send_to=(rank + turn) % world_size,
            receive_piece=(rank - turn) % world_size,
            receive_from=(rank - turn) % world_size,
            reduce=False,
        )
        for turn in range(1, world_size)
    )
    return ChunkProgram(
        "gloo_all_to_all", rank, world_size, world_size, steps, lookahead=max(1, len(steps)), rotation=1
    )


def _steps(
    rank: int,
    world_size: int,
    pieces: int,
    *,
    first_chunk: int,
    to_the_right: bool,
    reduce: bool,
    first: int = 0,
) -> tuple[Step, ...]:
    """Rounds of a ring in which a rank sends ``first_chunk``, then what it received the round before, and so on."""
    way = 1 if to_the_right else -1
    return tuple(
        Step(
            send_piece=(first_chunk - way * turn) % world_size * pieces + piece,
            send_to=(rank + way) % world_size,
            receive_piece=(first_chunk - way * (turn + 1)) % world_size * pieces + piece,
            receive_from=(rank - way) % world_size,
            reduce=reduce,
            send_after=max(first - 1, first + turn * pieces + piece - UNDER_WAY),
        )
        for turn in range(world_size - 1)
        for piece in range(pieces)
    )
