"""Push and pull: the all-reduce of parameter servers (Li et al., 2014) as a chunk program, laid out like BytePS.

Every rank serves a chunk of every tensor: it sums what the other ranks push, and they pull the sum. Each link carries as
many bytes as in a ring, but in one round each way instead of ``world_size - 1``, all at once.

If links are unequal, ranks may serve unequal ``shares``. With ``n`` ranks, one that serves the share ``s`` sends and
receives ``1 + (n - 2) s`` times the tensor: its own gradient, and the sums for all others. The link of a rank with a tiny
share thus carries the tensor once each way, compared with ``2 (n - 1) / n`` times in a ring. Because pushes and pulls use
opposite directions, a share may be split into ``pieces``: while one piece is pulled, the next is pushed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from headway.collectives.program import LOOKAHEAD_ROUNDS, ChunkProgram, Step
from headway.errors import PlanError


@dataclass(frozen=True, slots=True)
class Serving:
    """How servers share the work: the ``shares`` of ranks (empty if equal), each split into ``pieces``.

    With ``hosts``, hosts serve instead of ranks, including that many without workers (``server_hosts``).
    """

    shares: tuple[int, ...] = ()
    pieces: int = 1
    hosts: int | None = None

    def check(self, world_size: int) -> None:
        """Raise PlanError unless there are no shares, or one for each of ``world_size`` ranks."""
        if self.shares and len(self.shares) != world_size:
            raise PlanError(
                "the number of server shares does not match the ranks", got=f"{len(self.shares)} shares",
                expected=f"one for each of {world_size} ranks, or none", fix="Leave out shares to make them equal.",
            )  # fmt: skip

    def program(self, rank: int, world_size: int) -> ChunkProgram:
        """The chunk program of ``rank``."""
        assert self.hosts is None, "predicted, never run"
        return push_and_pull(rank, world_size, self.pieces, self.shares)


EVENLY = Serving()


@lru_cache(maxsize=4096)
def push_and_pull(rank: int, world_size: int, pieces: int = 1, shares: tuple[int, ...] = ()) -> ChunkProgram:
    """Push chunks to their servers, sum the own chunk, and pull the sums of the others.

    A pull needs the full sum of its piece. A push waits until the piece two before it has arrived from all ranks. The
    tensor is split into ``sum(shares)`` chunks, of which each rank serves its share; without shares, each rank serves
    one.
    """
    sizes = shares or (1,) * world_size
    firsts = (0, *accumulate(sizes))
    steps: list[Step] = []
    summed = [-1]  # by piece: the step after which its sum is complete

    def exchanges(piece: int, *, pulls: bool) -> list[Step]:
        def place(server: int) -> tuple[int, int]:
            """The first chunk piece of a server's share in this piece, and the number of them."""
            return firsts[server] * pieces + piece * sizes[server], sizes[server]

        transfers = []
        for distance in range(1, world_size):
            to, come_from = (rank + distance) % world_size, (rank - distance) % world_size
            (send_piece, run), (receive_piece, received) = (
                (place(rank), place(come_from)) if pulls else (place(to), place(rank))
            )
            transfers.append(
                Step(
                    send_piece, to, receive_piece, come_from, reduce=not pulls, run=run, receive_run=received,
                    send_after=summed[piece + 1] if pulls else summed[max(0, piece - 1)],
                )
            )  # fmt: skip
        return transfers

    for piece in range(pieces + 1):
        if piece < pieces:
            steps += exchanges(piece, pulls=False)
            summed.append(len(steps) - 1)
        if piece > 0:
            steps += exchanges(piece - 1, pulls=True)
    rounds = 1 if pieces == 1 else 2 * LOOKAHEAD_ROUNDS
    return ChunkProgram(
        "push_and_pull",
        rank,
        world_size,
        sum(sizes),
        tuple(steps),
        pieces,
        lookahead=max(1, rounds * (world_size - 1)),
        rotation=0 if shares else 1,
    )
