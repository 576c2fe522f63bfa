"""Chunk programs: collectives as values.

A program says, for one rank, which piece of a flat tensor goes to which rank in which step, what happens to the arriving
piece, and what has to arrive before. The live executor runs it with point-to-point messages; replay expands it into
transfers on links. Both follow these rules:

**Tensors.** A tensor is split into ``chunks`` chunks, one per rank (``chunk_bounds``), and every chunk into ``pieces``
pieces (``piece_bounds``). Piece ``p`` of chunk ``c`` has the number ``c * pieces + p``. Chunk ownership does not depend
on ``pieces``. A message is one piece, or a ``run`` of contiguous pieces.

**Order.** Steps are numbered round by round, and piece by piece within a round. Messages between two ranks match in the
order of steps: receives are posted, and sends leave, in that order.

**Receives.** The receive of step ``i`` is posted when step ``i - lookahead`` is done, or at the beginning without such a
step; a message moves only once its receive is posted. If a step replaces, its piece lands in place. If it adds, the piece
lands in scratch slot ``i % lookahead``, which is free again after the addition.

**Done.** Step ``i`` is done when its piece has arrived and has been added, and step ``i - 1`` is done.

**Sends.** Step ``i`` sends as soon as step ``send_after`` is done (at the beginning if that is -1), the step that
delivered this piece. So a piece is added and forwarded while the next one is on the wire. Nothing waits for a send until
the end: the rank is done when all its steps are done and all its sends have left. No piece is overwritten while it is
being sent, because what arrives for it later depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.simulation.building import NONE, Edges, edges_of

LOOKAHEAD_ROUNDS = 2  # rounds of receives posted ahead if they need scratch


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange of one rank: it sends one message and receives one, each when the program's rules allow it.

    A message has ``run`` contiguous pieces (or ``receive_run``), identified by the first.
    """

    send_piece: int
    send_to: int
    receive_piece: int
    receive_from: int
    reduce: bool  # add what arrives to the own piece; otherwise it replaces the own piece
    send_after: int = -1  # the step that must be done before the send; never decreases along a program
    run: int = 1  # number of pieces sent
    receive_run: int = 0  # number of pieces received, if different

    @property
    def received(self) -> int:
        """The number of pieces received."""
        return self.receive_run or self.run


@dataclass(frozen=True, slots=True)
class ChunkProgram:
    """The steps of one rank over a tensor split into ``chunks`` chunks of ``pieces`` pieces each.

    ``lookahead`` is the number of receives posted at a time, at least 1. ``rotation`` is a period in ranks: that of
    rank ``r + rotation`` is that of rank ``r`` with ``rotation`` added to its ranks and chunks. It divides the world
    size, or is 0 without such a period. ``mirrors`` is another symmetry: for each divisor ``n`` of the world size, ranks
    ``r`` and ``r + n`` send equally much at each step, to ranks that are equal modulo ``n``.
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
        """The number of scratch slots for additions, each as large as the largest message."""
        return max(
            (number % self.lookahead + 1 for number, s in enumerate(self.steps) if s.reduce), default=0
        )

    @property
    def message_share(self) -> float:
        """The mean size of a message, as a share of the tensor."""
        run = sum(step.run for step in self.steps) / len(self.steps) if self.steps else 1.0
        return run / (self.chunks * self.pieces)

    def slot_numel(self, numel: int) -> int:
        """The elements of a scratch slot for a tensor of ``numel`` elements."""
        run = max((step.received for step in self.steps if step.reduce), default=0)
        return run * largest_piece(numel, self.chunks, self.pieces)


ProgramOf = Callable[[int, int], ChunkProgram]
"""Makes the program of (rank, world size)."""


def owned_chunk(rank: int, world_size: int) -> int:
    """The chunk that ``rank`` owns: its result of a reduce-scatter, and its input of an all-gather."""
    return rank % world_size


def chunk_bounds(numel: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Split ``numel`` elements into ``chunks`` ranges (start, end) whose sizes differ by at most one.

    Some ranges are empty if ``numel < chunks``.
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
    """The elements of the largest piece."""
    chunk = (numel + chunks - 1) // chunks
    return (chunk + pieces - 1) // pieces


def pieces_for(chunk_bytes: int) -> int:
    """The default number of pieces for chunks of this size: 2 from 2 MiB on, else 1.

    On links of 200 Mbit/s to 1 Gbit/s, pieces cost more than they hide for chunks up to 128 kB, make no difference up to
    1 MB, and from 2 MB on two of them gain 10% if cores are busy.
    """
    return 2 if chunk_bytes >= 2 * 2**20 else 1


@lru_cache(maxsize=4096)
def ring_reduce_scatter(rank: int, world_size: int, pieces: int = 1) -> ChunkProgram:
    """The ring reduce-scatter (Patarasuk and Yuan, 2009): ``world_size - 1`` rounds of one chunk each way.

    Round ``t`` passes on chunk ``rank - 1 - t`` with its partial sum; at the end, chunk ``rank`` is complete, summed
    in the order of ranks ``rank + 1, rank + 2, …, rank``.
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
    """The ring all-gather: round ``t`` passes on what the round before delivered, starting with chunk ``rank``.

    Every piece lands in its own place, so all receives are posted at the beginning.
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
    """A program with its ranks in another ``order``: the rank at place ``p`` acts as rank ``p`` would.

    Chunk ownership does not depend on the order.
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
        "a run of pieces need not be contiguous in another order"
    )
    return replace(program, rank=rank, steps=steps, rotation=0)


def _ring_steps(
    rank: int, world_size: int, pieces: int, chunks: list[int], *, reduce: bool, first: int = 0
) -> tuple[Step, ...]:
    """Rounds of a ring that sends ``chunks[t]`` to the right in round ``t`` and receives ``chunks[t + 1]``.

    ``first`` is the number of the first step. A round sends what arrived in the round before.
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
    """The scratch elements that ``program`` needs for a tensor of ``numel`` elements."""
    return program.scratch_slots * program.slot_numel(numel)


def scratch_numel(numel: int, chunks: int, pieces: int = 1) -> int:
    """The scratch elements that a ring of ``chunks`` ranks needs for a tensor of ``numel`` elements.

    Holds the pieces whose receives are posted at a time: at most two chunks, apart from rounding.
    """
    return scratch_numel_of(ring_reduce_scatter(0, chunks, pieces), numel)


Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ProgramColumns:
    """The programs of all ranks as columns of shape (steps, ranks).

    A folded collective only has the first ranks; the ranks that they send to are not folded.
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
        """The distinct (sender, receiver) pairs, of shape (pairs, 2), and the pair index of each step and rank."""
        pair = np.arange(self.send_to.shape[1], dtype=np.int64) * self.world_size + self.send_to
        distinct, which = np.unique(pair, return_inverse=True)
        return (
            np.stack(np.divmod(distinct, self.world_size), axis=1).astype(np.int32),
            which.reshape(pair.shape).astype(np.int32),
        )

    @property
    def last_sends(self) -> tuple[Ints, Ints]:
        """The step and the sender of the last message of each pair."""
        _, pair_of = self.pairs
        _, latest = np.unique(pair_of[::-1], return_index=True)
        turn, rank = np.divmod(latest, pair_of.shape[1])
        return len(pair_of) - 1 - turn, rank

    @property
    def message_share(self) -> float:
        """The mean size of a message, as a share of the tensor."""
        return float(self.run.mean() if self.run.size else 1.0) / (self.chunks * self.pieces)


@lru_cache(maxsize=16)
def columns_of(program_of: ProgramOf, world_size: int, folded: int = 0) -> ProgramColumns:
    """The programs of all ranks, or of the first ``folded``, expanded from one period if they repeat."""
    first, count = program_of(0, world_size), folded or world_size
    rotation = first.rotation
    if folded and first.mirrors:
        assert world_size % folded == 0
        return _stacked([program_of(rank, world_size) for rank in range(folded)])
    assert not folded or (rotation and folded % rotation == 0), "folded ranks hold whole rotations"
    stacked = _stacked([program_of(rank, world_size) for rank in range(rotation or world_size)])
    if rotation in {0, count}:
        return stacked
    shift = np.repeat(np.arange(0, count, rotation, dtype=np.int64), rotation)
    turns = count // rotation
    chunk, within = np.divmod(np.tile(stacked.send_piece, (1, turns)).astype(np.int64), stacked.pieces)
    return replace(
        stacked,
        send_to=((np.tile(stacked.send_to, (1, turns)) + shift) % world_size).astype(np.int32),
        send_piece=((chunk + shift) % stacked.chunks * stacked.pieces + within).astype(np.int32),
        send_after=np.tile(stacked.send_after, (1, turns)),
        run=np.tile(stacked.run, (1, turns)),
    )


def _stacked(programs: list[ChunkProgram]) -> ProgramColumns:
    def column(name: str) -> Numbers:
        by_program = [[getattr(step, name) for step in program.steps] for program in programs]
        return np.array(by_program, dtype=np.int32).reshape(len(programs), -1).T

    first = programs[0]
    return ProgramColumns(
        first.world_size, first.chunks, first.pieces, first.lookahead,
        column("send_to"), column("send_piece"), column("send_after"), column("run"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The dependencies within one collective, by the rules of this module.

    Its operations in order: the initial cost of each rank, then for each rank and step a transfer and the rank's "done".
    Successors below NONE are outside: OUTSIDE - r is the end of rank r.
    """

    ranks: int
    edges: Edges
    waits: Numbers
    outside: npt.NDArray[np.intp]  # indices of slots with outside successors

    @property
    def operations(self) -> int:
        """The number of operations."""
        return len(self.waits)

    def places(self, base: int) -> tuple[slice, slice, slice]:
        """The rows in a graph from ``base`` on: initial costs, transfers, and "done" operations.

        Transfers and "done" operations are grouped by rank.
        """
        first, end = base + self.ranks, base + self.operations
        return slice(base, first), slice(first, end, 2), slice(first + 1, end, 2)


OUTSIDE = NONE - 1


@lru_cache(maxsize=16)
def structure_of(program_of: ProgramOf, world_size: int, folded: int = 0) -> Structure:
    """The structure of a collective of all ranks, or of the first ``folded``, which represent the rest.

    Rank ``r`` represents rank ``r + folded``: messages reach both at the same time.

    A message leaves when its sender has done the step that delivered it, and its receiver has posted the receive. A rank
    ends when it has received its last message, and its last message to each other rank has arrived.
    """
    columns = columns_of(program_of, world_size, folded)
    count = folded or world_size
    steps, ranks = len(columns.send_to), np.arange(count)
    number = np.arange(steps)[:, None]
    transfer = count + 2 * (ranks * steps + number)  # consecutive operations of a rank are adjacent
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
    """The message sizes of every step and rank in a collective of ``size_bytes``."""
    sizes = piece_sizes(round(size_bytes * byte_factor), columns.chunks, columns.pieces)
    before = np.concatenate([[0], np.cumsum(sizes)])
    bytes_: Ints = before[columns.send_piece + columns.run] - before[columns.send_piece]
    return bytes_


def piece_sizes(numel: int, chunks: int, pieces: int) -> Ints:
    """The elements of every piece, as split by ``piece_bounds``."""
    chunk = numel // chunks + (np.arange(chunks) < numel % chunks)
    sizes: Ints = chunk[:, None] // pieces + (np.arange(pieces) < chunk[:, None] % pieces)
    return sizes.ravel()
