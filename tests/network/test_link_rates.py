"""Which of the two links of a message is the slow one."""

from __future__ import annotations

import pytest

from headway.network.link_rates import attributed


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
