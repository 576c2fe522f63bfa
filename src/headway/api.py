"""The loop in code: what ``headway diagnose``, ``replay``, ``predict`` and ``optimize`` do, as functions of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway import files
from headway.cluster import Cluster
from headway.diagnosis import Diagnosis
from headway.diagnosis import diagnose as diagnose_trace
from headway.errors import UserError
from headway.optimization.search import Candidate, plan_of, search
from headway.plan import Plan
from headway.prediction.clusters import cluster_named
from headway.prediction.models import workload_named
from headway.prediction.replayed import Prediction
from headway.prediction.scaling import scaling
from headway.prediction.strategies import strategies_named
from headway.replayer.as_trace import replayed_trace
from headway.replayer.replayer import Replayer
from headway.replayer.what_if import WhatIf
from headway.strategies import registry
from headway.strategies.base import Strategy
from headway.trace.folder import load_trace
from headway.trace.format import Trace

__all__ = ["Optimized", "Replayed", "diagnose", "optimize", "predict", "replay", "strategy"]


@dataclass(frozen=True)
class Replayed:
    """What a replay says of a job, in ms a step.

    ``step_ms`` is what is expected of the live job, give or take ``uncertainty_ms`` (nine in ten); the recorded one
    took ``recorded_ms``, of which replay makes ``reproduced_ms``. ``waiting_ms`` of it ranks do not compute in.
    ``peak_bytes`` is the most memory that one rank holds, None where the trace names no parameters. ``notes`` say what
    makes the answer worth less. ``trace`` is the replay in the form of a recording, to be diagnosed like one.
    """

    step_ms: float
    uncertainty_ms: float
    recorded_ms: float
    reproduced_ms: float
    waiting_ms: float
    peak_bytes: int | None
    notes: tuple[str, ...]
    trace: Trace = field(repr=False)

    @property
    def speedup(self) -> float:
        """How many times as fast as the recorded job it is expected to be."""
        return self.recorded_ms / self.step_ms


@dataclass(frozen=True)
class Optimized:
    """The best plan that was found, and all that were tried, best first.

    No plan can have a step of less than ``bound_ms``. ``note`` says what was left out and why.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    bound_ms: float
    note: str


def diagnose(trace: Trace | str | Path, cluster: Cluster | None = None) -> Diagnosis:
    """Say where the steps of ``trace`` went, and what is to blame.

    Its ``verdict`` is one sentence, its ``findings`` have a cost each, and its breakdown adds up to the step. It says
    what happened; what another plan or cluster would give, say ``replay`` and ``optimize``. ``cluster`` is what links
    could do, where that was measured apart from the job.

    Raises TraceError for a trace that cannot be read or whose ranks share no step, ClusterError for another cluster's.
    """
    return diagnose_trace(_loaded(trace), cluster)


def replay(
    trace: Trace | str | Path,
    plan: Plan | Strategy | None = None,
    *,
    what_if: Iterable[str] = (),
    cluster: Cluster | None = None,
) -> Replayed:
    """Simulate the recorded steps again: as they were, under a ``plan``, and as they would be ``what_if``.

    ``what_if`` are changes as on the command line: "bandwidth=2x", "workers=16", "compute:3=2x" (see docs/replay.md).
    Links are those that the job measured of itself, or fitted from the trace, unless ``cluster`` is given. The further
    an answer is from the recording (another strategy, cores that are shared by more), the larger its uncertainty.

    Raises TraceError for a trace that cannot be replayed, PlanError for a plan of another model, UnsupportedError for a
    strategy that the recorded job does not permit, UserError for a what-if without meaning.
    """
    loaded = _loaded(trace)
    if isinstance(plan, Plan):
        plan.check(loaded.model, loaded.world_size)
    replayer = Replayer(loaded, cluster)
    asked, passes = (plan.strategy, plan.passes) if isinstance(plan, Plan) else (plan, ())
    played = replayer.replay(asked, WhatIf.parse(what_if), passes=passes)
    expected = replayer.expect(played)
    return Replayed(
        step_ms=expected.step_ms,
        uncertainty_ms=expected.uncertainty_ms,
        recorded_ms=replayer.recorded_step_ms,
        reproduced_ms=replayer.base.step_ms,
        waiting_ms=played.waiting_ms,
        peak_bytes=played.peak_bytes,
        notes=replayer.notes,
        trace=replayed_trace(replayer, played),
    )


def optimize(
    trace: Trace | str | Path, *, strategy: str | None = None, cluster: Cluster | None = None
) -> Optimized:
    """Search for the plan under which the recorded job's step is shortest: every candidate is replayed.

    The recorded plan is among the candidates, so the answer may be to leave the job as it is. Plans that change what
    is trained are not proposed. ``strategy`` asks for the best plan of one strategy by name. Takes seconds to minutes.

    Raises TraceError for a trace that no plan can be laid over, UserError where there is no plan of ``strategy``.
    """
    replayer = Replayer(_loaded(trace), cluster)
    found = search(replayer)
    plan = plan_of(found.best(strategy), replayer)
    return Optimized(plan, found.candidates, found.bound_ms, found.note)


def predict(
    model: str,
    cluster: Cluster | str,
    *,
    strategies: Sequence[Strategy] = (),
    workers: Sequence[int] = (),
    device: str | None = None,
    optimizer: str = "momentum",
) -> list[Prediction]:
    """Predict the step of a model on a cluster, neither of which need be there: every strategy at every world size.

    ``model`` is one that ships ("resnet50"), a YAML file of layers or "package.module:function"; ``cluster`` a value or
    the name of one that ships; ``workers`` the cluster's own number where none is given; ``device`` what computes, by
    name, or "here" to time this machine. Computation is modelled or timed alone, so that answers are rougher than those
    of ``replay``: their ``uncertainty_ms`` is not calibrated.

    Raises UserError for what there is not, PlanError where a strategy does not fit the model.
    """
    known = cluster_named(cluster) if isinstance(cluster, str) else cluster
    workload = workload_named(model, device, optimizer)
    chosen = strategies or strategies_named((), workload).values()
    named = {each.describe(): each for each in chosen}
    return scaling(workload, known, named, workers or (known.world_size,))


def strategy(name: str, **options: Any) -> Strategy:
    """The decision of the strategy ``name`` under ``options``, as a plan file holds them.

    "ddp" overlaps one all-reduce a bucket with backward. "decoupled" hides half of the communication under the next
    forward, which pays where communication is longer than backward, and costs some work on each rank's cores.
    "parameter_server" moves as many bytes in fewer, larger bursts. Others may be installed.

    Raises UserError for a name or an option that there is not.
    """
    if name not in registry.names():
        raise UserError("there is no such strategy", got=repr(name), expected=" or ".join(registry.names()))
    return files.validate(options, registry.policy_named(name), UserError, f"strategy {name}")


def _loaded(trace: Trace | str | Path) -> Trace:
    return trace if isinstance(trace, Trace) else load_trace(trace)
