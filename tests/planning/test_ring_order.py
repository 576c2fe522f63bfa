"""The order of ranks in a ring where the ways between some hosts are slow."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.planning.jobs import PlannedJob, layered_job, replayed_ns

from headway.cluster import Cluster, Host, SlowPath
from headway.network import algorithm_choices
from headway.network.algorithm_choices import ring_order_on
from headway.strategies.decoupled.planner.search import plan

SLOW = 0.1


def on(hosts: int, slow: Collection[tuple[int, int]], workers: int = 1) -> Cluster:
    """Hosts with links of 1 Gbit/s, and a tenth of that in both directions between some of them."""
    return Cluster(
        hosts=tuple(
            Host(name=f"h{number}", workers=workers, up_gbps=1, down_gbps=1) for number in range(hosts)
        ),
        paths=tuple(
            SlowPath(source=f"h{a}", target=f"h{b}", gbps=SLOW)
            for pair in slow
            for a, b in (pair, pair[::-1])
        ),
    )


def ways_of(order: tuple[int, ...]) -> set[frozenset[int]]:
    return {frozenset(pair) for pair in pairwise((*order, order[0]))}


def test_a_slow_way_is_no_neighbour_s() -> None:
    assert ring_order_on(on(4, [])) == ()
    assert ring_order_on(on(4, [(0, 2)])) == (), "they are no neighbours as it is"
    order = ring_order_on(on(4, [(0, 1)]))
    assert sorted(order) == [0, 1, 2, 3]
    assert frozenset((0, 1)) not in ways_of(order)
    assert ring_order_on(on(3, [(0, 1)])) == (), "every order of three has it"


def test_ranks_of_a_host_stay_together() -> None:
    order = ring_order_on(on(4, [(0, 1)], workers=2))
    assert sorted(order) == list(range(8))
    assert [rank // 2 for rank in order[::2]] == [rank // 2 for rank in order[1::2]]


@pytest.mark.parametrize("most_tried", [0, 8])
@settings(deadline=None, max_examples=examples(40))
@given(hosts=st.integers(4, 7), seed=st.data())
def test_one_way_can_always_be_avoided(most_tried: int, hosts: int, seed: st.DataObject) -> None:
    one = seed.draw(st.integers(0, hosts - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithm_choices, "MOST_TRIED_HOSTS", most_tried)
        order = ring_order_on(on(hosts, [(one, (one + 1) % hosts)]))
    assert sorted(order) == list(range(hosts))
    assert frozenset((one, (one + 1) % hosts)) not in ways_of(order)


def test_the_planner_avoids_it_and_replay_agrees() -> None:
    job = layered_job([200_000] * 6, communication=0.8, world_size=4)
    names = [host.name for host in job.cluster.hosts]
    gbps = job.cluster.hosts[0].up_gbps
    slow = tuple(
        SlowPath(source=a, target=b, gbps=gbps / 5) for a, b in ((names[0], names[1]), (names[1], names[0]))
    )
    job = PlannedJob(job.model, job.profile, job.cluster.model_copy(update={"paths": slow}))
    best = plan(job.job).schedules[0]
    assert best.schedule.algorithms.ring_order
    as_ranks_are = next(s for s in plan(job.job).schedules if not s.schedule.algorithms.ring_order)
    assert replayed_ns(job, best.schedule) < 0.7 * replayed_ns(job, as_ranks_are.schedule)
