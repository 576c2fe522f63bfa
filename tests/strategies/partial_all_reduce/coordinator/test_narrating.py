"""Who comes and goes is said in a line each, and metrics count it all the same."""

from __future__ import annotations

import pytest

from headway.strategies.partial_all_reduce.coordinator.prometheus import Narrating, NarratingWithMetrics


def told(observer: Narrating) -> None:
    observer.joined(0, resumed=False)
    observer.members(1)
    observer.joined(3, resumed=False)
    observer.members(2)
    observer.joined(3, resumed=True)
    observer.members(2)
    observer.started(2, 1)
    observer.gone(0, "lease")
    observer.members(1)
    observer.members(1)


LINES = [
    "worker 0 has joined: 1 worker",
    "worker 3 has joined: 2 workers",
    "worker 3 is back: 2 workers",
    "worker 0 is considered dead: its lease expired: 1 worker",
]


def test_a_line_says_who_comes_and_goes() -> None:
    said: list[str] = []
    told(Narrating(said.append))
    assert said == LINES


def test_metrics_count_what_is_said() -> None:
    pytest.importorskip("prometheus_client")
    said: list[str] = []
    observer = NarratingWithMetrics(said.append)
    told(observer)
    assert said == LINES
    value = observer.registry.get_sample_value
    assert value("headway_coordinator_workers") == 1
    assert value("headway_coordinator_joins_total") == 2
    assert value("headway_coordinator_departures_total", {"reason": "lease"}) == 1
