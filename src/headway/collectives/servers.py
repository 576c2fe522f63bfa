"""Push and pull: the all-reduce of parameter servers (Li et al., 2014), as BytePS lays it out, as a chunk program.

Every rank serves a chunk of every tensor: it adds up what the others push to it, and they pull the sum. As many bytes
pass each link as in a ring, in one round each way rather than ``world_size - 1``, but all at once.
"""

from __future__ import annotations

from functools import lru_cache

from headway.collectives.program import ChunkProgram, Step


@lru_cache(maxsize=4096)
def push_and_pull(rank: int, world_size: int) -> ChunkProgram:
    """Push chunks to their servers, add up the own one in the order of ranks before this one, pull the others.

    A push needs nothing, and a pull the whole sum.
    """
    others = range(1, world_size)
    pushes = tuple(
        Step(
            send_piece=(rank + other) % world_size,
            send_to=(rank + other) % world_size,
            receive_piece=rank,
            receive_from=(rank - other) % world_size,
            reduce=True,
        )
        for other in others
    )
    pulls = tuple(
        Step(
            send_piece=rank,
            send_to=(rank + other) % world_size,
            receive_piece=(rank - other) % world_size,
            receive_from=(rank - other) % world_size,
            reduce=False,
            send_after=len(pushes) - 1,
        )
        for other in others
    )
    return ChunkProgram(
        "push_and_pull",
        rank,
        world_size,
        world_size,
        pushes + pulls,
        lookahead=max(1, len(pushes)),
        rotation=1,
    )
