"""Ranks of the tests of what collectives cost."""

from __future__ import annotations

from typing import Any

from headway.cluster import Cluster
from headway.network.collective_costs import CANDIDATES, Effort, with_costs

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
