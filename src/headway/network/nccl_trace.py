"""NCCL's own model from the collectives of a trace, where it explains them as well as rings do.

With rings alone, predictions for more hosts are far too slow: NCCL changes to trees. One number of ranks does not tell
what the network's latencies are, so that NCCL's own are taken.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import cast

from headway.cluster import HOST_COSTS, AlgorithmCost, Cluster, NcclModel
from headway.collectives.algorithms import KINDS
from headway.collectives.nccl import Architecture, Fabric, Kind
from headway.network.nccl_tests import (
    CARD_SPEEDS,
    INSIDE_GB_S,
    Timing,
    architecture_of,
    best_factor,
    off,
    reaching,
)
from headway.trace.events import Event
from headway.trace.events import Kind as EventKind
from headway.trace.format import Trace

LEAST_ROWS = 4
SLACK = 0.02  # by how much further off than rings the model may be


def with_nccl(trace: Trace, flat: Cluster, flat_error: float) -> Cluster:
    """``flat``, the cluster of rings that was fitted to ``trace``, with NCCL's model where that fits as well.

    ``flat_error`` is by which share the rings are off recorded collectives, in the median.
    """
    rows = timings_of(trace, flat)
    workers = {host.workers for host in flat.hosts}
    if len(rows) < LEAST_ROWS or len(workers) > 1:
        return flat
    architecture = cast("Architecture", architecture_of(trace.manifest.ranks[0].device) or "hopper")
    inside_gb_s = INSIDE_GB_S[architecture]
    fabric = Fabric(architecture, "intel", inside_gb_s, version=(2, 27), passing_gb_s=inside_gb_s)
    if len(flat.hosts) == 1:
        inside = best_factor(lambda value: off(rows, _inside(fabric, value), 0.0), 1.0, 1000.0)
        found, speed = _inside(fabric, inside), 0.0
    else:
        fitted = {card: reaching(rows, fabric, card) for card in CARD_SPEEDS}
        speed = min(fitted, key=lambda card: off(rows, fitted[card], card))
        found = fitted[speed]
    error = off(rows, found, speed)
    if error > flat_error + SLACK:
        return flat
    (a_host,) = workers
    gbps = speed * found.reached * a_host * 8 if speed else flat.hosts[0].up_gbps
    source = (
        f"fitted from the trace by NCCL's own model, with a median error of {error:.1%} for its collectives"
    )
    costs = {
        name: cost if name in HOST_COSTS else AlgorithmCost(fit_error=error)
        for name, cost in flat.algorithms.items()
    }
    return flat.model_copy(
        update={
            "hosts": tuple(host.model_copy(update={"up_gbps": gbps, "down_gbps": gbps}) for host in flat.hosts),
            "local_gbps": found.inside_gb_s * 8,
            "algorithms": costs,
            "nccl": NcclModel(
                architecture=architecture, inside_gb_s=found.inside_gb_s, cards_gb_s=speed or CARD_SPEEDS[1]
            ),
            "source": source,
        }
    )  # fmt: skip


def _inside(fabric: Fabric, inside_gb_s: float) -> Fabric:
    return replace(fabric, inside_gb_s=inside_gb_s, passing_gb_s=inside_gb_s)


def timings_of(trace: Trace, cluster: Cluster) -> list[Timing]:
    """How long each collective of all ranks took once all had come, of those that say how much they carry."""
    instances: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for events in trace.events.values():
        for row in events.of_kind(EventKind.COLLECTIVE):
            if row.name in KINDS and row.size_bytes > 0 and row.sequence >= 0:
                instances[row.name, row.group, row.sequence].append(row)
    device = trace.manifest.ranks[0].device
    found = []
    for (name, group, _), rows in instances.items():
        if len(rows) == len(trace.events) == trace.world_size == len(trace.members(group)):
            took_ns = max(row.end_ns for row in rows) - max(row.start_ns for row in rows)
            if took_ns > 0:
                size_bytes = max(row.size_bytes for row in rows)
                found.append(
                    Timing(
                        cast("Kind", name),
                        size_bytes,
                        took_ns / 1e3,
                        trace.world_size,
                        len(cluster.hosts),
                        device,
                    )
                )
    return found
