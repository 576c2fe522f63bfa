"""One strategy over one workload on one cluster, played: the same graph and engine as for a recorded job."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.cluster import Cluster
from headway.errors import UserError
from headway.graph.computation import Part
from headway.job import Job
from headway.permission import permitted
from headway.prediction.pipelines import CHANCE_STEPS, PlacedPipelines, PredictedPipeline, play_pipeline
from headway.prediction.workload import Workload
from headway.simulator.expectation import UNMEASURED, unfitted
from headway.simulator.memory import peak_bytes
from headway.simulator.simulate import check_lives_through, simulate, times_in_range
from headway.simulator.what_if import WhatIf
from headway.strategies.base import Strategy
from headway.strategies.horizon import Outcome
from headway.strategies.registry import carried_out_by, plugin_of

UNLIKE = 0.03  # of computation: by how much the slowest of real workers takes longer than the mean


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted step of a model under ``strategy`` with ``workers``.

    ``uncertainty_ms`` is by how much the step may be off because of errors in the times of layers and the costs of
    collectives. The former move all predictions of a model alike; ``links_ms`` is the latter alone. ``efficiency`` is
    the share of the throughput that as many workers would have if each computed its whole step by itself; it is at
    most 1, though a strategy that hides updates may be faster than that. ``exposed_ms`` is the communication that
    computation does not hide. ``notes`` say how a model was cut into stages, and what the prediction leaves out.
    ``ignored`` says what of the strategy the cluster's library ignores or refuses. ``changes_training`` says what the
    strategy changes of what is trained, and ``permissions`` are those that it needs. ``is_mean_iteration`` says that
    ranks do not finish their steps together. ``pipelines`` say where stages are, and ``samples`` is a
    worker's batch.
    """

    workers: int
    strategy: str
    step_ms: float
    uncertainty_ms: float
    links_ms: float
    samples_per_s: float
    efficiency: float
    exposed_ms: float
    breakdown_ms: Mapping[str, float]
    peak_bytes: int
    operations: int
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    changes_training: str = ""
    permissions: tuple[str, ...] = ()
    is_mean_iteration: bool = False
    pipelines: PlacedPipelines | None = None
    samples: int = 0

    def recommended(self, allow: Collection[str]) -> bool:
        """Whether its strategy may be chosen with what the user has permitted."""
        return permitted(self.permissions, allow)

    def to_document(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {**asdict(self), "permission": ", ".join(self.permissions)}


def predict(
    workload: Workload,
    cluster: Cluster,
    name: str,
    strategy: Strategy,
    what_if: WhatIf = WhatIf(),  # noqa: B008
) -> Prediction:
    """Play ``workload`` on ``cluster`` under ``what_if``, until its steps are the same, and take the last.

    Workers are all alike but for ``what_if``; where steps are slow by chance it is the mean of several. Raises
    UserError if the graph would be too large or times are out of range, where it cannot be the pipelines that
    ``strategy`` says.
    """
    job = _job(workload, cluster, strategy, what_if)
    cluster = job.on
    with times_in_range():
        check_lives_through(job, strategy)
        outcome = plugin_of(strategy).over_a_horizon(job, strategy)
    if outcome is not None:
        return _of_horizon(workload, job, name, strategy, outcome)
    notes: tuple[str, ...] = ()
    tied_bytes, placed, tensor_ns = 0, None, 0
    if isinstance(strategy, PredictedPipeline):
        pipeline = play_pipeline(workload, cluster, strategy, what_if)
        tensor_ns = pipeline.tensor_ns
        played, notes, tied_bytes = pipeline.simulation, pipeline.notes, pipeline.tied_bytes
        placed = pipeline.placed
    else:
        played = simulate(job, strategy)
    step_ns = played.step_ms * 1e6
    steps = len(played.step_times_ns)
    parts_ns: dict[str, float] = defaultdict(float)
    for span in played.graph.spans:
        if played.first_step <= span.step < played.first_step + steps:
            # Of folded ranks, and of all but a pipeline's, one is as the others.
            parts_ns[span.part] += played.duration_ns(span) / played.graph.ranks / steps
    exposed_ns = step_ns - sum(parts_ns.values()) + tensor_ns
    tied_ns = 2 * 8 * tied_bytes / min(min(host.up_gbps, host.down_gbps) for host in cluster.hosts)
    links_ms = math.hypot(unfitted(played.graph) * exposed_ns, tied_ns) / 1e6
    held_bytes = played.peak_bytes
    assert held_bytes is not None
    return Prediction(
        workers=cluster.world_size,
        strategy=name,
        step_ms=step_ns / 1e6,
        uncertainty_ms=_uncertainty_ms(workload, cluster, links_ms, exposed_ns / 1e6),
        links_ms=links_ms,
        samples_per_s=workload.samples * cluster.world_size / step_ns * 1e9,
        efficiency=min(1.0, workload.computation_ns / step_ns),
        exposed_ms=exposed_ns / 1e6,
        breakdown_ms={
            "computation": (sum(ns for part, ns in parts_ns.items() if part != Part.OPTIMIZER) - tensor_ns)
            / 1e6,
            "exposed_communication": exposed_ns / 1e6,
            "optimizer": parts_ns[Part.OPTIMIZER] / 1e6,
        },
        peak_bytes=held_bytes,
        operations=played.operations,
        notes=notes,
        ignored=carried_out_by(strategy, cluster.library)[1],
        changes_training=strategy.changes_training,
        permissions=tuple(sorted(strategy.permissions)),
        pipelines=placed,
        samples=workload.samples,
    )


def _uncertainty_ms(workload: Workload, cluster: Cluster, links_ms: float, exposed_ms: float) -> float:
    """By how much a step may be off: by the times of layers, by links, and by workers that are not alike.

    Where nobody measured what collectives cost on the cluster, rates and latencies are those of data sheets.
    """
    computation_ms = workload.computation_ns / 1e6
    several = cluster.world_size > 1
    measured = any(cost.fit_error > 0 for cost in cluster.algorithms.values())
    return math.hypot(
        workload.times_error * computation_ms,
        links_ms,
        0.0 if measured else UNMEASURED * exposed_ms,
        UNLIKE * computation_ms if several else 0.0,
    )


def _job(workload: Workload, cluster: Cluster, strategy: Strategy, what_if: WhatIf) -> Job:
    if what_if == WhatIf():
        return workload.job(cluster)
    if what_if.workers is not None:
        raise UserError("--what-if workers is not for predictions", fix="Use --workers.")
    job = what_if.rewrite(workload.job(cluster))
    if not job.incidents.slow_share:
        return job
    computation = job.steps
    repeated = {rank: timeline * CHANCE_STEPS for rank, timeline in computation.timelines.items()}
    return replace(job, computation=replace(computation, timelines=repeated))


def _of_horizon(workload: Workload, job: Job, name: str, strategy: Strategy, outcome: Outcome) -> Prediction:
    """The mean iteration of a rank where ranks do not finish steps together."""
    step_ms, standing_ms = outcome.step_ms, outcome.standing_ms
    links_ms = outcome.cost_error * standing_ms
    return Prediction(
        workers=job.world_size,
        strategy=name,
        step_ms=step_ms,
        uncertainty_ms=_uncertainty_ms(workload, job.on, links_ms, standing_ms),
        links_ms=links_ms,
        samples_per_s=workload.samples * outcome.total_per_s,
        efficiency=min(1.0, workload.computation_ns / 1e6 / step_ms),
        exposed_ms=standing_ms,
        breakdown_ms={
            "computation": (workload.computation_ns - workload.optimizer_ns) / 1e6,
            "exposed_communication": standing_ms,
            "optimizer": workload.optimizer_ns / 1e6,
        },
        peak_bytes=peak_bytes(job, strategy, strategy.decide(job)),
        operations=outcome.operations,
        notes=(outcome.describe(),),
        ignored=carried_out_by(strategy, job.on.library)[1],
        changes_training=strategy.changes_training,
        permissions=tuple(sorted(strategy.permissions)),
        is_mean_iteration=True,
        samples=workload.samples,
    )
