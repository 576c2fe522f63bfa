"""Probes of many ranks that share the cores of one machine."""

from __future__ import annotations

from headway.collectives.algorithms import GLOO_ALL_REDUCE, HIERARCHICAL, RING
from headway.network.collective_costs import CANDIDATES, Effort

MANY_RANKS = Effort(
    tuple(each for each in CANDIDATES if each.name in (RING, HIERARCHICAL, GLOO_ALL_REDUCE)),
    {1_000: 10, 20_000: 6, 60_000: 4},
    repeats=2, most_repeats=3, longest_s=0.5, interference_rounds=1,
)  # fmt: skip
"""Three algorithms at three sizes, a few times each."""
