from __future__ import annotations

from typing import Any

import pytest

from headway.errors import LabError
from headway.lab.spec import LabSpec, override, parse_event, parse_pairs, parse_spec


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("5s link host1 100mbit", {"at": "5s", "link": "host1", "rate": "100mbit"}),
        (
            "5s link host1 down 100mbit",
            {"at": "5s", "link": "host1", "rate": "100mbit", "direction": "down"},
        ),
        ("8s kill 1", {"at": "8s", "kill": 1}),
        ("4s slow 1 0.5", {"at": "4s", "slow": {"rank": 1, "share": "0.5"}}),
        (
            "3s traffic host0 host1 200mbit",
            {"at": "3s", "traffic": {"from": "host0", "to": "host1", "rate": "200mbit"}},
        ),
        (
            "3s traffic host0 host1 200mbit 4s",
            {"at": "3s", "traffic": {"from": "host0", "to": "host1", "rate": "200mbit", "for": "4s"}},
        ),
    ],
)
def test_events_are_read_as_in_a_file(text: str, event: dict[str, Any]) -> None:
    assert parse_event(text) == event
    assert len(override(None, hosts=2, timeline=[parse_event(text)]).timeline) == 1


@pytest.mark.parametrize(
    "text", ["", "5s", "5s explode", "5s kill", "5s kill one", "5s link host1 left 1mbit"]
)
def test_other_events_are_refused(text: str) -> None:
    with pytest.raises(LabError):
        parse_event(text)


def test_pairs() -> None:
    assert parse_pairs(["1=0.5", "0=2"], "--slow") == {1: "0.5", 0: "2"}
    for bad in ("1", "=2", "1=", "x=1"):
        with pytest.raises(LabError):
            parse_pairs([bad], "--slow")


def test_flags_alone_make_a_lab() -> None:
    spec = override(None, hosts=2, rate="400mbit", down="100mbit", slow={1: "0.5"}, pace={0: "2"})
    assert spec.slow == {1: 0.5}
    assert spec.pace == {0: 2.0}
    assert (spec.links[0].up_gbps, spec.links[0].down_gbps) == (0.4, 0.1)


def test_no_flags_change_nothing() -> None:
    base = LabSpec(hosts=3, rate="1mbit")
    assert override(base).links == base.links


def test_flags_win_over_what_the_file_says_for_single_hosts() -> None:
    base = parse_spec(
        {
            "hosts": [{"name": "a", "rate": "1gbit", "workers": 4}, {"name": "b", "up": "1mbit"}],
            "rate": "10mbit",
            "slow": {0: 0.5, 1: 0.5},
            "timeline": [{"at": "1s", "kill": 0}],
        }
    )
    up = override(base, up="5mbit")
    assert [(link.up_gbps, link.down_gbps) for link in up.links] == [(0.005, 1.0), (0.005, 0.01)]
    both = override(base, rate="5mbit", workers_per_host=1, timeline=[parse_event("2s kill 1")])
    assert {(link.up_gbps, link.down_gbps) for link in both.links} == {(0.005, 0.005)}
    assert both.world_size == 2
    assert len(both.timeline) == 2
    assert override(base, slow={1: "1"}).slow == {0: 0.5, 1: 1.0}
    assert override(override(base, slow_by="quota")).slow_by == "quota"
    assert [link.name for link in override(base, hosts=3).links] == ["host0", "host1", "host2"]


def test_the_result_must_fit_together() -> None:
    base = LabSpec(hosts=2, slow={1: 0.5})
    with pytest.raises(LabError, match="no such rank"):
        override(base, hosts=1)
