"""The Python API: ``headway diagnose``, ``replay``, ``predict`` and ``optimize`` as functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway import files
from headway.cluster import Cluster
from headway.diagnosis import Diagnosis
from headway.diagnosis import diagnose as diagnose_trace
from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.optimization.result import check_strategy, following, plan_of
from headway.optimization.search import search
from headway.optimization.sizes import others_of
from headway.plan import Plan
from headway.prediction.clusters import cluster_named
from headway.prediction.models import batch_of, workloads_named
from headway.prediction.replayed import Prediction
from headway.prediction.scaling import scaling
from headway.prediction.strategies import strategies_named
from headway.replayer.as_trace import replayed_trace
from headway.replayer.fidelity import is_reproduced
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.strategies import registry
from headway.strategies.base import Strategy
from headway.trace.folder import load_trace
from headway.trace.format import Trace

__all__ = ["Optimized", "Replayed", "diagnose", "optimize", "predict", "replay", "strategy"]


@dataclass(frozen=True)
class Replayed:
    """The result of a replay, in ms a step.

    ``step_ms`` is the expected step of the live job, within ``uncertainty_ms`` in nine of ten cases. The recorded job
    took ``recorded_ms``, which replay reproduces as ``reproduced_ms``. ``waiting_ms`` is the part of the replayed step
    in which ranks do not compute. ``peak_bytes`` is the peak memory of one rank, None if the trace names no parameters.
    ``notes`` say what makes the answer less reliable. ``trace`` is the replay as a trace, which can be diagnosed.
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
        """How many times as fast as the recorded job the live job is expected to be."""
        return self.recorded_ms / self.step_ms

    @property
    def is_reproduced(self) -> bool:
        """Whether replay reproduces the recorded step within 10 %; if not, do not rely on its answers."""
        return is_reproduced(self.reproduced_ms / self.recorded_ms - 1)


@dataclass(frozen=True)
class Optimized:
    """The plan to use, and all candidates that were replayed, best first.

    The recorded command can run each of ``candidates`` as it is; ``for_other_scripts`` need a script that calls
    ``headway.parallelize``. ``keeps_recorded``: ``plan`` is the recorded one, because no other is faster by more than
    its ±, or because ``can_rank_plans`` is False: replay does not reproduce the recorded step within 10 %. ``bound_ms``
    is a lower bound on the step of every candidate. ``note`` says what was left out and why.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    bound_ms: float
    note: str
    for_other_scripts: tuple[Candidate, ...] = ()
    keeps_recorded: bool = False
    can_rank_plans: bool = True


def diagnose(trace: Trace | str | Path, cluster: Cluster | None = None) -> Diagnosis:
    """Explain where the time of the steps in ``trace`` went, and what is to blame.

    The diagnosis has a one-sentence ``verdict``, ``findings`` with the cost of each, and a ``breakdown`` that adds up
    to the step. It explains what happened; ``replay`` and ``optimize`` predict other plans and clusters. ``cluster``
    has the rates of the links, if they were measured separately from the job.

    Raises TraceError for a trace that cannot be read or in which ranks share no step, and ClusterError for a cluster
    that does not fit the trace.
    """
    return diagnose_trace(_loaded(trace), cluster)


def replay(
    trace: Trace | str | Path,
    plan: Plan | Strategy | None = None,
    *,
    what_if: Iterable[str] = (),
    cluster: Cluster | None = None,
) -> Replayed:
    """Simulate the recorded steps: as they were, or under a ``plan`` and with changes (``what_if``).

    ``what_if`` are changes as on the command line: "bandwidth=2x", "workers=16", "compute:3=2x" (see docs/replay.md).
    Without ``cluster``, links are those measured by the job, or fitted from the trace. The more the answer differs from
    the recording (another strategy, cores shared by more ranks), the larger its uncertainty.

    Raises TraceError for a trace that cannot be replayed, PlanError for a plan for another model, UnsupportedError for
    a strategy that the recorded job does not permit, UserError for a what-if that cannot be read.
    """
    loaded = _loaded(trace)
    replayer = Replayer(loaded, cluster)
    if isinstance(plan, Plan):
        replayer.check(plan)
    chosen, passes, mesh = (
        (plan.strategy, plan.passes, plan.mesh) if isinstance(plan, Plan) else (plan, (), None)
    )
    played = replayer.replay(chosen, WhatIf.parse(what_if), passes=passes, mesh=mesh)
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
    trace: Trace | str | Path,
    *,
    others: Sequence[Trace | str | Path] = (),
    strategy: str | None = None,
    cluster: Cluster | None = None,
    memory_limit_bytes: int | None = None,
    follow_network: bool = False,
    allow: Collection[str] = (),
    budget_s: float | None = None,
) -> Optimized:
    """Search for the fastest plan for the recorded job by replaying every candidate.

    The result is the recorded plan, unless another that the recorded command can run is faster by more than ±. Plans
    that change what is trained are proposed only if ``allow`` permits them: "asynchronous", "local-steps",
    "precision", "randomness" or a permission that an installed package declares; ``plan.changes_training`` says what.
    ``others`` are recordings of the same pipeline with other numbers of micro-batches: these numbers, and those between
    them, are tried too. With ``strategy``, the best plan of that strategy is returned; "stages" is the best
    pipeline split that is not in the script, for ``headway.parallelize``. With ``memory_limit_bytes``, plans that need
    more memory per rank are left out. With ``follow_network``, the plan adapts to the network during training (only
    for pipelines). Takes seconds to minutes; with ``budget_s``, the best plan found in that time is returned.

    Raises TraceError for a trace that no plan can be applied to, UserError if no plan of ``strategy`` was found, none
    within the limit, or none that can follow a network, and for ``others`` of another job.
    """
    check_strategy(strategy)
    replayer = Replayer(_loaded(trace), cluster)
    more = others_of(replayer, [_loaded(recording) for recording in others])
    result = search(
        replayer, memory_limit_bytes=memory_limit_bytes, other_recordings=more, allow=allow, budget_s=budget_s
    )
    best = following(result, strategy) if follow_network else result.best(strategy)
    return Optimized(
        plan_of(best, replayer),
        result.candidates,
        result.bound_ms,
        result.note,
        result.for_other_scripts,
        keeps_recorded=not best.changed,
        can_rank_plans=result.can_rank,
    )


def predict(
    model: str,
    cluster: Cluster | str,
    *,
    strategies: Sequence[Strategy] = (),
    workers: Sequence[int] = (),
    device: str | None = None,
    optimizer: str = "momentum",
    precision: str | None = None,
    batch: int | None = None,
    global_batch: int | None = None,
) -> list[Prediction]:
    """Predict the step of a model on a cluster, for each strategy and world size; neither needs to exist.

    ``model`` is one that ships ("resnet50"), a YAML file of layers or "package.module:function". ``cluster`` is a
    value, a file, or the name of one that ships. ``workers`` are the world sizes, by default the cluster's. ``device``
    is the name of the compute device, or "here" to time this machine; ``precision`` is fp32, tf32, bf16 or fp16.
    ``batch`` is the samples per worker, ``global_batch`` those of all workers. Computation is modelled, or timed
    without communication, so answers are rougher than those of ``replay``: ``uncertainty_ms`` is not calibrated.

    Raises UserError for an unknown model, device, precision or optimizer, and a batch that the workers cannot divide;
    ClusterError for an unknown cluster, PlanError if a strategy does not fit the model.
    """
    resolved = cluster_named(cluster) if isinstance(cluster, str) else cluster
    batches = {count: batch_of(count, batch, global_batch) for count in workers or (resolved.world_size,)}
    workloads = workloads_named(model, device, optimizer, batches.values(), precision)
    sized = {count: workloads[samples] for count, samples in batches.items()}
    workload = next(iter(sized.values()))
    chosen = strategies or strategies_named((), workload).values()
    named = {candidate.describe(): candidate for candidate in chosen}
    return scaling(workload, resolved, named, tuple(sized), all_needed=bool(strategies), sized=sized)


def strategy(name: str, **options: Any) -> Strategy:
    """Make the strategy ``name`` with ``options``, as in plan files.

    "ddp" overlaps one all-reduce per bucket with backward. "decoupled" hides half of the communication under the next
    forward, which pays off if communication is longer than backward, and costs some work on each rank's cores.
    "parameter_server" moves as many bytes in fewer, larger bursts. "mesh" combines two strategies for replicated
    pipelines: ``pipeline=`` orders micro-batches, ``data=`` averages gradients. Other packages may add strategies.

    Raises UserError for an unknown name or option.
    """
    registry.check_usable(name)
    if name not in (*registry.names(), *registry.COMPOSED):
        raise UserError("unknown strategy", got=repr(name), expected=" or ".join(registry.names()))
    today, options = registry.of_today(name, options)
    return files.validate(options, registry.policy_named(today), UserError, f"strategy {name}")


def _loaded(trace: Trace | str | Path) -> Trace:
    return trace if isinstance(trace, Trace) else load_trace(trace)
