"""Chunk programs: collectives as values.

A program says, for one rank, which piece of a flat tensor goes to whom in which step, what is done with the piece
that arrives, and what has to have arrived before. The live executor runs it on point-to-point messages; replay
expands it into transfers on links. Both read the same value, and both keep to what follows.

**Tensors.** A tensor is cut into ``chunks`` chunks, one a rank (``chunk_bounds``), and every chunk into ``pieces``
pieces (``piece_bounds``). Piece ``p`` of chunk ``c`` has the number ``c * pieces + p``. Which chunk a rank owns does
not depend on ``pieces``. A message is one piece, or a ``run`` of pieces that lie side by side.

**Order.** Steps are numbered round by round, and piece by piece within a round. Between two ranks messages match in
the order of the steps: receives are posted in it, and sends leave in it.

**Receives.** The receive of step ``i`` is posted when step ``i - lookahead`` is done, or at the beginning where there
is none; a message moves only once its receive is posted. Where a step replaces, its piece lands in place; where it
adds, it lands in scratch slot ``i % lookahead``, which is free again as soon as the addition is done.

**Done.** Step ``i`` is done when its piece has arrived and has been added, and step ``i - 1`` is done.

**Sends.** Step ``i`` sends as soon as step ``send_after`` is done (at the beginning where that is -1): the one that
delivered this very piece. So a piece is added and forwarded while the next one is on the wire. Nothing waits for a
send before the end, and the rank is done when all its steps are done and all its sends have left. No piece is written
while it is still leaving: what arrives for it later is made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.simulation.building import NONE, Edges, edges_of

LOOKAHEAD_ROUNDS = 2  # rounds whose receives are posted where they need scratch


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange of one rank: it sends a piece and receives another, each when the program's rules allow it.

    It may be as many pieces as ``run`` says, in one message, of which the first is named; and so may what it receives.
    """

    send_piece: int
    send_to: int
    receive_piece: int
    receive_from: int
    reduce: bool  # add what arrives to the own piece; otherwise it replaces the own piece
    send_after: int = -1  # the step that must be done before the send; never decreases along a program
    run: int = 1  # how many pieces it sends
    receive_run: int = 0  # how many it receives, where they are not as many

    @property
    def received(self) -> int:
        """How many pieces it receives."""
        return self.receive_run or self.run


@dataclass(frozen=True, slots=True)
class ChunkProgram:
    """The steps of one rank over a tensor cut into ``chunks`` chunks of ``pieces`` pieces each.

    ``lookahead`` is how many receives are posted at a time, at least 1. ``rotation`` is a number of ranks after which
    programs repeat: that of rank ``r + rotation`` is that of rank ``r`` with ``rotation`` added to its ranks and
    chunks. It divides the world size, or is 0 where there is no such number. ``mirrors`` says that they are alike in
    another way: for each divisor ``n`` of the world size ranks ``r`` and ``r + n`` send as much at each step, to ranks
    that are the same modulo ``n``.
    """

    algorithm: str
    rank: int
    world_size: int
    chunks: int
    steps: tuple[Step, ...]
    pieces: int = 1
    lookahead: int = 1
    rotation: int = 0
    mirrors: bool = False

    @property
    def scratch_slots(self) -> int:
        """How many scratch slots the program's additions use, each with room for the largest message."""
        return max(
            (number % self.lookahead + 1 for number, s in enumerate(self.steps) if s.reduce), default=0
        )

    @property
    def message_share(self) -> float:
        """The part of the tensor that a message is, in the mean over the program's."""
        run = sum(step.run for step in self.steps) / len(self.steps) if self.steps else 1.0
        return run / (self.chunks * self.pieces)

    def slot_numel(self, numel: int) -> int:
        """How many elements a scratch slot has for a tensor of ``numel`` elements."""
        run = max((step.received for step in self.steps if step.reduce), default=0)
        return run * largest_piece(numel, self.chunks, self.pieces)


ProgramOf = Callable[[int, int], ChunkProgram]
"""What makes the program of (rank, world size)."""


def owned_chunk(rank: int, world_size: int) -> int:
    """The chunk whose sum ``rank`` holds after a ring reduce-scatter, and brings to a ring all-gather: its own."""
    return rank % world_size


def chunk_bounds(numel: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Cut ``numel`` elements into ``chunks`` runs whose sizes differ by one at most: (start, end) of each.

    Some runs are empty where ``numel < chunks``.
    """
    base, extra = divmod(numel, chunks)
    bounds = []
    start = 0
    for index in range(chunks):
        end = start + base + (1 if index < extra else 0)
        bounds.append((start, end))
        start = end
    return tuple(bounds)


def piece_bounds(numel: int, chunks: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """(start, end) of every piece, chunk by chunk: ``chunk_bounds`` applied again inside each chunk."""
    return tuple(
        (start + first, start + last)
        for start, end in chunk_bounds(numel, chunks)
        for first, last in chunk_bounds(end - start, pieces)
    )


def largest_piece(numel: int, chunks: int, pieces: int) -> int:
    """How many elements the largest piece has."""
    chunk = (numel + chunks - 1) // chunks
    return (chunk + pieces - 1) // pieces


def pieces_for(chunk_bytes: int) -> int:
    """Into how many pieces to cut chunks of this size where nobody has measured: 2 from 2 MiB, else 1.

    On links of 200 Mbit/s to 1 Gbit/s a piece costs more than it hides up to chunks of 128 kB, pieces make no
    difference between that and 1 MB, and from 2 MB two of them gain a tenth where the cores are busy.
    """
    return 2 if chunk_bytes >= 2 * 2**20 else 1


@lru_cache(maxsize=4096)
def ring_reduce_scatter(rank: int, world_size: int, pieces: int = 1) -> ChunkProgram:
    """The ring reduce-scatter (Patarasuk and Yuan, 2009): ``world_size - 1`` rounds of one chunk each way.

    Round ``t`` sends chunk ``rank - 1 - t`` onwards, with the sums gathered so far; at the end chunk ``rank`` is
    whole. It has been added up in the order of ranks ``rank + 1, rank + 2, …, rank``.
    """
    steps = _ring_steps(rank, world_size, pieces, [rank - 1 - t for t in range(world_size)], reduce=True)
    return ChunkProgram(
        "ring_reduce_scatter",
        rank,
        world_size,
        world_size,
        steps,
        pieces,
        LOOKAHEAD_ROUNDS * pieces,
        rotation=1,
    )


@lru_cache(maxsize=4096)
def ring_all_gather(rank: int, world_size: int, pieces: int = 1) -> ChunkProgram:
    """The ring all-gather that follows: round ``t`` sends on what the round before brought, first chunk ``rank``.

    Every piece lands in a place of its own, so that all receives are posted at the beginning.
    """
    steps = _ring_steps(rank, world_size, pieces, [rank - t for t in range(world_size)], reduce=False)
    lookahead = max(1, len(steps))
    return ChunkProgram("ring_all_gather", rank, world_size, world_size, steps, pieces, lookahead, rotation=1)


@lru_cache(maxsize=4096)
def ring_all_reduce(rank: int, world_size: int, pieces: int = 1) -> ChunkProgram:
    """Reduce-scatter, then all-gather: what Gloo and NCCL document for large tensors."""
    scatter = ring_reduce_scatter(rank, world_size, pieces)
    gather = _ring_steps(
        rank,
        world_size,
        pieces,
        [rank - t for t in range(world_size)],
        reduce=False,
        first=len(scatter.steps),
    )
    return ChunkProgram(
        "ring_all_reduce",
        rank,
        world_size,
        world_size,
        scatter.steps + gather,
        pieces,
        scatter.lookahead,
        rotation=1,
    )


def in_order(rank: int, world_size: int, program_of: ProgramOf, order: tuple[int, ...]) -> ChunkProgram:
    """A program whose ranks stand in another ``order``: the one at place ``p`` does what rank ``p`` would.

    Chunks are those of ranks, as before: which one a rank owns does not depend on the order.
    """
    assert sorted(order) == list(range(world_size))
    program = program_of(order.index(rank), world_size)

    def moved(piece: int) -> int:
        chunk, within = divmod(piece, program.pieces)
        return order[chunk] * program.pieces + within

    steps = tuple(
        replace(
            step, send_piece=moved(step.send_piece), send_to=order[step.send_to],
            receive_piece=moved(step.receive_piece), receive_from=order[step.receive_from],
        )
        for step in program.steps
    )  # fmt: skip
    assert all(step.run == step.received == 1 for step in steps), (
        "a run of pieces may not lie side by side then"
    )
    return replace(program, rank=rank, steps=steps, rotation=0)


def _ring_steps(
    rank: int, world_size: int, pieces: int, chunks: list[int], *, reduce: bool, first: int = 0
) -> tuple[Step, ...]:
    """Rounds of a ring that sends ``chunks[t]`` to the right in round ``t`` and receives ``chunks[t + 1]``.

    ``first`` is the number of the first step. What a round sends came in the round before it.
    """
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    return tuple(
        Step(
            send_piece=chunks[t] % world_size * pieces + piece,
            send_to=right,
            receive_piece=chunks[t + 1] % world_size * pieces + piece,
            receive_from=left,
            reduce=reduce,
            send_after=max(-1, first + (t - 1) * pieces + piece),
        )
        for t in range(world_size - 1)
        for piece in range(pieces)
    )


def scratch_numel_of(program: ChunkProgram, numel: int) -> int:
    """How many elements ``program`` needs as scratch for a tensor of ``numel`` elements."""
    return program.scratch_slots * program.slot_numel(numel)


def scratch_numel(numel: int, chunks: int, pieces: int = 1) -> int:
    """How many elements a ring of ``chunks`` ranks needs as scratch for a tensor of ``numel`` elements.

    These are the pieces whose receives are posted at a time; no more than two chunks, but for rounding.
    """
    return scratch_numel_of(ring_reduce_scatter(0, chunks, pieces), numel)


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
