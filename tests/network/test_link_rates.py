"""Which of the two links of a message is the slow one."""

from __future__ import annotations

import pytest

from headway.network.fit import attributed, link_rates


@pytest.mark.parametrize("hosts", [3, 4, 6])
@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_host_does_not_slow_its_neighbours(hosts: int, slow: int) -> None:
    links = [0.2 if host == slow else 1.0 for host in range(hosts)]
    measured = {
        stride: [min(links[host], links[(host + stride) % hosts]) for host in range(hosts)]
        for stride in range(1, min(hosts, 4))
    }
    assert attributed(measured) == (links, links)


def test_links_that_differ_each_way() -> None:
    up, down = [1.0, 0.5, 1.0, 1.0], [1.0, 1.0, 0.25, 1.0]
    measured = {
        stride: [min(up[host], down[(host + stride) % 4]) for host in range(4)] for stride in (1, 2, 3)
    }
    assert attributed(measured) == (up, down)


def test_one_ring_is_taken_at_its_word() -> None:
    assert attributed({1: [1.0, 2.0]}) == ([1.0, 2.0], [2.0, 1.0])


def test_further_places_are_asked_only_where_rates_differ() -> None:
    links = [1.0, 1.0, 0.2, 1.0]
    asked: list[int] = []

    def measured(stride: int) -> list[float]:
        asked.append(stride)
        return [min(links[place], links[(place + stride) % len(links)]) for place in range(len(links))]

    assert link_rates(measured) == (links, links)
    assert asked == [1, 2, 3]
    links[2] = 0.95
    asked.clear()
    link_rates(measured)
    assert asked == [1]
