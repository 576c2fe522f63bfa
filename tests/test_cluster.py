from __future__ import annotations

from pathlib import Path

import pytest

from headway.cluster import AlgorithmCost, Cluster, Host, SlowPath, Traffic, Ways
from headway.errors import ClusterError


def cluster(workers: tuple[int, ...] = (2, 2)) -> Cluster:
    hosts = tuple(
        Host(name=f"host{i}", workers=count, up_gbps=1.0, down_gbps=2.0) for i, count in enumerate(workers)
    )
    return Cluster(hosts=hosts, algorithms={"ring": AlgorithmCost(overhead_us=10)})


def test_ranks_fill_hosts_in_order() -> None:
    assert cluster((1, 3)).host_of_rank == (0, 1, 1, 1)
    assert cluster((1, 3)).world_size == 4


def test_a_cluster_written_and_read_is_the_same(tmp_path: Path) -> None:
    cluster().save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster()


def test_scaling_multiplies_rates_and_latency_only() -> None:
    scaled = cluster().scaled(bandwidth=2, latency=0.5)
    assert scaled.hosts[0].up_gbps == 2.0
    assert scaled.hosts[0].down_gbps == 4.0
    assert scaled.latency_us == 50.0
    assert scaled.local_gbps == 2 * cluster().local_gbps
    assert scaled.local_latency_us == 0.5 * cluster().local_latency_us
    assert scaled.algorithms == cluster().algorithms


@pytest.mark.parametrize("world_size", range(1, 10))
def test_resizing_repeats_hosts_with_names_of_their_own(world_size: int) -> None:
    resized = cluster((2, 3)).resized(world_size)
    assert resized.world_size == world_size
    assert len({host.name for host in resized.hosts}) == len(resized.hosts)


def test_ranks_that_share_cores_get_less_of_them_when_there_are_more() -> None:
    costs = {
        "ring": AlgorithmCost(message_us=300, message_cpu_us=100, overhead_us=10),
        "servers": AlgorithmCost(message_us=300),
    }
    sharing = cluster((1, 1)).model_copy(update={"shared_cores": 2, "algorithms": costs})
    assert sharing.crowding == 1
    grown = sharing.resized(8)
    assert grown.crowding == 4
    assert {name: cost.message_us for name, cost in grown.algorithms.items()} == {
        "ring": 1200,
        "servers": 1200,
    }
    assert sharing.model_copy(update={"shared_cores": None}).resized(8).cost_of("ring").message_us == 300


def test_what_messages_take_is_read_off_between_measured_sizes() -> None:
    sizes = [
        {"size_bytes": 100, "message_us": 10},
        {"size_bytes": 10_000, "message_us": 30, "message_cpu_us": 4},
    ]
    cost = AlgorithmCost.model_validate({"byte_factor": 1.5, "by_size": sizes})
    assert [cost.at(size).message_us for size in (1, 100, 1_000, 10_000, 1e9)] == [10, 10, 20, 30, 30]
    assert cost.at(1_000).message_cpu_us == 2
    assert cost.at(1_000).byte_factor == 1.5
    assert cost.crowded(2).at(10_000).message_us == 60
    with pytest.raises(ValueError, match="ascending order of size_bytes"):
        AlgorithmCost.model_validate({"by_size": sizes[::-1]})


def test_hosts_take_as_many_workers_as_asked() -> None:
    assert [host.workers for host in cluster((2, 3)).resized(10, 4).hosts] == [4, 4, 2]


def test_traffic_needs_hosts_and_leaves_with_them() -> None:
    traffic = Traffic(source="host0", target="host1", gbps=1)
    busy = Cluster.model_validate({**cluster((1, 1)).model_dump(), "traffic": [traffic.model_dump()]})
    assert busy.resized(3).traffic == (traffic,)
    assert busy.resized(1).traffic == ()
    for target in ("host0", "host9"):
        with pytest.raises(ValueError, match=r"itself|unknown host"):
            Cluster.model_validate(
                {**cluster((1, 1)).model_dump(), "traffic": [{**traffic.model_dump(), "target": target}]}
            )


def test_paths_lie_between_hosts_and_leave_with_them() -> None:
    path = SlowPath(source="host0", target="host1", gbps=1)
    given = cluster((1, 1)).model_dump()
    slow = Cluster.model_validate({**given, "paths": [path.model_dump()]})
    assert slow.resized(3).paths == (path,)
    assert slow.resized(1).paths == ()
    assert slow.scaled(bandwidth=0.5).paths[0].gbps == 0.5
    back = SlowPath(source="host1", target="host0", gbps=1)
    assert Cluster.model_validate({**given, "paths": [path.model_dump(), back.model_dump()]})
    for target in ("host0", "host9"):
        wrong = {**path.model_dump(), "target": target}
        with pytest.raises(ValueError, match=r"two different hosts|unknown host"):
            Cluster.model_validate({**given, "paths": [wrong]})
    with pytest.raises(ValueError, match="listed once"):
        Cluster.model_validate({**given, "paths": [path.model_dump()] * 2})


def test_a_path_has_a_latency_of_its_own() -> None:
    given = cluster((1, 1, 1)).model_dump()
    longer = {"source": "host0", "target": "host1", "latency_us": 5000}
    nearer = {"source": "host1", "target": "host0", "latency_us": 10, "gbps": 0.5}
    found = Cluster.model_validate({**given, "paths": [longer, nearer]})
    ways = Ways(found.scaled(latency=2))
    assert [ways.latency_us(*each) for each in ((0, 1), (1, 0), (1, 2))] == [10_000, 20, 200]
    assert [ways.gbps(*each) for each in ((0, 1), (1, 0))] == [1.0, 0.5]
    assert found.least_latency_us == 10
    with pytest.raises(ValueError, match="neither gbps nor latency_us"):
        Cluster.model_validate({**given, "paths": [{"source": "host0", "target": "host1"}]})


def test_an_unmeasured_algorithm_costs_the_ideal() -> None:
    assert cluster().cost_of("ring").overhead_us == 10
    assert cluster().cost_of("tree") == AlgorithmCost()


@pytest.mark.parametrize(
    "text",
    [
        "hosts: []",
        "hosts: [{name: a, workers: 0, up_gbps: 1, down_gbps: 1}]",
        "hosts: [{name: a, workers: 1, up_gbps: 0, down_gbps: 1}]",
        "hosts: [{name: a, workers: 1, up_gbps: .nan, down_gbps: 1}]",
        "hosts: [{name: a, workers: 1, up_gbps: 1.0e-308, down_gbps: 1}]",
        "hosts: [{name: a, workers: 1, up_gbps: 1, down_gbps: 1}]\nlatency_us: 1.0e+20",
        "format: 2\nhosts: [{name: a, workers: 1, up_gbps: 1, down_gbps: 1}]",
        "hosts: [{name: a, workers: 1, up_gbps: 1, down_gbps: 1}, {name: a, workers: 1, up_gbps: 1, down_gbps: 1}]",
    ],
)
def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ClusterError) as caught:
        Cluster.load(tmp_path / "c.yaml")
    assert "\n" not in str(caught.value)


def test_a_cost_under_its_earlier_name_is_read() -> None:
    cost = {"overhead_us": 7.0}
    hosts = [{"name": "a", "workers": 2, "up_gbps": 1.0, "down_gbps": 1.0}]
    read = Cluster.model_validate({"hosts": hosts, "algorithms": {"update_beside": cost, "ring": cost}})
    assert read.background_update_us == 7.0
    assert set(read.algorithms) == {"background_update", "ring"}
