"""One strategy over one workload on one cluster, played: the same graph and engine as for a recorded job."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headway.cluster import Cluster
from headway.graph.timeline import Part
from headway.prediction.pipelines import PredictedPipeline, play_pipeline
from headway.prediction.workload import Workload
from headway.replayer.memory import peak_bytes
from headway.replayer.simulate import simulate
from headway.replayer.size import times_in_range
from headway.replayer.uncertainty import unfitted
from headway.strategies.base import Strategy
from headway.strategies.horizon import Outcome
from headway.strategies.registry import plugin_of


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted step of a model under ``strategy`` with ``workers``.

    ``uncertainty_ms`` is by how much the step may be off because of errors in the times of layers and the costs of
    collectives. ``efficiency`` is the share of the throughput that as many workers would have without communication.
    ``exposed_ms`` is the communication that computation does not hide. ``notes`` say how a model was cut into stages,
    and what the prediction leaves out.
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
    notes: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return asdict(self)


def predict(workload: Workload, cluster: Cluster, name: str, strategy: Strategy) -> Prediction:
    """Play ``workload`` on ``cluster``, whose workers are all alike, until its steps are the same, and take the last.

    Raises UserError if the graph would be too large or times are out of range, and where it cannot be the pipelines
    that ``strategy`` says.
    """
    with times_in_range():
        outcome = plugin_of(strategy).over_a_horizon(workload.job(cluster), strategy)
    if outcome is not None:
        return _of_horizon(workload, cluster, name, strategy, outcome)
    notes: tuple[str, ...] = ()
    tied_bytes = 0
    if isinstance(strategy, PredictedPipeline):
        pipeline = play_pipeline(workload, cluster, strategy)
        played, notes, tied_bytes = pipeline.simulation, pipeline.notes, pipeline.tied_bytes
    else:
        played = simulate(workload.job(cluster), strategy)
    (step_ns,) = played.step_times_ns.tolist()
    parts_ns: dict[str, float] = defaultdict(float)
    for span in played.graph.spans:
        if (
            span.step == played.first_step
        ):  # of folded ranks, and of all but a pipeline's, one is as the others
            parts_ns[span.part] += played.duration_ns(span) / played.graph.ranks
    exposed_ns = step_ns - sum(parts_ns.values())
    tied_ns = 2 * 8 * tied_bytes / min(min(host.up_gbps, host.down_gbps) for host in cluster.hosts)
    held_bytes = played.peak_bytes
    assert held_bytes is not None
    return Prediction(
        workers=cluster.world_size,
        strategy=name,
        step_ms=step_ns / 1e6,
        uncertainty_ms=math.hypot(
            workload.times_error * workload.computation_ns / 1e6,
            unfitted(played.graph) * exposed_ns / 1e6,
            tied_ns / 1e6,
        ),
        samples_per_s=workload.samples * cluster.world_size / step_ns * 1e9,
        efficiency=workload.computation_ns / step_ns,
        exposed_ms=exposed_ns / 1e6,
        breakdown_ms={
            "computation": sum(ns for part, ns in parts_ns.items() if part != Part.OPTIMIZER) / 1e6,
            "exposed_communication": exposed_ns / 1e6,
            "optimizer": parts_ns[Part.OPTIMIZER] / 1e6,
        },
        peak_bytes=held_bytes,
        operations=played.operations,
        notes=notes,
    )


def _of_horizon(
    workload: Workload, cluster: Cluster, name: str, strategy: Strategy, outcome: Outcome
) -> Prediction:
    """The mean iteration of a rank where ranks do not finish steps together."""
    job = workload.job(cluster)
    step_ms, standing_ms = outcome.step_ms, outcome.standing_ms
    return Prediction(
        workers=cluster.world_size,
        strategy=name,
        step_ms=step_ms,
        uncertainty_ms=math.hypot(
            workload.times_error * workload.computation_ns / 1e6, outcome.cost_error * standing_ms
        ),
        samples_per_s=workload.samples * outcome.total_per_s,
        efficiency=workload.computation_ns / 1e6 / step_ms,
        exposed_ms=standing_ms,
        breakdown_ms={
            "computation": (workload.computation_ns - workload.optimizer_ns) / 1e6,
            "exposed_communication": standing_ms,
            "optimizer": workload.optimizer_ns / 1e6,
        },
        peak_bytes=peak_bytes(job, strategy, strategy.decide(job)),
        operations=outcome.operations,
        notes=(outcome.describe(),),
    )
