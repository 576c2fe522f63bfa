"""Push and pull: the all-reduce of parameter servers (Li et al., 2014), as BytePS lays it out, as a chunk program.

Every rank serves a chunk of every tensor: it adds up what the others push to it, and they pull the sum. As many bytes
pass each link as in a ring, in one round each way rather than ``world_size - 1``, but all at once.

Where links are unequal, ranks may serve unequal ``shares``. With ``n`` ranks, one that serves the part ``s`` sends and
receives ``1 + (n - 2) s`` times the tensor: its own gradient and the sums for all others. So the link of a rank that
serves next to nothing carries the tensor once each way; in a ring it is ``2 (n - 1) / n`` times, whoever the rank is.
But it carries it one way while all push, and the other way while all pull. So a share may be cut into ``pieces``: while
one is pulled the next is pushed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from headway.collectives.program import LOOKAHEAD_ROUNDS, ChunkProgram, Step
from headway.errors import PlanError


@dataclass(frozen=True, slots=True)
class Serving:
    """How servers share the work: the ``shares`` of ranks, where they are unequal, each in so many ``pieces``.

    With ``hosts`` not ranks but hosts serve, and as many without workers (``server_hosts``).
    """

    shares: tuple[int, ...] = ()
    pieces: int = 1
    hosts: int | None = None

    def check(self, world_size: int) -> None:
        """Raise PlanError for shares that are not those of ``world_size`` ranks."""
        if self.shares and len(self.shares) != world_size:
            raise PlanError(
                "shares of servers are not as many as ranks", got=f"{len(self.shares)} shares",
                expected=f"one for each of {world_size} ranks, or none", fix="Leave out shares: all are equal then.",
            )  # fmt: skip

    def program(self, rank: int, world_size: int) -> ChunkProgram:
        """What ``rank`` does."""
        assert self.hosts is None, "predicted, never run"
        return push_and_pull(rank, world_size, self.pieces, self.shares)


EVENLY = Serving()


@lru_cache(maxsize=4096)
def push_and_pull(rank: int, world_size: int, pieces: int = 1, shares: tuple[int, ...] = ()) -> ChunkProgram:
    """Push chunks to their servers, add up the own one in the order of ranks before this one, pull the others.

    A pull needs the whole sum of its piece, and a push that the one two pieces before it has come from everybody. The
    tensor is cut into as many chunks as ``shares`` add up to, of which each rank serves so many; where there are none,
    each rank serves one.
    """
    sizes = shares or (1,) * world_size
    firsts = (0, *accumulate(sizes))
    steps: list[Step] = []
    summed = [-1]  # by piece, behind which step there is the sum of all before it

    def exchanges(piece: int, *, pulls: bool) -> list[Step]:
        def place(server: int) -> tuple[int, int]:
            """The first of the pieces that a server's share has of this one, and how many they are."""
            return firsts[server] * pieces + piece * sizes[server], sizes[server]

        found = []
        for distance in range(1, world_size):
            to, come_from = (rank + distance) % world_size, (rank - distance) % world_size
            (send_piece, run), (receive_piece, received) = (
                (place(rank), place(come_from)) if pulls else (place(to), place(rank))
            )
            found.append(
                Step(
                    send_piece, to, receive_piece, come_from, reduce=not pulls, run=run, receive_run=received,
                    send_after=summed[piece + 1] if pulls else summed[max(0, piece - 1)],
                )
            )  # fmt: skip
        return found

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
