"""Trees for any number of ranks (Bruck and others, 1997; Träff, 2023), as chunk programs.

Every chunk is added up along a tree of its own, whose root owns it, and goes back to all ranks along the same tree. So
that all trees are carried out together, each round has one distance: a rank sends to the one that is so far behind it,
and receives from the one before. What is left to add up is halved by a round, rounded up. As many bytes as in a ring,
in ``log2(world_size)`` rounds, rounded up, rather than ``world_size - 1``: for a power of two as in halving and
doubling, which needs one; for others nothing that is here is as short in so few bytes.

What a message carries lies side by side but for where it goes round the end of the tensor, so a round is two messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from headway.collectives.halving_doubling import is_power_of_two
from headway.collectives.hosts import Hosts
from headway.collectives.program import ChunkProgram, Step

RECEIVES_POSTED = 2  # with scratch: those of a round, each of up to half a tensor

Run = tuple[int, int]  # the first chunk of some that lie side by side, and how many they are


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
