"""One strategy over one workload on one cluster, played: the same graph and engine as for a recorded job."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headway.cluster import Cluster
from headway.graph.build import GraphBuilder, walk_timelines
from headway.graph.timeline import Part
from headway.prediction.workload import Workload
from headway.replayer.disturbance import play_disturbed
from headway.replayer.folding import period_of
from headway.replayer.memory import peak_bytes
from headway.replayer.size import check_size, times_in_range
from headway.replayer.uncertainty import unfitted
from headway.simulation.operations import Dataflow
from headway.strategies.base import Strategy
from headway.strategies.loading import driver

STEPS = 4  # the first two get the strategy under way


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step of ``workload`` under ``strategy``: its time, and how it compares with workers that need no other.

    ``uncertainty_ms`` is by how much the step may be off because the times of layers and the costs of collectives are.
    ``efficiency`` is the share of the throughput that as many workers would have without any communication.
    """

    workers: int
    strategy: str
    step_ms: float
    uncertainty_ms: float
    samples_per_s: float
    efficiency: float
    exposed_ms: float
    breakdown_ms: Mapping[str, float]
    peak_bytes: int
    operations: int

    def to_document(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return asdict(self)


def predict(workload: Workload, cluster: Cluster, name: str, strategy: Strategy) -> Prediction:
    """Play ``STEPS`` steps on ``cluster``, whose workers are all alike, and take the last.

    Raises UserError where the graph would be too large or times are out of range.
    """
    graph, dataflow = lay_out(workload, cluster, strategy)
    with times_in_range():
        played = play_disturbed(graph, dataflow, cluster.compute_slowdown)
    parts_ns: dict[str, int] = defaultdict(int)
    for stretch in graph.stretches:
        if stretch.rank == 0 and stretch.step == STEPS - 1:
            parts_ns[stretch.part] += int(
                played.end_ns[stretch.operation] - played.start_ns[stretch.operation]
            )
    last, before = (played.end_ns[graph.boundaries[step]] for step in (STEPS - 1, STEPS - 2))
    step_ns = float(np.mean(last - before))
    exposed_ns = step_ns - sum(parts_ns.values())
    return Prediction(
        workers=cluster.world_size,
        strategy=name,
        step_ms=step_ns / 1e6,
        uncertainty_ms=math.hypot(
            workload.times_error * workload.computation_ns / 1e6, unfitted(graph) * exposed_ns / 1e6
        ),
        samples_per_s=workload.samples * cluster.world_size / step_ns * 1e9,
        efficiency=workload.computation_ns / step_ns,
        exposed_ms=exposed_ns / 1e6,
        breakdown_ms={
            "computation": sum(ns for part, ns in parts_ns.items() if part != Part.OPTIMIZER) / 1e6,
            "exposed_communication": exposed_ns / 1e6,
            "optimizer": parts_ns[Part.OPTIMIZER] / 1e6,
        },
        peak_bytes=peak_bytes(workload.spec, strategy, graph.schedule, cluster.world_size),
        operations=len(dataflow),
    )


def lay_out(workload: Workload, cluster: Cluster, strategy: Strategy) -> tuple[GraphBuilder, Dataflow]:
    """The graph of ``STEPS`` steps. Hosts that are alike are in it once. Raises as ``predict`` does."""
    schedule = strategy.decide(workload.spec)
    period = period_of(cluster, 1)
    ranks = [[workload.timeline(rank, step) for step in range(STEPS)] for rank in range(period)]
    with times_in_range():
        check_size(ranks, cluster, schedule)
        graph = GraphBuilder(cluster, workload.spec, schedule, period if period < cluster.world_size else 0)
        walk_timelines(graph, driver(strategy, "dataflow").Dataflow(graph), ranks)
        return graph, graph.close()
