"""Which algorithms are worth a plan on a cluster: those that were measured there and win at some size."""

from __future__ import annotations

from itertools import product

from headway.cluster import Cluster
from headway.collectives.algorithms import ALL_GATHER, REDUCE_SCATTER
from headway.collectives.selection import AlgorithmName, Algorithms, Selection
from headway.planning.link_cost import LinkCost

LEAST_SHARE = 1 / 256  # of a model, that buckets are taken to have


def algorithm_choices(cluster: Cluster, total_bytes: int) -> list[Algorithms]:
    """Algorithms for plans of a model of ``total_bytes`` on ``cluster``, Headway's rings first.

    The process group's own collectives join them where a probe has measured them and they would be faster for some
    bucket: nobody knows without measuring what they cost.
    """
    rings = LinkCost.of(cluster)
    native = LinkCost.of(cluster, Algorithms("native", "native"))
    halves: list[list[AlgorithmName]] = []
    for kind, ring, own in (
        (REDUCE_SCATTER, rings.reduce_scatter, native.reduce_scatter),
        (ALL_GATHER, rings.all_gather, native.all_gather),
    ):
        measured = Selection("native", kind).cost_names[0] in cluster.algorithms
        sizes = [size for size in ring.sizes_bytes if LEAST_SHARE * total_bytes <= size <= total_bytes]
        wins = any(own.time_ns(size) < ring.time_ns(size) for size in [*sizes, total_bytes])
        halves.append(["ring", "native"] if measured and wins else ["ring"])
    return [Algorithms(scatter, gather) for scatter, gather in product(*halves)]
