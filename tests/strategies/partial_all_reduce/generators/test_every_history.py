"""All states that a few workers bring a generator into, by every order of events and every outcome of chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.strategies.partial_all_reduce.generators.exploring import NO_MIXING, Scripted, copied, explore
from tests.strategies.partial_all_reduce.generators.watched import Watched

CASES: list[tuple[str, Mapping[str, Any]]] = [
    ("all", {}),
    ("pairs", {"mixing_window": NO_MIXING}),
    ("pairs", {"neighbours": "any", "mixing_window": NO_MIXING}),
    ("random", {"group_size": 2, "mixing_window": NO_MIXING}),
    ("random", {"group_size": 3, "mixing_window": NO_MIXING}),
    ("group-buffer", {"group_size": 2, "mixing_window": NO_MIXING}),
    ("global-division", {"group_size": 2, "mixing_window": NO_MIXING}),
    ("inter-intra", {"group_size": 2, "mixing_window": NO_MIXING}),
    ("first-come", {"group_size": 2, "deadline_ms": 1, "mixing_window": NO_MIXING}),
    ("first-come", {"group_size": 3, "deadline_ms": 1, "mixing_window": NO_MIXING}),
]
MANY: list[tuple[str, Mapping[str, Any]]] = [  # more states than are worth a test
    ("pairs", {"mixing_window": 1}),
    ("random", {"group_size": 2, "mixing_window": 1}),
    ("group-buffer", {"group_size": 2, "slowdown_threshold": 1, "mixing_window": NO_MIXING}),
    ("global-division", {"group_size": 2, "slowdown_threshold": 2, "mixing_window": 1}),
    ("inter-intra", {"group_size": 2, "slowdown_threshold": 1, "mixing_window": 1}),
    ("first-come", {"group_size": 2, "deadline_ms": 1, "mixing_window": 1}),
    ("first-come", {"group_size": 3, "deadline_ms": 1, "mixing_window": 2}),
]


def nobody_waits_for_ever(world: Watched) -> None:
    """From here on, whoever waits is granted a group within a few rounds; and what is kept does not pile up."""
    workers = len(world.present)
    assert len(getattr(world.generator, "queue", ())) <= 3 * workers
    later = copied(world)
    later.generator.chance = Scripted()  # type: ignore[attr-defined]
    later.fair_rounds(2 * workers + 2)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_three_workers_that_come_and_go_and_four_that_stay(name: str, options: Mapping[str, Any]) -> None:
    for workers, coming in ((3, range(3)), (4, ())):
        states, all_of_them = explore(name, options, workers, coming, 3000, nobody_waits_for_ever)
        assert all_of_them
        assert states > 20


@pytest.mark.parametrize(("name", "options"), MANY)
def test_the_first_states_where_there_are_many(name: str, options: Mapping[str, Any]) -> None:
    states, _ = explore(name, options, 3, range(3), 1500, nobody_waits_for_ever)
    assert states > 200
