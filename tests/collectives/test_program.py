"""Chunk programs, held against plain sums over all ranks in one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.interpreter import interpret

from headway.collectives.algorithms import ALL_GATHER, REDUCE_SCATTER, RING, program_of
from headway.collectives.program import (
    chunk_bounds,
    largest_piece,
    owned_chunk,
    piece_bounds,
    pieces_for,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)

WORLD_SIZES = st.integers(1, 16)
PIECES = st.integers(1, 4)
SEEDS = st.integers(0, 2**32)


@given(numel=st.integers(0, 100_000), chunks=st.integers(1, 64))
def test_chunks_cover_the_tensor_in_near_equal_runs(numel: int, chunks: int) -> None:
    bounds = chunk_bounds(numel, chunks)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1


@given(numel=st.integers(0, 5000), chunks=st.integers(1, 16), pieces=PIECES)
def test_pieces_cut_chunks_where_the_chunks_are(numel: int, chunks: int, pieces: int) -> None:
    bounds = piece_bounds(numel, chunks, pieces)
    for index, chunk in enumerate(chunk_bounds(numel, chunks)):
        of_chunk = bounds[index * pieces : (index + 1) * pieces]
        assert (of_chunk[0][0], of_chunk[-1][1]) == chunk
        assert all(a[1] == b[0] for a, b in itertools.pairwise(of_chunk))
    assert max(end - start for start, end in bounds) == largest_piece(numel, chunks, pieces)


@settings(deadline=None)
@given(world_size=WORLD_SIZES, pieces=PIECES, numel=st.integers(0, 200), seed=SEEDS)
def test_rings_sum_like_one_process_however_they_interleave(
    world_size: int, pieces: int, numel: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    tensors = [generator.integers(-1000, 1000, numel) for _ in range(world_size)]
    total = np.sum(tensors, axis=0)
    ranks = range(world_size)

    scattered = interpret([ring_reduce_scatter(r, world_size, pieces) for r in ranks], tensors, seed)
    for rank, result in enumerate(scattered):
        own = slice(*chunk_bounds(numel, world_size)[owned_chunk(rank, world_size)])
        assert (result[own] == total[own]).all()
    gathered = interpret([ring_all_gather(r, world_size, pieces) for r in ranks], scattered, seed)
    assert all((result == total).all() for result in gathered)
    reduced = interpret([ring_all_reduce(r, world_size, pieces) for r in ranks], tensors, seed)
    assert all((result == total).all() for result in reduced)


@settings(deadline=None)
@given(data=st.data(), world_size=WORLD_SIZES, pieces=PIECES, numel=st.integers(0, 200), seed=SEEDS)
def test_rings_in_any_order_leave_every_rank_its_own_chunk(
    data: st.DataObject, world_size: int, pieces: int, numel: int, seed: int
) -> None:
    order = tuple(data.draw(st.permutations(range(world_size))))
    tensors = [np.random.default_rng(seed + rank).integers(-1000, 1000, numel) for rank in range(world_size)]
    total = np.sum(tensors, axis=0)
    halves = [program_of(RING, kind, pieces, order=order) for kind in (REDUCE_SCATTER, ALL_GATHER)]
    scattered = interpret([halves[0](rank, world_size) for rank in range(world_size)], tensors, seed)
    for rank, result in enumerate(scattered):
        own = slice(*chunk_bounds(numel, world_size)[owned_chunk(rank, world_size)])
        assert (result[own] == total[own]).all()
    gathered = interpret([halves[1](rank, world_size) for rank in range(world_size)], scattered, seed)
    assert all((result == total).all() for result in gathered)
    neighbours = {order[place]: order[(place + 1) % world_size] for place in range(world_size)}
    sent = [{step.send_to for step in halves[0](rank, world_size).steps} for rank in range(world_size)]
    assert all(to == {neighbours[rank]} for rank, to in enumerate(sent) if world_size > 1)


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("pieces", range(1, 5))
def test_a_send_waits_for_the_receive_of_its_very_piece_alone(world_size: int, pieces: int) -> None:
    for make in (ring_reduce_scatter, ring_all_gather, ring_all_reduce):
        for rank in range(world_size):
            program = make(rank, world_size, pieces)
            delivered: dict[int, int] = {}
            for number, step in enumerate(program.steps):
                assert step.send_after == delivered.get(step.send_piece, -1)
                delivered[step.receive_piece] = number
            assert [s.send_after for s in program.steps] == sorted(s.send_after for s in program.steps)


def test_a_rank_owns_the_chunk_of_its_number() -> None:
    assert [owned_chunk(rank, 5) for rank in range(5)] == [0, 1, 2, 3, 4]


def test_every_ring_moves_each_chunk_once_over_each_link_but_one() -> None:
    for make, rounds in ((ring_reduce_scatter, 4), (ring_all_gather, 4), (ring_all_reduce, 8)):
        steps = make(2, 5, 3).steps
        assert len(steps) == rounds * 3
        assert {(step.send_to, step.receive_from) for step in steps} == {(3, 1)}


def test_more_bytes_never_make_fewer_pieces() -> None:
    counts = [pieces_for(2**power) for power in range(31)]
    assert counts == sorted(counts)
    assert counts[0] == 1
