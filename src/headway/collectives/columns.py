"""Chunk programs of all ranks as columns, and what waits for what in them: for graphs of very many messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.collectives.program import ChunkProgram, ProgramOf
from headway.simulation.operations import NONE, Edges, edges_of

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ProgramColumns:
    """The steps of every rank, of shape (steps, ranks): what ``ChunkProgram`` says of one.

    Of a folded collective these are the first ranks' only; whom they send to is not folded.
    """

    world_size: int
    chunks: int
    pieces: int
    lookahead: int
    send_to: Numbers
    send_piece: Numbers
    send_after: Numbers
    run: Numbers

    @cached_property
    def pairs(self) -> tuple[Numbers, Numbers]:
        """Who sends to whom at all, of shape (pairs, 2), and for each step and rank which of them it is."""
        pair = np.arange(self.send_to.shape[1], dtype=np.int64) * self.world_size + self.send_to
        distinct, which = np.unique(pair, return_inverse=True)
        return (
            np.stack(np.divmod(distinct, self.world_size), axis=1).astype(np.int32),
            which.reshape(pair.shape).astype(np.int32),
        )

    @property
    def last_sends(self) -> tuple[Ints, Ints]:
        """The last message of each rank to each that it sends to: its step and its sender, of each."""
        _, pair_of = self.pairs
        _, latest = np.unique(pair_of[::-1], return_index=True)
        turn, rank = np.divmod(latest, pair_of.shape[1])
        return len(pair_of) - 1 - turn, rank

    @property
    def message_share(self) -> float:
        """The part of the tensor that a message is, in the mean over all."""
        return float(self.run.mean() if self.run.size else 1.0) / (self.chunks * self.pieces)


@lru_cache(maxsize=16)
def columns_of(program_of: ProgramOf, world_size: int, folded: int = 0) -> ProgramColumns:
    """The programs of all ranks, or of the first ``folded``; those that repeat after some ranks are made from these."""
    first, count = program_of(0, world_size), folded or world_size
    rotation = first.rotation
    if folded and first.mirrors:
        assert world_size % folded == 0
        return _stacked([program_of(rank, world_size) for rank in range(folded)])
    assert not folded or (rotation and folded % rotation == 0), "folded ranks hold whole rotations"
    known = _stacked([program_of(rank, world_size) for rank in range(rotation or world_size)])
    if rotation in {0, count}:
        return known
    shift = np.repeat(np.arange(0, count, rotation, dtype=np.int64), rotation)
    turns = count // rotation
    chunk, within = np.divmod(np.tile(known.send_piece, (1, turns)).astype(np.int64), known.pieces)
    return replace(
        known,
        send_to=((np.tile(known.send_to, (1, turns)) + shift) % world_size).astype(np.int32),
        send_piece=((chunk + shift) % known.chunks * known.pieces + within).astype(np.int32),
        send_after=np.tile(known.send_after, (1, turns)),
        run=np.tile(known.run, (1, turns)),
    )


def _stacked(programs: list[ChunkProgram]) -> ProgramColumns:
    def column(name: str) -> Numbers:
        each = [[getattr(step, name) for step in program.steps] for program in programs]
        return np.array(each, dtype=np.int32).reshape(len(programs), -1).T

    first = programs[0]
    return ProgramColumns(
        first.world_size, first.chunks, first.pieces, first.lookahead,
        column("send_to"), column("send_piece"), column("send_after"), column("run"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Who waits for whom in one collective, by the rules of ``collectives.program``.

    Its operations are, in this order: what it costs each rank at first, and for each rank and step a transfer to others
    and the rank's own "done". Successors below NONE are outside: OUTSIDE - r is the end of rank r.
    """

    ranks: int
    edges: Edges
    waits: Numbers
    outside: npt.NDArray[np.intp]  # where among all slots successors are outside

    @property
    def operations(self) -> int:
        """How many operations there are."""
        return len(self.waits)

    def places(self, base: int) -> tuple[slice, slice, slice]:
        """Where they are in a graph that has them from ``base`` on: beginnings, transfers, and what is done by them.

        Of the latter two all of one rank's steps come before the next rank's.
        """
        first, end = base + self.ranks, base + self.operations
        return slice(base, first), slice(first, end, 2), slice(first + 1, end, 2)


OUTSIDE = NONE - 1


@lru_cache(maxsize=16)
def structure_of(program_of: ProgramOf, world_size: int, folded: int = 0) -> Structure:
    """The structure of a collective of all ranks, or of the first ``folded``, each of which stands for its like.

    Rank ``r`` is like rank ``r + folded``: what would reach the one reaches the other at the same moment.

    A message leaves when its sender has done the step that delivered it and its receiver has posted the receive. A
    rank ends when its last message has been received and its last one to each other rank has arrived.
    """
    columns = columns_of(program_of, world_size, folded)
    count = folded or world_size
    steps, ranks = len(columns.send_to), np.arange(count)
    number = np.arange(steps)[:, None]
    transfer = count + 2 * (ranks * steps + number)  # what follows each other on a rank lies side by side
    done = np.concatenate(
        [ranks[None, :], transfer + 1]
    )  # after step n - 1: its row n; row 0 is the beginning
    receiver = columns.send_to % count
    ends = OUTSIDE - ranks
    pairs = [
        (done[-1], ends),
        (transfer[columns.last_sends], ends[columns.last_sends[1]]),
        (transfer, np.take_along_axis(done[1:], receiver, axis=1)),  # it arrives
        (done[:-1], done[1:]),  # steps are done in turn
        (np.take_along_axis(done, columns.send_after + 1, axis=0), transfer),  # the sender has it
        (done[np.maximum(number - columns.lookahead + 1, 0), receiver], transfer),  # the receive is posted
    ]
    before = np.concatenate([pair[0].ravel() for pair in pairs])
    after = np.concatenate([pair[1].ravel() for pair in pairs])
    operations = count * (1 + 2 * steps)
    edges = edges_of(before, after, operations)
    assert not len(edges.targets) or edges.spilled[edges.targets].min() >= 0, "an end among what spills"
    return Structure(
        ranks=count,
        edges=edges,
        waits=np.bincount(after[after >= 0], minlength=operations).astype(np.int32),
        outside=np.flatnonzero(edges.slots.ravel() <= OUTSIDE),
    )


def message_bytes(columns: ProgramColumns, size_bytes: int, byte_factor: float) -> Ints:
    """How large the message of every step and rank is in a collective of ``size_bytes``."""
    sizes = piece_sizes(round(size_bytes * byte_factor), columns.chunks, columns.pieces)
    before = np.concatenate([[0], np.cumsum(sizes)])
    bytes_: Ints = before[columns.send_piece + columns.run] - before[columns.send_piece]
    return bytes_


def piece_sizes(numel: int, chunks: int, pieces: int) -> Ints:
    """How many elements every piece has, as ``program.piece_bounds`` cuts them."""
    chunk = numel // chunks + (np.arange(chunks) < numel % chunks)
    sizes: Ints = chunk[:, None] // pieces + (np.arange(pieces) < chunk[:, None] % pieces)
    return sizes.ravel()
