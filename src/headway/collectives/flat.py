"""Chunk programs that ignore hosts: direct, halving and doubling, trees, and Gloo's own collectives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from headway.collectives.hierarchical import Hosts
from headway.collectives.program import LOOKAHEAD_ROUNDS, ChunkProgram, Step, owned_chunk
from headway.errors import PlanError

# Direct halves: every rank sends to every other rank at once.
#
# The same messages and bytes as a ring, but without dependencies: a small tensor takes the latency of one message instead
# of ``world_size - 1``. The price is scratch memory of nearly the tensor's size, since all may arrive before any of it
# is added. With several workers per host, links carry many times the traffic of a ring.


@lru_cache(maxsize=4096)
def direct_reduce_scatter(rank: int, world_size: int, pieces: int = 1) -> ChunkProgram:
    """Send every chunk to its owner, which adds them up in decreasing rank order, starting with the rank before it."""
    own_chunk = owned_chunk(rank, world_size)
    steps = tuple(
        Step(
            send_piece=owned_chunk(rank + distance, world_size) * pieces + piece,
            send_to=(rank + distance) % world_size,
            receive_piece=own_chunk * pieces + piece,
            receive_from=(rank - distance) % world_size,
            reduce=True,
        )
        for distance in range(1, world_size)
        for piece in range(pieces)
    )
    return _direct_program("direct_reduce_scatter", rank, world_size, steps, pieces)


@lru_cache(maxsize=4096)
def direct_all_gather(rank: int, world_size: int, pieces: int = 1) -> ChunkProgram:
    """Send the own chunk to all other ranks."""
    own_chunk = owned_chunk(rank, world_size)
    steps = tuple(
        Step(
            send_piece=own_chunk * pieces + piece,
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
    """Post all receives at the beginning, since a later one would be announced behind payloads."""
    lookahead = max(1, len(steps))
    return ChunkProgram(name, rank, world_size, world_size, steps, pieces, lookahead, rotation=1)


# Recursive halving and recursive doubling (Thakur, Rabenseifner, Gropp, 2005), as chunk programs.
#
# In each round of the reduce-scatter, a rank and its partner halve the chunks that they still reduce: the rank sends the
# half with its partner's chunk in one message, and adds what it receives to the other half. The all-gather reverses this.
# The same bytes as a ring, in ``log2(world_size)`` messages and rounds instead of ``world_size - 1``.
#
# Partners are far apart first, so that a message is contiguous. With several workers per host, the large first rounds
# therefore cross hosts, and links carry many times the traffic of a ring.
#
# The number of ranks must be a power of two. Folding in other ranks takes a message of the full tensor before and of one
# chunk after, which alone takes as long as another algorithm.


def is_power_of_two(number: int) -> bool:
    """Whether ``number`` is 1, 2, 4, 8 and so on."""
    return number > 0 and number & (number - 1) == 0


def check_power_of_two(hosts: Hosts) -> None:
    """Raise PlanError unless the number of ranks is a power of two."""
    _check(hosts.world_size)


def _check(world_size: int) -> None:
    if not is_power_of_two(world_size):
        raise PlanError(
            "halving and doubling needs a power of two as the number of workers",
            got=f"{world_size} workers",
            expected="2, 4, 8, 16 or a larger power of two",
            fix="Use the ring or direct collectives.",
        )


@lru_cache(maxsize=4096)
def halving_reduce_scatter(rank: int, world_size: int) -> ChunkProgram:
    """Halve the chunks to reduce, round by round, until the own chunk is left.

    Raises PlanError if the number of ranks is not a power of two.
    """
    _check(world_size)
    steps = tuple(
        Step(
            send_piece=_block(rank ^ distance, distance, world_size),
            send_to=rank ^ distance,
            receive_piece=_block(rank, distance, world_size),
            receive_from=rank ^ distance,
            reduce=True,
            send_after=number - 1,
            run=distance,
        )
        for number, distance in enumerate(reversed(list(_distances(world_size))))
    )
    return _halving_program("halving_reduce_scatter", rank, world_size, steps, LOOKAHEAD_ROUNDS)


@lru_cache(maxsize=4096)
def doubling_all_gather(rank: int, world_size: int) -> ChunkProgram:
    """Double the gathered chunks, starting with the own one. All receives are posted at the beginning.

    Raises PlanError if the number of ranks is not a power of two.
    """
    _check(world_size)
    steps = tuple(
        Step(
            send_piece=_block(rank, distance, world_size),
            send_to=rank ^ distance,
            receive_piece=_block(rank ^ distance, distance, world_size),
            receive_from=rank ^ distance,
            reduce=False,
            send_after=number - 1,
            run=distance,
        )
        for number, distance in enumerate(_distances(world_size))
    )
    return _halving_program("doubling_all_gather", rank, world_size, steps, max(1, len(steps)))


def _distances(world_size: int) -> Iterator[int]:
    """The distances between partners, near ones first."""
    distance = 1
    while distance < world_size:
        yield distance
        distance *= 2


def _block(rank: int, size: int, world_size: int) -> int:
    """The first chunk of the block of ``size`` chunks that contains the own chunk of ``rank``."""
    return owned_chunk(rank, world_size) // size * size


def _halving_program(
    name: str, rank: int, world_size: int, steps: tuple[Step, ...], lookahead: int
) -> ChunkProgram:
    return ChunkProgram(name, rank, world_size, world_size, steps, lookahead=lookahead, mirrors=True)


RECEIVES_POSTED = 2  # with scratch: the receives of one round, each up to half a tensor

Run = tuple[int, int]  # contiguous chunks: the first, and their number


# Trees for any number of ranks (Bruck and others, 1997; Träff, 2023), as chunk programs.
#
# Every chunk is reduced along its own tree, whose root owns it, and gathered along the same tree. All trees run together:
# each round has one distance, at which a rank sends to the rank after it and receives from the rank before it. A round
# halves the chunks left to reduce, rounded up. The same bytes as a ring, in ``ceil(log2(world_size))`` rounds instead of
# ``world_size - 1``. For powers of two, halving and doubling needs the same; for other numbers nothing here is as short.
#
# A message is contiguous except where it wraps around the end of the tensor, so a round is two messages.


def has_rounds_to_save(hosts: Hosts) -> bool:
    """Whether trees take fewer rounds than a ring, and halving and doubling is not available."""
    return hosts.world_size > 4 and not is_power_of_two(hosts.world_size)


@lru_cache(maxsize=4096)
def tree_reduce_scatter(rank: int, world_size: int) -> ChunkProgram:
    """Reduce every chunk towards its owner: in each round, a rank sends away half of its remaining sums."""
    steps: list[Step] = []
    for distance, count in _rounds(world_size):
        before = len(steps) - 1
        sent = _runs(rank + distance, count, world_size)
        received = _runs(rank, count, world_size)
        steps += [
            Step(
                send_piece=send_piece, send_to=(rank + distance) % world_size,
                receive_piece=receive_piece, receive_from=(rank - distance) % world_size,
                reduce=True, send_after=before, run=run, receive_run=receive_run,
            )
            for (send_piece, run), (receive_piece, receive_run) in zip(sent, received, strict=True)
        ]  # fmt: skip
    return _tree_program("tree_reduce_scatter", rank, world_size, steps, RECEIVES_POSTED)


@lru_cache(maxsize=4096)
def tree_all_gather(rank: int, world_size: int) -> ChunkProgram:
    """Gather in reverse: in each round, a rank sends what it has to the ranks it received sums from, nearest first.

    All receives are posted at the beginning.
    """
    steps: list[Step] = []
    for distance, count in reversed(list(_rounds(world_size))):
        before = len(steps) - 1
        sent = _runs(rank, count, world_size)
        received = _runs(rank + distance, count, world_size)
        steps += [
            Step(
                send_piece=send_piece, send_to=(rank - distance) % world_size,
                receive_piece=receive_piece, receive_from=(rank + distance) % world_size,
                reduce=False, send_after=before, run=run, receive_run=receive_run,
            )
            for (send_piece, run), (receive_piece, receive_run) in zip(sent, received, strict=True)
        ]  # fmt: skip
    return _tree_program("tree_all_gather", rank, world_size, steps, max(1, len(steps)))


def _rounds(world_size: int) -> Iterator[tuple[int, int]]:
    """For each round of the reduce-scatter: the distance of partners, and the number of chunks sent."""
    left = world_size
    while left > 1:
        distance = (left + 1) // 2
        yield distance, left - distance
        left = distance


def _runs(first: int, count: int, world_size: int) -> list[Run]:
    """The ``count`` chunks from ``first`` on, with wrap-around, as two messages on every rank (one for a single chunk).

    Sender and receiver split the same chunks, so their messages match.
    """
    first %= world_size
    if count == 1:
        return [(first, 1)]
    cut = world_size - first if first + count > world_size else (count + 1) // 2
    return [(first, cut), ((first + cut) % world_size, count - cut)]


def _tree_program(name: str, rank: int, world_size: int, steps: list[Step], lookahead: int) -> ChunkProgram:
    return ChunkProgram(name, rank, world_size, world_size, tuple(steps), lookahead=lookahead)


SEGMENTS = 2
MAX_SEGMENT_BYTES = 2**20
SEGMENTS_IN_FLIGHT = 2


# Gloo's own collectives as chunk programs, which replay simulates for process groups on Gloo.
#
# Gloo's all-reduce (gloo/allreduce.cc) is a ring to the left whose chunks are split into two segments, or more if a
# segment would exceed 1 MiB. Two segments are in flight at a time: a rank posts the receive and send of a segment when it
# is done with the one two before it. The gather begins when the reduction is over. Its all-gather (gloo/allgather.cc) is
# a ring to the right with half chunks. torch implements reduce-scatter as a full all-reduce. All-to-all
# (gloo/alltoall.cc) posts every send and receive immediately.


def segments_for(chunk_bytes: int) -> int:
    """The number of segments into which Gloo's all-reduce splits chunks of this size."""
    return max(SEGMENTS, -(-chunk_bytes // MAX_SEGMENT_BYTES))


@lru_cache(maxsize=4096)
def gloo_all_reduce(rank: int, world_size: int, pieces: int = SEGMENTS) -> ChunkProgram:
    """The reduction, which completes chunk ``rank``, then the gather."""
    scatter = _steps(rank, world_size, pieces, first_chunk=rank + 1, to_the_right=False, reduce=True)
    gather = _steps(
        rank, world_size, pieces, first_chunk=rank, to_the_right=False, reduce=False, first=len(scatter)
    )
    return ChunkProgram(
        "gloo_all_reduce",
        rank,
        world_size,
        world_size,
        scatter + gather,
        pieces,
        SEGMENTS_IN_FLIGHT,
        rotation=1,
    )


@lru_cache(maxsize=4096)
def gloo_all_gather(rank: int, world_size: int, pieces: int = SEGMENTS) -> ChunkProgram:
    """Gather every rank's chunk, always in halves; ``pieces`` is ignored."""
    del pieces
    steps = _steps(rank, world_size, SEGMENTS, first_chunk=rank, to_the_right=True, reduce=False)
    return ChunkProgram(
        "gloo_all_gather", rank, world_size, world_size, steps, SEGMENTS, SEGMENTS_IN_FLIGHT, rotation=1
    )


@lru_cache(maxsize=4096)
def gloo_all_to_all(rank: int, world_size: int) -> ChunkProgram:
    """Exchange a chunk with every other rank. Only for replay, because the chunks land in another tensor."""
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
    """Rounds of a ring: a rank first sends ``first_chunk``, then what it received in the round before."""
    way = 1 if to_the_right else -1
    return tuple(
        Step(
            send_piece=(first_chunk - way * turn) % world_size * pieces + piece,
            send_to=(rank + way) % world_size,
            receive_piece=(first_chunk - way * (turn + 1)) % world_size * pieces + piece,
            receive_from=(rank - way) % world_size,
            reduce=reduce,
            send_after=max(first - 1, first + turn * pieces + piece - SEGMENTS_IN_FLIGHT),
        )
        for turn in range(world_size - 1)
        for piece in range(pieces)
    )
