"""Shares of servers where links are unequal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cluster import Cluster, Host, Traffic
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.parameter_server.shares import PARTS, shares_on


def on(rates_gbps: Sequence[float], workers: int = 1, **options: object) -> Cluster:
    hosts = tuple(
        Host(name=f"h{number}", workers=workers, up_gbps=rate, down_gbps=rate)
        for number, rate in enumerate(rates_gbps)
    )
    return Cluster.model_validate({"hosts": hosts, **options})


@pytest.mark.parametrize(
    "cluster", [on([1.0, 0.5]), on([1.0, 1.05, 1.0]), on([1.0, 0.2, 1.0], workers=2), on([1.0])]
)
def test_all_serve_alike_where_links_are_or_nothing_is_gained(cluster: Cluster) -> None:
    assert shares_on(cluster) == ()


def test_a_slow_link_s_worker_serves_next_to_nothing() -> None:
    shares = shares_on(on([4.0, 4.0, 4.0, 1.0]))
    assert shares[3] == 1
    assert shares[:3] == (PARTS // 3,) * 3


@pytest.mark.parametrize(("hosts", "fast"), [(200, 1), (1000, 5)])
def test_shares_of_many_workers_stay_within_what_a_plan_takes(hosts: int, fast: int) -> None:
    shares = shares_on(on([100.0] * fast + [1.0] * (hosts - fast)))
    assert ParameterServerStrategy(shares=shares).shares == shares


def test_what_others_send_makes_a_link_slow() -> None:
    busy = on([1.0, 1.0, 1.0, 1.0], traffic=(Traffic(source="h2", target="h0", gbps=0.8),))
    shares = shares_on(busy)
    assert shares[2] == shares[0] < shares[1] == shares[3]


@given(rates=st.lists(st.floats(0.1, 100.0), min_size=3, max_size=12))
def test_no_link_is_in_use_for_longer_than_with_equal_shares(rates: list[float]) -> None:
    """But for rounding; and than the slowest needs to bring its own gradient away."""
    shares = shares_on(on(rates)) or (1,) * len(rates)
    count, parts = len(rates), sum(shares)
    longest, equal = (
        max((1 + (count - 2) * part) / rate for part, rate in zip(own, rates, strict=True))
        for own in ([share / parts for share in shares], [1 / count] * count)
    )
    assert longest <= equal * (1 + 2 * count / PARTS)
    assert min(shares) >= 1


def test_many_slow_workers_find_room_too() -> None:
    rates = [1.0] * 100 + [0.1] * 100
    shares = shares_on(on(rates))
    assert shares
    longest = max((1 + 198 * share / sum(shares)) / rate for share, rate in zip(shares, rates, strict=True))
    assert longest < 0.7 * (1 + 198 / 200) / 0.1


def test_what_others_send_for_a_while_is_no_reason() -> None:
    for options in ({"start_ms": 10}, {"end_ms": 1000}):
        traffic = Traffic(source="h2", target="h0", gbps=0.8, **options)
        assert shares_on(on([1.0] * 4, traffic=(traffic,))) == ()
