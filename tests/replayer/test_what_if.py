from __future__ import annotations

import pytest

from headway.cluster import DEFERRED_UPDATE, STEP_CALL, AlgorithmCost, Cluster, Host, Traffic
from headway.errors import UserError
from headway.simulator.what_if import WhatIf


def test_what_ifs_compose() -> None:
    what_if = WhatIf.parse(["bandwidth=2x", "compute=0.5x", "workers=8", "bandwidth=3x"])
    assert what_if == WhatIf(bandwidth=6, compute=0.5, workers=8)
    assert "8 workers" in what_if.describe()
    assert WhatIf.parse([]).describe() == ""


@pytest.mark.parametrize(
    "text", ["bandwidth", "bandwidth=", "bandwidth=0x", "bandwidth=-2x", "workers=0", "workers=2.5", "workers=99999",
             "magic=2x", "", "compute=nan", "latency=1e20x", "bandwidth=1e-200x",
             "bandwidth:=2x", "compute:x=2x", "compute:-1=2x", "latency:a=2x", "compute:1=1e9x", "bandwidth:a=0x",
             "dies:3", "dies:3@", "dies:3@0s", "dies:x@2s", "dies:3@2s=1x", "joins:-1@2s", "random-slowdown=2x",
             "random-slowdown:10=2x", "random-slowdown:0%=2x", "random-slowdown:101%=2x", "random-slowdown:10%"],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_on_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        WhatIf.parse([text])
    assert "\n" not in str(caught.value)


def test_how_many_workers_there_are_is_said_once() -> None:
    with pytest.raises(UserError, match="given twice"):
        WhatIf.parse(["workers=4", "workers=8"])


def test_incidents() -> None:
    what_if = WhatIf.parse(["dies:3@2s", "joins:3@5s", "random-slowdown:10%=3x", "joins:1@500ms"])
    incidents = what_if.incidents
    assert (incidents.slow_share, incidents.slow_factor) == (0.1, 3.0)
    assert incidents.deaths == ((2 * 10**9, 3),)
    assert incidents.joins == ((5 * 10**9, 3), (5 * 10**8, 1))
    assert "rank 3 dies after 2 s" in what_if.describe()
    assert not what_if.without_members().incidents.change_members
    with pytest.raises(UserError, match="twice"):
        WhatIf.parse(["dies:3@2s", "dies:3@5s"])
    with pytest.raises(UserError, match="twice"):
        WhatIf.parse(["random-slowdown:10%=3x", "random-slowdown:20%=3x"])
    with pytest.raises(UserError, match="unknown rank"):
        WhatIf.parse(["dies:4@2s"]).apply(TWO)


def test_quicker_hosts_spend_less_on_optimizers_calls() -> None:
    hosts = (Host(name="a", workers=2, up_gbps=1, down_gbps=1),)
    costs = {name: AlgorithmCost(overhead_us=100) for name in (DEFERRED_UPDATE, STEP_CALL, "ring")}
    changed = WhatIf(compute=0.5).apply(Cluster(hosts=hosts, algorithms=costs))
    assert [changed.cost_of(name).overhead_us for name in costs] == [50, 50, 100]


TWO = Cluster(hosts=tuple(Host(name=name, workers=2, up_gbps=8, down_gbps=4) for name in ("a", "b:c")))


def test_single_links_and_ranks() -> None:
    what_if = WhatIf.parse(
        [
            "bandwidth:a=0.5x",
            "bandwidth:b:c:up=0.25x",
            "bandwidth:a:down=0.5x",
            "bandwidth=2x",
            "compute:3=1.5x",
        ]
    )
    assert [(host.up_gbps, host.down_gbps) for host in what_if.apply(TWO).hosts] == [(8, 2), (4, 8)]
    assert dict(what_if.rank_factors) == {3: 1.5}
    assert "bandwidth up of b:c 0.25 times the recorded" in what_if.describe()
    assert "compute time of rank 3 1.5 times the recorded" in what_if.describe()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bandwidth:c=2x", "unknown host; got 'c'; expected a, b:c"),
        ("compute:4=2x", "unknown rank; got 4; expected 0 to 3"),
    ],
)  # fmt: skip
def test_whom_there_is_not(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        WhatIf.parse([text]).apply(TWO)


def test_workers_a_host() -> None:
    what_if = WhatIf.parse(["workers=3x4"])
    assert (what_if.workers, what_if.workers_a_host) == (12, 4)
    changed = what_if.apply(TWO)
    assert [host.workers for host in changed.hosts] == [4, 4, 4]
    assert "12 workers, 4 a host" in what_if.describe()


@pytest.mark.parametrize(
    "text", ["workers=3x", "workers=x3", "workers=0x4", "workers=2x5000", "workers=3x4x5"]
)
def test_workers_a_host_that_make_no_sense(text: str) -> None:
    with pytest.raises(UserError, match="HOSTSxN"):
        WhatIf.parse([text])


def test_traffic_of_others_for_good_or_for_a_while() -> None:
    named = TWO.model_copy(update={"hosts": (TWO.hosts[0], TWO.hosts[1].model_copy(update={"name": "b"}))})
    what_if = WhatIf.parse(["traffic:a:b=1gbit", "traffic:b:a=500mbit@200ms-1s"])
    assert what_if.apply(named).traffic == (
        Traffic(source="a", target="b", gbps=1),
        Traffic(source="b", target="a", gbps=0.5, start_ms=200, end_ms=1000),
    )
    assert "other traffic of 1 Gbit/s from a to b" in what_if.describe()


@pytest.mark.parametrize(
    "text",
    [
        "traffic:a:b", "traffic:a=1gbit", "traffic:a:b=1", "traffic:a:b=1gbit@1s", "traffic:a:b=1gbit@1s-",
        "traffic:a:b=1gbit@2s-1s", "traffic:a:a=1gbit", "traffic=1gbit", "traffic:a:b=0gbit",
    ],
)  # fmt: skip
def test_traffic_that_makes_no_sense(text: str) -> None:
    with pytest.raises(UserError) as caught:
        WhatIf.parse([text])
    assert "\n" not in str(caught.value)


def test_traffic_of_hosts_that_are_not_there() -> None:
    with pytest.raises(UserError, match="--what-if traffic: unknown host; got 'x'"):
        WhatIf.parse(["traffic:a:x=1gbit"]).apply(TWO)


@pytest.mark.parametrize(
    ("text", "near"), [("bandwith=2x", "bandwidth"), ("bandwith:a=2x", "bandwidth"), ("worker=4", "workers")]
)
def test_a_misspelt_what_if_is_told_what_it_may_be(text: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"Did you mean {near}\?"):
        WhatIf.parse([text])
    with pytest.raises(UserError) as refused:
        WhatIf.parse(["compute:x=2x"])
    assert "Did you mean" not in str(refused.value)
