"""Ranks of the tests of what collectives cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from headway.cluster import Cluster
from headway.network import collective_costs
from headway.network.collective_costs import CANDIDATES, Effort, timings_of, with_costs
from headway.network.interference import Timing

BRIEF = Effort(
    tuple(each for each in CANDIDATES if each.pieces == 1),
    {1_000: 2, 20_000: 2},
    repeats=1,
    most_repeats=1,
    longest_s=0.05,
    interference_rounds=1,
)


def costs(_rank: int, _world_size: int, cluster: dict[str, Any]) -> dict[str, Any]:
    """The cluster with the costs that were measured."""
    measured = with_costs(Cluster.model_validate(cluster), busy_cores=False, effort=BRIEF)
    return measured.model_dump(mode="json")


def turns_where_cores_are_busy(_rank: int, _world_size: int, cluster: dict[str, Any]) -> list[int]:
    """How many collectives follow each other in a measurement where all of them together take ten seconds."""

    def slow(action: Callable[[], None], _work: Any) -> Timing:
        action()
        return Timing(10.0, 0.0)

    effort = replace(BRIEF, shares_bytes={1_000: 16})
    with mock.patch.object(collective_costs, "timed", slow):
        found = timings_of(Cluster.model_validate(cluster), busy_cores=False, effort=effort)
    return [each.turns for measured in found.values() for each in measured]
