"""Predicts one strategy for a workload on a cluster, with the same simulation as for recorded jobs."""

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

UNLIKE = 0.03  # by which share of computation the slowest real worker exceeds the mean


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted step of a model under ``strategy`` with ``workers``.

    ``uncertainty_ms`` covers errors in layer times, which move all predictions for a model alike, and in the costs of
    collectives (alone: ``links_ms``). ``efficiency`` is the throughput relative to workers without communication,
    at most 1. ``exposed_ms`` is the communication that computation does not hide. ``notes`` say how the model was split,
    and what the prediction leaves out. ``ignored`` lists options of the strategy that the cluster's library
    ignores or refuses. ``changes_training`` says how the strategy changes training, and ``permissions`` which permissions
    it needs. ``is_mean_iteration`` marks asynchronous strategies. ``pipelines`` has the placement of stages, and
    ``samples`` is the batch of one worker.
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
        """Whether ``allow`` permits the strategy."""
        return permitted(self.permissions, allow)

    def to_document(self) -> dict[str, Any]:
        """The output of ``--json``."""
        return {**asdict(self), "permission": ", ".join(self.permissions)}


def predict(
    workload: Workload,
    cluster: Cluster,
    name: str,
    strategy: Strategy,
    what_if: WhatIf = WhatIf(),  # noqa: B008
) -> Prediction:
    """Simulate ``workload`` on ``cluster`` under ``what_if`` until steps repeat, and return the last step.

    Workers are identical except for ``what_if``; with random slow steps, returns the mean over several. Raises UserError
    if the graph is too large, times are out of range, or the workload cannot form the pipelines of ``strategy``.
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
            # Average over ranks; folded ranks are represented by one.
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
    """The uncertainty of a step: errors of layer times, links, and differences between workers.

    If collectives were not measured on the cluster, rates and latencies come from data sheets and are less certain.
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
        raise UserError("predictions do not support --what-if workers", fix="Use --workers.")
    job = what_if.rewrite(workload.job(cluster))
    if not job.incidents.slow_share:
        return job
    computation = job.steps
    repeated = {rank: timeline * CHANCE_STEPS for rank, timeline in computation.timelines.items()}
    return replace(job, computation=replace(computation, timelines=repeated))


def _of_horizon(workload: Workload, job: Job, name: str, strategy: Strategy, outcome: Outcome) -> Prediction:
    """The prediction for an asynchronous strategy: the mean iteration of a rank."""
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
