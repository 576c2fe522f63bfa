"""Recursive halving and recursive doubling (Thakur, Rabenseifner, Gropp, 2005), as chunk programs.

In each round of the reduce-scatter a rank and its partner halve what both of them still add up: it sends the half that
holds its partner's chunk, in one message, and adds what it receives to the other. The all-gather goes back the same
way. As many bytes as in a ring, in ``log2(world_size)`` messages and as many rounds rather than ``world_size - 1``.

Partners are far apart first, so that what a message carries lies side by side. Where hosts have several workers, the
large first rounds therefore go between hosts, whose links carry many times what they do in a ring.

The number of ranks is a power of two. Others would have to be folded in, each by a message of the whole tensor before
and of its own chunk behind: that alone takes as long as another algorithm needs for everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from headway.collectives.hosts import Hosts
from headway.collectives.program import LOOKAHEAD_ROUNDS, ChunkProgram, Step, owned_chunk
from headway.errors import PlanError


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
