"""Push and pull, held against plain sums over all ranks in one process."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.interpreter import interpret

from headway.cluster import Cluster, Host
from headway.collectives.dataflow import alone
from headway.collectives.program import columns_of, message_bytes
from headway.collectives.servers import Serving, push_and_pull
from headway.errors import PlanError
from headway.simulation.engine import play


@settings(deadline=None)
@given(
    world_size=st.integers(1, 9),
    numel=st.integers(0, 200),
    seed=st.integers(0, 2**32),
    unequal=st.booleans(),
    pieces=st.integers(1, 5),
)
def test_everybody_pulls_the_sum_of_what_all_pushed(
    world_size: int, numel: int, seed: int, unequal: bool, pieces: int
) -> None:
    generator = np.random.default_rng(seed)
    tensors = [generator.integers(-1000, 1000, numel) for _ in range(world_size)]
    shares = tuple(generator.integers(1, 20, world_size).tolist()) if unequal else ()
    programs = [push_and_pull(rank, world_size, pieces, shares) for rank in range(world_size)]
    for result in interpret(programs, tensors, seed):
        assert (result == np.sum(tensors, axis=0)).all()


def test_a_push_and_a_pull_each_take_a_latency_and_the_volume_of_one_way() -> None:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(5))
    cluster = Cluster(hosts=hosts, latency_us=250)
    took_ns = int(play(alone(cluster, push_and_pull, 5_000_000)).end_ns.max())
    one_way_ns = 4_000_000 * 8
    assert abs(took_ns - 2 * (one_way_ns + 250_000)) < 10_000


def test_a_rank_that_serves_little_sends_and_receives_little_more_than_the_tensor() -> None:
    shares = (33, 33, 33, 1)
    columns = columns_of(partial(push_and_pull, shares=shares), 4)
    sent_bytes = message_bytes(columns, 100_000, 1.0)
    received_bytes = [int(sent_bytes[columns.send_to == rank].sum()) for rank in range(4)]
    assert sent_bytes.sum(axis=0).tolist() == received_bytes == [166_000, 166_000, 166_000, 102_000]


def test_a_slow_link_carries_the_tensor_once_where_its_rank_serves_next_to_nothing() -> None:
    hosts = tuple(
        Host(name=f"h{i}", workers=1, up_gbps=gbps, down_gbps=gbps) for i, gbps in enumerate((4, 4, 4, 1))
    )
    cluster = Cluster(hosts=hosts, latency_us=0)
    even, unequal, in_pieces = (
        play(alone(cluster, partial(push_and_pull, pieces=pieces, shares=shares), 1_000_000)).end_ns.max()
        / 1e6
        for pieces, shares in ((1, ()), (1, (333, 333, 333, 1)), (16, (333, 333, 333, 1)))
    )
    assert even == pytest.approx(12.0, rel=0.01), "three quarters each way, one after the other"
    assert unequal == pytest.approx(16.0, rel=0.01), "all of it each way"
    assert in_pieces == pytest.approx(8.0 * (1 + 1 / 16), rel=0.02), "but for one piece both at the same time"


@pytest.mark.parametrize("count", [1, 3])
def test_shares_of_another_number_of_ranks_are_refused(count: int) -> None:
    Serving().check(2)
    Serving((1, 2)).check(2)
    with pytest.raises(PlanError, match="shares"):
        Serving((1,) * count).check(2)
