"""Push and pull, held against plain sums over all ranks in one process."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.interpreter import interpret

from headway.cluster import Cluster, Host
from headway.collectives.dataflow import alone
from headway.collectives.servers import push_and_pull
from headway.simulation.engine import play


@settings(deadline=None)
@given(world_size=st.integers(1, 9), numel=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_everybody_pulls_the_sum_of_what_all_pushed(world_size: int, numel: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    tensors = [generator.integers(-1000, 1000, numel) for _ in range(world_size)]
    programs = [push_and_pull(rank, world_size) for rank in range(world_size)]
    for result in interpret(programs, tensors, seed):
        assert (result == np.sum(tensors, axis=0)).all()


def test_a_push_and_a_pull_each_take_a_latency_and_the_volume_of_one_way() -> None:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=1, down_gbps=1) for i in range(5))
    cluster = Cluster(hosts=hosts, latency_us=250)
    took_ns = int(play(alone(cluster, push_and_pull, 5_000_000)).end_ns.max())
    one_way_ns = 4_000_000 * 8
    assert abs(took_ns - 2 * (one_way_ns + 250_000)) < 10_000
