"""Chunk programs in plain Python: all ranks in one process, in any order that the rules of a program allow."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

import numpy as np

from headway.collectives.program import ChunkProgram, ProgramOf, chunk_bounds, owned_chunk, piece_bounds


class Rank:
    """One rank: its tensor, its scratch, and how far it has come."""

    def __init__(self, program: ChunkProgram, tensor: np.ndarray[Any, Any]) -> None:
        self.program = program
        self.tensor = tensor.copy()
        self.bounds = piece_bounds(len(tensor), program.chunks, program.pieces)
        self.scratch: dict[int, np.ndarray[Any, Any]] = {}
        self.done = self.sent = 0
        self.arrived: set[int] = set()  # steps whose message is there

    def piece(self, number: int, run: int = 1) -> np.ndarray[Any, Any]:
        """A view of a piece, or of a run of them."""
        return self.tensor[self.bounds[number][0] : self.bounds[number + run - 1][1]]

    @property
    def posted(self) -> int:
        """How many receives are posted."""
        return min(len(self.program.steps), self.done + self.program.lookahead)

    @property
    def released(self) -> bool:
        """Whether the next send may leave."""
        steps = self.program.steps
        return self.sent < len(steps) and steps[self.sent].send_after < self.done

    def awaited(self, sender: int) -> int | None:
        """The step whose posted receive takes the next message of ``sender``, if there is one yet."""
        receives = (number for number, step in enumerate(self.program.steps) if step.receive_from == sender)
        number = next((n for n in receives if n not in self.arrived), None)
        return None if number is None or number >= self.posted else number

    @property
    def can_finish_step(self) -> bool:
        """Whether what the next step waits for is there."""
        return self.done in self.arrived

    def land(self, number: int, piece: int, run: int, data: np.ndarray[Any, Any]) -> None:
        """A message lands where the receive of step ``number`` says."""
        step = self.program.steps[number]
        assert (step.receive_piece, step.received) == (piece, run)
        if step.reduce:
            slot = number % self.program.lookahead
            assert slot not in self.scratch, "a scratch slot is overwritten"
            assert slot < self.program.scratch_slots
            assert len(data) <= self.program.slot_numel(len(self.tensor))
            self.scratch[slot] = data.copy()
        else:
            self.piece(piece, run)[:] = data
        self.arrived.add(number)

    def finish_step(self) -> None:
        """Add what the next step has waited for."""
        step = self.program.steps[self.done]
        if step.reduce:
            self.piece(step.receive_piece, step.received)[:] += self.scratch.pop(
                self.done % self.program.lookahead
            )
        self.done += 1


def interpret(
    programs: list[ChunkProgram], tensors: list[np.ndarray[Any, Any]], seed: int
) -> list[np.ndarray[Any, Any]]:
    """Play all ranks' programs to the end, choosing at random what happens next; return their tensors.

    A payload is read at the latest moment, when it lands, so that a send whose piece is written meanwhile shows.
    """
    choose = random.Random(seed)
    ranks = [Rank(program, tensor) for program, tensor in zip(programs, tensors, strict=True)]
    wires: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)  # released sends, in order
    while any(_may_go_on(number, ranks, wires) for number in range(len(ranks))):
        for number in choose.sample(range(len(ranks)), len(ranks)):
            rank = ranks[number]
            for _ in range(choose.randint(0, 4)):
                if choose.random() < 0.5 and rank.can_finish_step:
                    rank.finish_step()
                if choose.random() < 0.5 and rank.released:
                    step = rank.program.steps[rank.sent]
                    wires[number, step.send_to].append((step.send_piece, step.run))
                    rank.sent += 1
                for (source, target), wire in wires.items():
                    if target != number or not wire or choose.random() < 0.5:
                        continue
                    if (awaited := rank.awaited(source)) is not None:
                        message = wire.popleft()
                        rank.land(awaited, *message, ranks[source].piece(*message))
    for rank in ranks:
        assert rank.done == rank.sent == len(rank.program.steps), "the programs wait for each other"
    return [rank.tensor for rank in ranks]


def check_halves(scatter: ProgramOf, gather: ProgramOf, world_size: int, numel: int, seed: int) -> None:
    """A reduce-scatter leaves each owner the sum of its chunk, and the all-gather behind it all ranks all sums."""
    generator = np.random.default_rng(seed)
    tensors = [generator.integers(-1000, 1000, numel) for _ in range(world_size)]
    total = np.sum(tensors, axis=0)
    scattered = interpret([scatter(rank, world_size) for rank in range(world_size)], tensors, seed)
    for rank, result in enumerate(scattered):
        own = slice(*chunk_bounds(numel, world_size)[owned_chunk(rank, world_size)])
        assert (result[own] == total[own]).all()
    gathered = interpret([gather(rank, world_size) for rank in range(world_size)], scattered, seed)
    assert all((result == total).all() for result in gathered)


def _may_go_on(number: int, ranks: list[Rank], wires: dict[tuple[int, int], deque[tuple[int, int]]]) -> bool:
    rank = ranks[number]
    return (
        rank.can_finish_step
        or rank.released
        or any(
            wire and ranks[target].awaited(source) is not None
            for (source, target), wire in wires.items()
            if target == number
        )
    )
