"""Gloo's collectives as chunk programs, held against plain sums and concatenations."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.interpreter import interpret

from headway.collectives.flat import gloo_all_gather, gloo_all_reduce
from headway.collectives.program import chunk_bounds

SIZES = st.integers(1, 9)


@settings(deadline=None)
@given(world_size=SIZES, pieces=st.integers(2, 4), numel=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_an_all_reduce_sums_on_every_rank(world_size: int, pieces: int, numel: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    tensors = [generator.integers(-1000, 1000, numel) for _ in range(world_size)]
    programs = [gloo_all_reduce(rank, world_size, pieces) for rank in range(world_size)]
    for result in interpret(programs, tensors, seed):
        assert (result == np.sum(tensors, axis=0)).all()


@settings(deadline=None)
@given(world_size=SIZES, numel=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_an_all_gather_brings_every_chunk_to_every_rank(world_size: int, numel: int, seed: int) -> None:
    whole = np.arange(numel) + 1
    tensors = []
    for start, end in chunk_bounds(numel, world_size):
        own = np.zeros(numel, dtype=np.int64)
        own[start:end] = whole[start:end]
        tensors.append(own)
    programs = [gloo_all_gather(rank, world_size) for rank in range(world_size)]
    for result in interpret(programs, tensors, seed):
        assert (result == whole).all()


def test_two_segments_are_in_flight_and_the_gather_waits_for_the_reduction() -> None:
    program = gloo_all_reduce(1, 4, 3)
    assert program.lookahead == 2
    assert [step.send_after for step in program.steps[:4]] == [-1, -1, 0, 1]
    halfway = len(program.steps) // 2
    assert program.steps[halfway].send_after == halfway - 1
    assert all(not step.reduce for step in program.steps[halfway:])
