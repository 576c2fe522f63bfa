"""Chunk programs, held against plain sums over all ranks in one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.collectives.program import (
    ChunkProgram,
    chunk_bounds,
    owned_chunk,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)


def interpret(programs: list[ChunkProgram], tensors: list[np.ndarray]) -> list[np.ndarray]:
    """Run all ranks' programs in lockstep."""
    results = [tensor.copy() for tensor in tensors]
    bounds = chunk_bounds(len(tensors[0]), programs[0].chunks)
    for number in range(len(programs[0].rounds)):
        rounds = [program.rounds[number] for program in programs]
        sent = [
            results[p.rank][slice(*bounds[r.send_chunk])].copy()
            for p, r in zip(programs, rounds, strict=True)
        ]
        for program, step in zip(programs, rounds, strict=True):
            assert rounds[step.receive_from].send_to == program.rank
            assert rounds[step.receive_from].send_chunk == step.receive_chunk
            own = results[program.rank][slice(*bounds[step.receive_chunk])]
            own[:] = own + sent[step.receive_from] if step.reduce else sent[step.receive_from]
    return results


@given(numel=st.integers(0, 100_000), chunks=st.integers(1, 64))
def test_chunks_cover_the_tensor_in_near_equal_runs(numel: int, chunks: int) -> None:
    bounds = chunk_bounds(numel, chunks)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("numel", [0, 1, 7, 64, 1001])
def test_rings_sum_like_one_process(world_size: int, numel: int) -> None:
    generator = np.random.default_rng(world_size * 1000 + numel)
    tensors = [generator.integers(-1000, 1000, numel) for _ in range(world_size)]
    total = np.sum(tensors, axis=0)
    bounds = chunk_bounds(numel, world_size)

    scattered = interpret([ring_reduce_scatter(r, world_size) for r in range(world_size)], tensors)
    for rank, result in enumerate(scattered):
        own = slice(*bounds[owned_chunk(rank, world_size)])
        assert (result[own] == total[own]).all()
    gathered = interpret([ring_all_gather(r, world_size) for r in range(world_size)], scattered)
    assert all((result == total).all() for result in gathered)
    reduced = interpret([ring_all_reduce(r, world_size) for r in range(world_size)], tensors)
    assert all((result == total).all() for result in reduced)
