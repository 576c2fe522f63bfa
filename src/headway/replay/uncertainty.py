"""What is known of the errors of what an answer was made from."""

from __future__ import annotations

from headway.graph.build import GraphBuilder


def unfitted(graph: GraphBuilder) -> float:
    """By how much what was measured of the graph's collectives is off their costs, at worst; a share."""
    selections = {collective.selection for collective in graph.collectives}
    return max((each.cost(graph.cluster).fit_error for each in selections), default=0.0)
