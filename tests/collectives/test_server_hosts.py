"""Servers on hosts without workers, replayed, against BytePS's closed form."""

from __future__ import annotations

import pytest
from tests.collectives.on_clusters import cluster_of

from headway.cluster import AlgorithmCost, Cluster, ServerHost
from headway.collectives.resources import ClusterResources
from headway.collectives.server_hosts import expand_served, served_shares
from headway.simulation.engine import play

SIZE_BYTES = 170_000_000  # some 40 pieces


def served_ms(cluster: Cluster, servers: int, size_bytes: int = SIZE_BYTES) -> float:
    """One key of ``size_bytes`` with nothing else in flight."""
    resources = ClusterResources(cluster.with_server_hosts(servers))
    builder = resources.builder()
    begins, ends = ([builder.operation() for _ in range(cluster.world_size)] for _ in range(2))
    expand_served(builder, resources, size_bytes, begins, ends, AlgorithmCost(), 0, servers)
    return float(play(builder.close()).end_ns.max()) / 1e6


def closed_form_ms(hosts: int, servers: int, gbps: float = 1.0) -> float:
    of_all = hosts**2 + servers * hosts - 2 * servers
    return 2 * hosts * (hosts - 1) / of_all * SIZE_BYTES * 8 / gbps / 1e6


@pytest.mark.parametrize("hosts", range(2, 9))
def test_shares_are_of_the_whole(hosts: int) -> None:
    for servers in range(hosts + 3):
        share, served = served_shares(hosts, servers)
        assert hosts * share + servers * served == pytest.approx(1)
        assert share >= 0


def check_closed_form(hosts: int, servers: int) -> None:
    assert served_ms(cluster_of(hosts), servers) == pytest.approx(closed_form_ms(hosts, servers), rel=0.03)


@pytest.mark.parametrize("hosts", [2, 4, 7])
def test_a_large_key_takes_the_time_of_the_closed_form(hosts: int) -> None:
    for servers in {0, hosts // 2, hosts}:
        check_closed_form(hosts, servers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hosts", range(2, 9))
def test_every_number_of_servers_takes_the_time_of_the_closed_form(hosts: int) -> None:
    for servers in range(hosts + 1):
        check_closed_form(hosts, servers)


def test_more_hosts_than_workers_have_gain_nothing() -> None:
    few, many = (served_ms(cluster_of(3), servers, SIZE_BYTES // 4) for servers in (3, 5))
    assert many == pytest.approx(few, rel=0.001)


@pytest.mark.parametrize("servers", [0, 2])
def test_workers_of_a_host_add_up_over_its_own_links(servers: int) -> None:
    fast = served_ms(cluster_of(4, workers=4, local_gbps=200), servers)
    assert fast == pytest.approx(closed_form_ms(4, servers), rel=0.03), (
        "the host's link carries one sum, not four"
    )
    slow = served_ms(cluster_of(4, workers=4, local_gbps=0.5), servers)
    inside_ms = 2 * 3 / 4 * SIZE_BYTES * 8 / 0.5 / 1e6
    assert slow == pytest.approx(inside_ms, rel=0.05), "both halves share the links inside"
    alone = served_ms(cluster_of(1, workers=4, local_gbps=0.5), servers)
    assert alone == pytest.approx(inside_ms, rel=0.01), "one host has nothing to push"


def test_a_server_on_a_slow_link_holds_all_up() -> None:
    cluster = cluster_of(4)
    slow = cluster.model_copy(update={"server_hosts": (ServerHost(name="s", up_gbps=0.1, down_gbps=1),)})
    share = served_shares(4, 1)[1]
    took_ms = served_ms(slow, 1, SIZE_BYTES // 2)
    assert took_ms == pytest.approx(4 * share * SIZE_BYTES / 2 * 8 / 0.1 / 1e6, rel=0.05)


def test_hosts_without_workers_are_added_where_a_cluster_has_too_few() -> None:
    cluster = cluster_of(2)
    named = cluster.model_copy(update={"server_hosts": (ServerHost(name="server1", up_gbps=9, down_gbps=9),)})
    assert [host.name for host in named.with_server_hosts(3).server_hosts] == [
        "server1",
        "server2",
        "server3",
    ]
    assert named.with_server_hosts(1) is named
    assert named.scaled(bandwidth=2).server_hosts[0].up_gbps == 18
    assert named.resized(5).server_hosts == named.server_hosts
