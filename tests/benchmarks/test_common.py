"""What all benchmarks share: the order in which methods get their turns."""

from __future__ import annotations

import pytest
from common import order_of


@pytest.mark.parametrize("count", range(2, 7))
def test_every_method_has_its_turn_and_begins_a_round(count: int) -> None:
    orders = [order_of(number, count) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert {order[0] for order in orders} == set(range(count))


@pytest.mark.parametrize("count", range(2, 7))
def test_nobody_always_follows_upon_the_same_other_one(count: int) -> None:
    orders = [order_of(number, count) for number in range(4)]
    for method in range(count):
        before = {([-1, *order][order.index(method)]) for order in orders}
        assert len(before) > 1
