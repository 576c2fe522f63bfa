"""By how much an answer may be off, as far as is known: errors of what it was made from, in proportion."""

from __future__ import annotations

import math

from headway.graph.build import GraphBuilder


def unfitted(graph: GraphBuilder) -> float:
    """By how much what was measured of the graph's collectives is off their costs, at worst; a share."""
    selections = {collective.selection for collective in graph.collectives}
    return max((each.cost(graph.cluster).fit_error for each in selections), default=0.0)


def together(*errors: float) -> float:
    """Errors that have nothing to do with each other."""
    return math.hypot(*errors)
