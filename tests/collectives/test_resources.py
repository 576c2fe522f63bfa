"""What links and cores do to the messages of a collective."""

from __future__ import annotations

from typing import Any

import pytest

from headway.cluster import AlgorithmCost, Cluster, Host, SlowPath, Traffic
from headway.collectives import resources as resources_module
from headway.collectives.dataflow import alone, expand, repeated
from headway.collectives.program import ring_all_gather, ring_reduce_scatter
from headway.collectives.resources import ClusterResources
from headway.collectives.servers import push_and_pull
from headway.simulation.engine import play

MS = 1_000_000


def cluster(world_size: int = 2, gbps: float = 1.0, **options: Any) -> Cluster:
    hosts = tuple(Host(name=f"h{i}", workers=1, up_gbps=gbps, down_gbps=gbps) for i in range(world_size))
    return Cluster(hosts=hosts, latency_us=0, **options)


def gather_ns(on: Cluster, size_bytes: int, cost: AlgorithmCost = AlgorithmCost()) -> int:  # noqa: B008
    return int(play(alone(on, ring_all_gather, size_bytes, cost)).end_ns.max())


def test_traffic_leaves_what_it_does_not_take() -> None:
    others = Traffic(source="h0", target="h1", gbps=0.75)
    assert gather_ns(cluster(traffic=(others,)), 2_000_000) == pytest.approx(4 * 8 * MS, rel=1e-3)


def test_a_slow_path_is_slow_in_its_direction_alone() -> None:
    """Of 4 ranks the first sends its third of all at a quarter of the rate, and the others wait for it."""
    slow = SlowPath(source="h0", target="h1", gbps=0.25)
    for size_bytes, times in ((2_000_000, 4), (2_000_000, 1)):
        on = cluster(paths=(slow,) if times == 4 else ())
        assert gather_ns(on, size_bytes) == pytest.approx(times * 8 * MS, rel=1e-3)
        resources = ClusterResources(on)
        assert resources.message(0, 1, size_bytes)[0] == times * 16 * MS
        assert resources.message(1, 0, size_bytes)[0] == 16 * MS


def test_a_slow_path_leaves_its_hosts_links_to_others() -> None:
    """Two messages from one host: the one on a slow path takes a quarter of its link, and the other the rest."""
    on = cluster(3, paths=(SlowPath(source="h0", target="h1", gbps=0.25),))
    builder = (resources := ClusterResources(on)).builder()
    for receiver in (1, 2):
        builder.routed(*resources.message(0, receiver, 1_500_000), [])
    ends_ns = play(builder.close()).end_ns
    assert ends_ns.tolist() == pytest.approx([48 * MS, 16 * MS], rel=1e-3)


def test_a_longer_path_delays_messages_and_collectives() -> None:
    on = cluster(paths=(SlowPath(source="h0", target="h1", latency_us=5000),))
    plain = on.model_copy(update={"paths": ()})
    ends_ns = []
    for each in (plain, on):
        builder = (resources := ClusterResources(each)).builder()
        builder.routed(*resources.message(0, 1, 1_500_000), [])
        ends_ns.append(play(builder.close()).end_ns[0])
    assert ends_ns[1] - ends_ns[0] == 5 * MS
    assert gather_ns(on, 1_000) - gather_ns(plain, 1_000) == 5 * MS


def test_traffic_that_asks_for_all_leaves_its_share() -> None:
    others = Traffic(source="h0", target="h1", gbps=9, connections=3)
    assert gather_ns(cluster(traffic=(others,)), 2_000_000) == pytest.approx(4 * 8 * MS, rel=1e-3)


def test_traffic_comes_and_goes() -> None:
    """8 ms of bytes: 2 ms at full rate, 8 ms at a quarter of it, which carries 2 ms, then the 4 ms that are left."""
    others = Traffic(source="h0", target="h1", gbps=0.75, start_ms=2, end_ms=10)
    assert gather_ns(cluster(traffic=(others,)), 2_000_000) == pytest.approx(14 * MS, rel=1e-3)


def test_a_rested_link_lets_a_burst_through_and_has_to_rest_again() -> None:
    on = cluster(burst_bytes=100_000)
    assert gather_ns(on, 2_000_000) == pytest.approx(8 * MS - 800_000, rel=1e-3)
    assert gather_ns(on, 150_000) == 0
    many = int(play(repeated(on, ring_all_gather, 2_000_000, AlgorithmCost(), 5)).end_ns.max())
    assert many == pytest.approx(5 * 8 * MS - 800_000, rel=1e-3)


def test_a_link_that_others_use_saves_what_they_leave() -> None:
    """Rounds of 16 ms of bytes at full rate, on a link half of which is left, and 10 ms of rest between them."""
    others = Traffic(source="h0", target="h1", gbps=0.5, connections=1)
    cost = AlgorithmCost(message_us=10_000)
    on = cluster(burst_bytes=1_250_000, traffic=(others,))  # 10 ms at full rate; a rest saves half of it
    played = play(repeated(on, ring_all_gather, 4_000_000, cost, 3)).end_ns.max()
    first_ns = (16 - 10) * 2 * MS + 10 * MS
    later_ns = (16 - 5) * 2 * MS + 10 * MS
    assert played == pytest.approx(first_ns + 2 * later_ns, rel=1e-3)


def test_every_message_takes_its_receiver_a_while() -> None:
    """Of three rounds each has the bytes, then the message's time; the next round waits for both."""
    cost = AlgorithmCost(message_us=500, message_cpu_us=200)
    assert gather_ns(cluster(4), 4_000_000, cost) == 3 * (8 * MS + MS // 2)


def test_work_of_the_cores_queues_and_the_rest_of_a_message_does_not() -> None:
    """Pushes arrive together, as do pulls: three times 400 us of work each, and once what a message takes besides."""
    latency_us, work_us = 100.0, 400.0
    cost = AlgorithmCost(message_us=latency_us + work_us, message_cpu_us=work_us)
    took_ns = int(play(alone(cluster(4), push_and_pull, 4, cost)).end_ns.max())
    assert took_ns == pytest.approx(2 * 3 * 500_000, rel=0.35), "steps are done in turn"
    assert took_ns > 2 * 3 * 400_000


def test_ranks_that_share_cores_keep_each_other_from_them() -> None:
    cost = AlgorithmCost(message_us=500, message_cpu_us=200)
    apart, together = cluster(4), cluster(4, shared_cores=1)
    assert together.crowding == 4
    assert gather_ns(together, 4_000_000, cost) == gather_ns(apart, 4_000_000, cost), "one message at a time"


def test_messages_share_a_link_or_queue_for_it() -> None:
    """A small push concurrent with a large one: at half the rate, or behind all of it."""
    ends: dict[str, int] = {}
    for sharing in ("shared", "queued"):
        resources = ClusterResources(cluster(3, sharing=sharing))
        builder = resources.builder()
        for size_bytes in (1_000_000, 100_000):
            begins = [builder.operation() for _ in range(3)]
            ended = [builder.operation() for _ in range(3)]
            expand(
                builder,
                resources,
                ring_all_gather,
                size_bytes * 3,
                begins,
                ended,
                connection=len(ends) + size_bytes,
            )
        ends[sharing] = int(play(builder.close()).end_ns[ended].max())
    assert ends["queued"] > 1.5 * ends["shared"]


def test_a_quick_link_carries_several_slow_ones() -> None:
    """Three hosts on a tenth of the rate push to one on the full rate, all at theirs."""
    slow = [Host(name=f"h{i}", workers=1, up_gbps=0.1, down_gbps=0.1) for i in range(3)]
    on = Cluster(hosts=(Host(name="q", workers=1, up_gbps=1, down_gbps=1), *slow), latency_us=0)
    one_way_ns = int(play(alone(on, ring_reduce_scatter, 400_000)).end_ns.max())
    assert one_way_ns == pytest.approx(3 * 8 * MS, rel=1e-3)
    pushed_ns = int(play(alone(on, push_and_pull, 400_000)).end_ns.max())
    assert pushed_ns == pytest.approx(2 * 3 * 8 * MS, rel=0.02), "what the slow ones send and receive"


def test_what_comes_again_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next graph on these resources too, until there is too much of it."""
    resources = ClusterResources(cluster(4))
    program = ring_all_gather
    first = resources.laid_out(program, 1_000_000, AlgorithmCost(), 0)
    assert resources.laid_out(program, 1_000_000, AlgorithmCost(), 0) is first
    for other in ((2_000_000, AlgorithmCost(), 0), (1_000_000, AlgorithmCost(message_us=1), 0),
                  (1_000_000, AlgorithmCost(), 1)):  # fmt: skip
        assert resources.laid_out(program, *other) is not first
    routes = resources.builder().routes
    assert resources.laid_out(program, 1_000_000, AlgorithmCost(), 0) is first
    monkeypatch.setattr(resources_module, "MOST_LAID_OUT_BYTES", 0)
    assert resources.laid_out(program, 1_000_000, AlgorithmCost(), 0) is first, (
        "a graph is not built on two tables"
    )
    assert resources.builder().routes is not routes
    assert resources.laid_out(program, 1_000_000, AlgorithmCost(), 0) is not first


@pytest.mark.parametrize("size_bytes", [100_000, 500_000, 2_000_000])
@pytest.mark.parametrize("others_gbps", [0.4, 0.8])
def test_a_message_is_ahead_of_others_until_they_have_queued_in_proportion(
    size_bytes: int, others_gbps: float
) -> None:
    """Against a queue that is first come, first served, in steps of a microsecond."""
    others = Traffic(source="h0", target="h1", gbps=others_gbps)
    on = cluster(window_bytes=128_000, traffic=(others,))
    left, queued, wanted_us = float(size_bytes), 0.0, 0
    while left > 0:
        own_share = 128_000 / (128_000 + queued)
        left -= 125 * own_share
        queued += 125 * (others_gbps - (1 - own_share))
        wanted_us += 1
    assert gather_ns(on, 2 * size_bytes) == pytest.approx(wanted_us * 1000, rel=0.02)
