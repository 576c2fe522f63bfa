"""The plan of a candidate, as it is written to a file."""

from __future__ import annotations

import os

from headway.optimization.candidate import Candidate
from headway.plan import Plan, Prediction
from headway.replayer.replayer import Replayer
from headway.strategies.base import PIPELINE
from headway.strategies.pipeline.mesh import MeshStrategy


def plan_of(candidate: Candidate, replayer: Replayer) -> Plan:
    """The plan file's value for a candidate. It remembers where the trace is, which settings of other tools need."""
    plan = _plan_of(candidate, replayer)
    if not candidate.changed and plan.prediction is not None:
        prediction = plan.prediction.model_copy(update={"recorded": plan.digest})
        plan = plan.model_copy(update={"prediction": prediction})
    of_this_job = candidate.recut is None and plan.world_size == replayer.trace.world_size
    return plan.model_copy(update={"trace": os.path.abspath(replayer.trace.path)}) if of_this_job else plan


def _plan_of(candidate: Candidate, replayer: Replayer) -> Plan:
    trace, strategy = replayer.trace, candidate.strategy
    prediction = Prediction(
        step_ms=candidate.predicted_ms,
        baseline_ms=candidate.expected.recorded_ms,
        uncertainty_ms=candidate.uncertainty_ms,
        peak_bytes=candidate.peak_bytes,
    )
    job = candidate.recut or replayer.job
    stages = trace.stages if candidate.recut is None else job.stages
    if isinstance(strategy, MeshStrategy):
        return Plan.on_mesh(strategy, job.mesh, stages, prediction=prediction, cluster=job.on)
    if strategy.dimension == PIPELINE:
        return Plan.pipeline(strategy, stages, ranks=trace.world_size, prediction=prediction, cluster=job.on)
    plan = Plan.data_parallel(
        strategy, trace.world_size, trace.model, prediction=prediction, cluster=replayer.cluster
    )
    return Plan(
        **{**dict(plan), "passes": candidate.passes, "changes_training": candidate.changes_training or None}
    )
