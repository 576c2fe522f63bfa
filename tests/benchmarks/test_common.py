"""What all benchmarks share: the order in which methods get their turns."""

from __future__ import annotations

from common import order_of


def test_every_method_has_its_turn_and_begins_a_round() -> None:
    orders = [order_of(number, 5) for number in range(10)]
    assert all(sorted(order) == list(range(5)) for order in orders)
    assert {order[0] for order in orders} == set(range(5))


def test_nobody_always_follows_upon_the_same_other_one() -> None:
    orders = [order_of(number, 5) for number in range(3)]
    for method in range(5):
        before = {([-1, *order][order.index(method)]) for order in orders}
        assert len(before) > 1
