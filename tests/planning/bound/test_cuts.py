from __future__ import annotations

from headway.bound.cuts import cuts_of, least_byte_factor
from headway.cluster import AlgorithmCost, Cluster, Host, Traffic


def cluster(*hosts: tuple[int, float, float], **given: object) -> Cluster:
    own = [
        Host(name=f"host{index}", workers=workers, up_gbps=up, down_gbps=down)
        for index, (workers, up, down) in enumerate(hosts)
    ]
    return Cluster.model_validate({"hosts": own, **given})


def test_each_host_sends_and_receives_everything_once_and_all_together_as_rings_do() -> None:
    cuts = {cut.name: cut for cut in cuts_of(cluster((1, 8, 8), (1, 4, 8), (1, 8, 2)))}
    assert set(cuts) == {
        "the link from host host1", "the links from all hosts", "the link to host host2", "the links to all hosts",
    }  # fmt: skip
    assert cuts["the link from host host1"].time_ns(100) == 200
    assert cuts["the link to host host2"].time_ns(100) == 400
    assert cuts["the links from all hosts"].time_ns(100) == 4 * 100 / 2.5


def test_workers_of_a_host_exchange_over_its_memory() -> None:
    (alone,) = cuts_of(cluster((4, 8, 8), local_gbps=16))
    assert alone.time_ns(100) == 6 * 100 / 8  # 2 (P - 1) copies, over four senders of 2 bytes a nanosecond
    names = {cut.name for cut in cuts_of(cluster((2, 8, 8), (3, 8, 8), local_gbps=1))}
    assert {"the memory and links of all workers", "the memory and link of host host1"} <= names
    assert cuts_of(cluster((1, 8, 8))) == ()


def test_what_others_leave_is_a_second_cut_with_what_they_hold_back_at_first() -> None:
    traffic = (Traffic(source="host0", target="host1", gbps=6, connections=2),)
    found = [
        cut
        for cut in cuts_of(cluster((1, 8, 8), (1, 8, 8), traffic=traffic, burst_bytes=10, window_bytes=100))
        if cut.name == "the link from host host0"
    ]
    usual, left = found
    assert (usual.rate, usual.credit_bytes) == (1.0, 10)
    assert left.rate * 3 == 1.0
    assert left.credit_bytes == 10 + 200
    ending = (traffic[0].model_copy(update={"end_ms": 5.0}),)
    assert cuts_of(cluster((1, 8, 8), (1, 8, 8), traffic=ending)) == cuts_of(cluster((1, 8, 8), (1, 8, 8)))


def test_a_byte_costs_no_less_than_was_measured_of_any_algorithm() -> None:
    algorithms = {"ring": AlgorithmCost(byte_factor=0.9), "servers": AlgorithmCost(byte_factor=1.2)}
    assert least_byte_factor(cluster((1, 8, 8), algorithms=algorithms)) == 0.9
    assert least_byte_factor(cluster((1, 8, 8), algorithms={"servers": algorithms["servers"]})) == 1.0
