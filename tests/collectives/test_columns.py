"""Programs of all ranks as columns, and the graphs made of them, held against programs taken one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives import plain_expansion
from tests.exhaustive import examples

from headway.cluster import AlgorithmCost, Cluster, Host
from headway.collectives import dataflow
from headway.collectives.algorithms import (
    ALL_GATHER,
    DIRECT,
    HALVING_DOUBLING,
    HIERARCHICAL,
    KINDS,
    NATIVE,
    REDUCE_SCATTER,
    RING,
    TREE,
    program_of,
)
from headway.collectives.hierarchical import Hosts
from headway.collectives.program import (
    ProgramOf,
    _stacked,
    columns_of,
    piece_bounds,
    piece_sizes,
    structure_of,
)
from headway.simulation.engine import play

KIND = st.sampled_from(KINDS)
PROGRAMS = st.one_of(
    st.builds(program_of, st.just(RING), KIND, st.integers(1, 3)), st.builds(program_of, st.just(NATIVE), KIND),
    st.builds(program_of, st.just(DIRECT), st.sampled_from([REDUCE_SCATTER, ALL_GATHER]), st.integers(1, 3)),
    st.builds(program_of, st.just(TREE), st.sampled_from([REDUCE_SCATTER, ALL_GATHER])),
)  # fmt: skip
HOSTS = st.one_of(
    st.builds(lambda count, workers: Hosts.of_places([n // workers for n in range(count * workers)]),
              st.integers(1, 4), st.integers(1, 4)),
    st.integers(1, 3).flatmap(lambda workers: st.permutations("abc" * workers).map(Hosts.of_places)),
)  # fmt: skip


@given(PROGRAMS, st.integers(1, 12))
def test_programs_that_rotate_are_those_of_every_rank(program: ProgramOf, world_size: int) -> None:
    check_columns(program, world_size)


def check_columns(program: ProgramOf, world_size: int) -> None:
    made = columns_of(program, world_size)
    each = _stacked([program(rank, world_size) for rank in range(world_size)])
    assert (made.chunks, made.pieces, made.lookahead) == (each.chunks, each.pieces, each.lookahead)
    for name in ("send_to", "send_piece", "send_after", "run"):
        assert getattr(made, name).tolist() == getattr(each, name).tolist()


@given(
    st.sampled_from([REDUCE_SCATTER, ALL_GATHER]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_programs_that_mirror_send_alike_modulo_what_is_folded(
    kind: str, world_size: int, folded: int
) -> None:
    program = program_of(HALVING_DOUBLING, kind)
    check_columns(program, world_size)
    if world_size % folded:
        return
    whole, first = columns_of(program, world_size), columns_of(program, world_size, folded)
    for rank in range(world_size):
        like = rank % folded
        assert (whole.send_to[:, rank] % folded == first.send_to[:, like] % folded).all()
        assert whole.run[:, rank].tolist() == first.run[:, like].tolist()
        assert whole.send_after[:, rank].tolist() == first.send_after[:, like].tolist()


@given(HOSTS, KIND, st.integers(1, 3))
def test_programs_that_repeat_after_a_host_are_those_of_every_rank(
    hosts: Hosts, kind: str, pieces: int
) -> None:
    world_size = sum(map(len, hosts.ranks))
    check_columns(program_of(HIERARCHICAL, kind, pieces, hosts), world_size)


@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 4))
def test_pieces_are_as_large_as_they_are_cut(numel: int, chunks: int, pieces: int) -> None:
    bounds = piece_bounds(numel, chunks, pieces)
    assert piece_sizes(numel, chunks, pieces).tolist() == [end - start for start, end in bounds]


def test_structures_are_made_once() -> None:
    assert structure_of(program_of(RING, KINDS[0], 2), 5) is structure_of(program_of(RING, KINDS[0], 2), 5)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    rates = st.sampled_from([0.1, 1.0, 2.5, 40.0])
    hosts = [
        Host(name=f"h{index}", workers=draw(st.integers(1, 3)), up_gbps=draw(rates), down_gbps=draw(rates))
        for index in range(draw(st.integers(1, 4)))
    ]
    return Cluster(
        hosts=tuple(hosts), latency_us=draw(st.sampled_from([0.0, 50.0])), local_gbps=draw(rates),
        local_latency_us=draw(st.sampled_from([0.0, 7.0])),
    )  # fmt: skip


@settings(deadline=None, max_examples=examples(60))
@given(
    cluster=clusters(),
    collectives=st.lists(
        st.tuples(
            PROGRAMS,
            st.integers(0, 200_000),
            st.integers(0, 1),
            st.builds(
                AlgorithmCost,
                overhead_us=st.sampled_from([0.0, 30.0]),
                message_us=st.sampled_from([0.0, 40.0]),
                message_cpu_us=st.sampled_from([0.0, 25.0, 60.0]),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    late_ns=st.lists(st.integers(0, 200_000), min_size=12, max_size=12),
)
def test_collectives_end_as_those_laid_out_message_by_message(
    cluster: Cluster, collectives: list[tuple[ProgramOf, int, int, AlgorithmCost]], late_ns: list[int]
) -> None:
    found = []
    for module in (dataflow, plain_expansion):
        resources = module.ClusterResources(cluster)
        builder = resources.builder()
        ranks = range(cluster.world_size)
        begun = [builder.operation(late_ns[rank]) for rank in ranks]
        all_ends = []
        for program, size_bytes, connection, cost in collectives:
            begins = [builder.operation(after=[begun[rank]]) for rank in ranks]
            ends = [builder.operation() for _ in ranks]
            module.expand(builder, resources, program, size_bytes, begins, ends, cost, connection)
            all_ends += ends
        found.append(play(builder.close()).end_ns[all_ends].tolist())
    # What happens at the same time has another order, and sharing is rounded to nanoseconds.
    assert found[0] == pytest.approx(found[1], rel=1e-6, abs=50)
