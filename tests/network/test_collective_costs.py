from __future__ import annotations

import pytest
from tests import workers

from headway.cluster import Cluster, Host
from headway.collectives.algorithms import DIRECT, HALVING_DOUBLING, HIERARCHICAL, NATIVE, RING, TREE
from headway.collectives.hierarchical import Hosts
from headway.network.collective_costs import CANDIDATES, SHORT


@pytest.mark.parametrize(
    ("places", "others"),
    [
        ("a", set()),
        ("ab", set()),
        ("abc", {DIRECT}),
        ("aab", {DIRECT}),
        ("abcd", {DIRECT, HALVING_DOUBLING}),
        ("aabb", {DIRECT, HALVING_DOUBLING, HIERARCHICAL}),
        ("aabbcc", {DIRECT, HIERARCHICAL, TREE}),
        ("abcdefgh", {DIRECT, HALVING_DOUBLING}),
    ],
)
def test_probes_time_what_differs_from_rings_among_these_ranks(places: str, others: set[str]) -> None:
    found = {each.algorithm for each in CANDIDATES if each.fits(Hosts.of_places(places))}
    assert found & {DIRECT, HALVING_DOUBLING, HIERARCHICAL, TREE} == others
    assert {RING, NATIVE} <= found


def test_short_probes_time_every_algorithm() -> None:
    assert {each.algorithm for each in SHORT.candidates} == {each.algorithm for each in CANDIDATES}


FAST = Cluster(
    hosts=tuple(Host(name=name, workers=2, up_gbps=1000, down_gbps=1000) for name in "ab"),
    latency_us=0, local_latency_us=0, local_gbps=1000,
)  # fmt: skip
"""Links and memory that cost next to nothing, so that all that is measured is their messages' cost."""


@pytest.mark.processes
def test_every_rank_gets_the_same_costs_of_all_that_fits() -> None:
    found = workers.run(4, "tests.network.cost_cases:costs", FAST.model_dump(mode="json"), timeout_s=100)
    assert all(each == found[0] for each in found)
    measured = Cluster.model_validate(found[0]).algorithms
    assert set(measured) == {
        "ring", "hierarchical", "direct", "halving_doubling", "native_reduce_scatter", "native_all_gather",
        "gloo_all_reduce", "servers",
    }  # fmt: skip
    assert all(cost.message_us > 0 for cost in measured.values())


@pytest.mark.processes
def test_measurements_stay_short_where_messages_wait_for_cores() -> None:
    case = "tests.network.cost_cases:turns_where_cores_are_busy"
    (first, second) = workers.run(
        2, case, FAST.model_copy(update={"hosts": FAST.hosts[:1]}).model_dump(mode="json")
    )
    assert first == second
    assert first
    assert max(first) <= 2, "one of each kind"
