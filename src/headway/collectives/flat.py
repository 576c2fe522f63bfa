"""Collectives that treat all ranks alike, as chunk programs: direct, halving and doubling, trees, Gloo's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from headway.collectives.hierarchical import Hosts
from headway.collectives.program import LOOKAHEAD_ROUNDS, ChunkProgram, Step, owned_chunk
from headway.errors import PlanError

# Direct halves: every rank sends to every other one, all at once, as chunk programs.
#
# As many messages and bytes as in a ring, but nothing waits for what came before: a small tensor takes the latency of one
# message rather than of ``world_size - 1``. What that costs is memory, as all that is added up may arrive before any of
# it is: nearly as much as the tensor has. And where hosts have several workers, each of them sends to every worker of
# the others, so that their links carry many times what they do in a ring.


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


# Recursive halving and recursive doubling (Thakur, Rabenseifner, Gropp, 2005), as chunk programs.
#
# In each round of the reduce-scatter a rank and its partner halve what both of them still add up: it sends the half that
# holds its partner's chunk, in one message, and adds what it receives to the other. The all-gather goes back the same
# way. As many bytes as in a ring, in ``log2(world_size)`` messages and as many rounds rather than ``world_size - 1``.
#
# Partners are far apart first, so that what a message carries lies side by side. Where hosts have several workers, the
# large first rounds therefore go between hosts, whose links carry many times what they do in a ring.
#
# The number of ranks is a power of two. Others would have to be folded in, each by a message of the whole tensor before
# and of its own chunk behind: that alone takes as long as another algorithm needs for everything.


def is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, 8 and so on."""
    return number > 0 and number & (number - 1) == 0


def check_power_of_two(hosts: Hosts) -> None:
    """Raise PlanError unless the number of ranks is a power of two."""
    _check(hosts.world_size)


def _check(world_size: int) -> None:
    if not is_power_of_two(world_size):
        raise PlanError(
            "halving and doubling needs a number of workers that is a power of two",
            got=f"{world_size} workers",
            expected="2, 4, 8, 16 or a larger one",
            fix="Use the ring or direct collectives.",
        )


@lru_cache(maxsize=4096)
def halving_reduce_scatter(rank: int, world_size: int) -> ChunkProgram:
    """Halve what is added up, round by round, until the own chunk is left.

    Raises PlanError where the number of ranks is not a power of two.
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
    """Double what a rank has, from the own chunk on. All receives are posted at the beginning.

    Raises PlanError where the number of ranks is not a power of two.
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
    """How far apart partners are, near ones first."""
    distance = 1
    while distance < world_size:
        yield distance
        distance *= 2


def _block(rank: int, size: int, world_size: int) -> int:
    """The first chunk of the block of ``size`` chunks that holds the one that ``rank`` owns."""
    return owned_chunk(rank, world_size) // size * size


def _halving_program(
    name: str, rank: int, world_size: int, steps: tuple[Step, ...], lookahead: int
) -> ChunkProgram:
    return ChunkProgram(name, rank, world_size, world_size, steps, lookahead=lookahead, mirrors=True)


RECEIVES_POSTED = 2  # with scratch: those of a round, each of up to half a tensor

Run = tuple[int, int]  # the first chunk of some that lie side by side, and how many they are


# Trees for any number of ranks (Bruck and others, 1997; Träff, 2023), as chunk programs.
#
# Every chunk is added up along a tree of its own, whose root owns it, and goes back to all ranks along the same tree. So
# that all trees are carried out together, each round has one distance: a rank sends to the one that is so far behind it,
# and receives from the one before. What is left to add up is halved by a round, rounded up. As many bytes as in a ring,
# in ``log2(world_size)`` rounds, rounded up, rather than ``world_size - 1``: for a power of two as in halving and
# doubling, which needs one; for others nothing that is here is as short in so few bytes.
#
# What a message carries lies side by side but for where it goes round the end of the tensor, so a round is two messages.


def has_rounds_to_save(hosts: Hosts) -> bool:
    """Whether they take fewer rounds than a ring, and halving and doubling cannot take as few in fewer messages."""
    return hosts.world_size > 4 and not is_power_of_two(hosts.world_size)


@lru_cache(maxsize=4096)
def tree_reduce_scatter(rank: int, world_size: int) -> ChunkProgram:
    """Add up every chunk towards its owner: in each round a rank gives away half of the sums that it still has."""
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
    """The way back: in each round a rank sends what it has to whom it received sums from, nearest first.

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
    """Of each round of the reduce-scatter how far apart partners are, and how many chunks one sends the other."""
    left = world_size
    while left > 1:
        distance = (left + 1) // 2
        yield distance, left - distance
        left = distance


def _runs(first: int, count: int, world_size: int) -> list[Run]:
    """The ``count`` chunks from ``first`` on, around the end, in as many messages on every rank: two, or one for one.

    Sender and receiver cut the same chunks, so that their messages match.
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
UNDER_WAY = 2


# Gloo's own collectives as chunk programs: what replay plays for those of a process group on Gloo.
#
# Gloo's all-reduce (gloo/allreduce.cc) is a ring to the left whose chunks are cut into two segments, or more where one
# would be larger than 1 MiB. Two segments are in flight at a time: a rank posts the receive and the send of one when it
# is through with the last but one before it. The gather begins when the reduction is over. Its all-gather
# (gloo/allgather.cc) is a ring to the right, of halves of chunks. torch makes its reduce-scatter of a whole all-reduce.
# Its all-to-all (gloo/alltoall.cc) posts every send and receive immediately.


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
