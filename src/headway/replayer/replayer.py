"""Replay: the recorded steps again, on a given cluster, under a given strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import ValidationError

from headway import files
from headway.cluster import Cluster
from headway.errors import TraceError, UserError
from headway.graph.build import GraphBuilder
from headway.job import Job
from headway.network.fit import cluster_from_trace, host_costs, library_of
from headway.passes.base import Pass, rewritten
from headway.plan import Plan
from headway.plugins import asking
from headway.replayer.expectation import (
    Expectation,
    crowded,
    expected_ms,
    half_width_ms,
    share_of_replay,
)
from headway.replayer.fidelity import check_fidelity
from headway.replayer.gaps import gap_note
from headway.replayer.incomplete import (
    check_not_averaged,
    check_pipeline,
    check_same_steps,
    check_takes_plans,
    lacks,
    of_recorded_buckets,
)
from headway.replayer.recorded_job import recorded_job
from headway.replayer.recorded_mesh import recorded_on_mesh
from headway.replayer.recut import CUT_SHARE, SPLIT_SHARE, job_under, names_stages
from headway.replayer.simulate import Simulation, Simulator, check_lives_through
from headway.replayer.size import times_in_range
from headway.replayer.uncertainty import doubts, unfitted
from headway.replayer.what_if import WhatIf
from headway.scheduling.schedule import Schedule
from headway.simulation.building import OperationGraph
from headway.strategies import registry
from headway.strategies.base import Strategy, decided
from headway.strategies.horizon import Outcome
from headway.strategies.registry import plugin_of
from headway.trace.events import Kind
from headway.trace.format import Trace


class Replayer:
    """Replays one trace, as often as needed: what does not change is computed once.

    If ``cluster`` is None, it is what the job measured itself, or the links are fitted from the trace. A trace without
    parameters, or without some of its ranks, is replayed as far as possible; ``lacks`` says what is missing. Raises
    TraceError where the trace lacks the collectives that a replay needs, where its ranks took different numbers of
    steps, and on the first replay where the recorded communication is not that of the recorded strategy, or where a
    plan is to be laid over a trace without parameters.
    """

    def __init__(self, trace: Trace, cluster: Cluster | None = None) -> None:
        check_not_averaged(trace)
        check_pipeline(trace)
        check_same_steps(trace)
        self.trace = trace if trace.model.parameters else of_recorded_buckets(trace)
        self.lacks = lacks(trace, self.trace)
        self._recorded = trace
        self._simulator = Simulator()
        self._slower: WeakKeyDictionary[Job, Job] = WeakKeyDictionary()
        known = cluster or trace.cluster
        self.cluster = _fitted(self.trace) if known is None else _with_host_costs(known, trace)
        if self.cluster.world_size != trace.world_size:
            raise UserError(
                "the cluster is for another world size",
                got=f"{self.cluster.world_size} workers",
                expected=f"the trace's {trace.world_size}",
                fix="To change the number of workers, use --what-if workers=N.",
            )
        if min(self.recorded_step_times_ms) <= 0:
            raise TraceError(
                "a recorded step takes no time, so there is nothing to replay", fix="Record again."
            )
        self.job = recorded_job(self.trace, self.cluster, has_parameters=bool(trace.model.parameters))

    @cached_property
    def recorded_strategy(self) -> Strategy:
        """The strategy that was in force when the trace was recorded."""
        found = [
            files.validate(options, registry.policy_named(name), TraceError, f"the trace's strategy {name}")
            for name, options in self.trace.manifest.ranks[0].strategy.items()
            if name in registry.names()
        ]
        for name in self.trace.manifest.ranks[0].strategy:
            registry.check_usable(name)
        if self.job.mesh:
            return recorded_on_mesh(found)
        for strategy in found:
            return strategy
        raise TraceError("the trace does not say which strategy was in force", fix="Record it again.")

    @cached_property
    def recorded_step_times_ms(self) -> tuple[float, ...]:
        """For each recorded step, its mean length over ranks."""
        steps = [events.of_kind(Kind.STEP) for events in self.trace.events.values()]
        lengths = [each.duration_ns[np.isin(each.step, self.trace.steps)] / 1e6 for each in steps]
        return tuple(np.mean(lengths, axis=0).tolist())

    @property
    def recorded_step_ms(self) -> float:
        """The mean recorded step, over steps and ranks."""
        return float(np.mean(self.recorded_step_times_ms))

    @property
    def recorded_error_ms(self) -> float:
        """The standard error of that mean."""
        return _standard_error_ms(self.recorded_step_times_ms)

    @cached_property
    def base(self) -> Simulation:
        """The replay of the recorded job as it was."""
        return self.replay()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trace lacks, and what makes answers from it less reliable."""
        steps_ms = dict(zip(self.trace.steps, self.recorded_step_times_ms, strict=False))
        said = (*self.lacks, *doubts(steps_ms, unfitted(self.base.graph)))
        # Where communication goes on behind a backward, a look that takes long waits, and waits are recorded.
        if plugin_of(self.recorded_strategy).carries_over:
            return said
        return (*said, *gap_note(self.job.steps.timelines.values(), self.recorded_step_ms))

    def expect(self, result: Simulation) -> Expectation:
        """The expected step of the live job of which ``result`` is the replay, compared with the recorded one."""
        recorded_ms = self.recorded_step_ms
        same = result.strategy.family == self.recorded_strategy.family
        step_ms = self._expected_ms(result.step_ms, same_strategy=same)
        graph = result.graph
        full = crowded(
            graph.world_size, step_ms, self.trace.world_size, recorded_ms, graph.cluster.shared_cores
        )
        share = share_of_replay(same_strategy=same, busy=graph.cluster.compute_slowdown > 0, crowded=full)
        uncertainty_ms = self._half_width_ms(step_ms, share, links_ms=unfitted(graph) * result.waiting_ms)
        if result.job.stages != self.job.stages:
            share = CUT_SHARE if len(self.job.stages) == 1 else SPLIT_SHARE
            slower = self._slower.get(result.job)
            more_ms = (
                0.0 if slower is None else self.simulate(slower, result.strategy).step_ms - result.step_ms
            )
            uncertainty_ms = math.hypot(uncertainty_ms, share * step_ms, max(0.0, more_ms))
        return Expectation(recorded_ms, step_ms, uncertainty_ms)

    def expect_outcome(self, outcome: Outcome) -> Expectation:
        """The same of ranks that do not finish steps together: the mean iteration of a rank.

        Uncertainties are those of other strategies, and were not measured on such.
        """
        step_ms = self._expected_ms(outcome.step_ms, same_strategy=False)
        share = share_of_replay(same_strategy=False, busy=self.cluster.compute_slowdown > 0, crowded=False)
        uncertainty_ms = self._half_width_ms(step_ms, share, outcome.cost_error * outcome.standing_ms)
        return Expectation(self.recorded_step_ms, step_ms, uncertainty_ms)

    def _expected_ms(self, step_ms: float, *, same_strategy: bool) -> float:
        return expected_ms(
            step_ms,
            recorded_ms=self.recorded_step_ms,
            reproduced_ms=self.base.step_ms,
            same_strategy=same_strategy,
        )

    def _half_width_ms(self, step_ms: float, model_share: float, links_ms: float) -> float:
        return half_width_ms(
            step_ms,
            recorded_error_ms=self.recorded_error_ms,
            reproduction_error=abs(self.base.step_ms / self.recorded_step_ms - 1),
            model_share=model_share,
            links_ms=links_ms,
        )

    def job_under(self, strategy: Strategy, mesh: Mapping[str, int] | None = None) -> Job:
        """The recorded job with the stages of ``strategy``, along ``mesh``, if it names others than were recorded.

        Raises PlanError where the recording does not say what that would be.
        """
        job, slower = job_under(self.trace, self._faithful_job, self.recorded_strategy, strategy, mesh)
        if slower is not None:
            self.may_be_slower(job, slower)
        return job

    def may_be_slower(self, job: Job, slower: Job) -> None:
        """Take ``slower`` for what ``job`` may be at worst, in what is expected of it."""
        self._slower[job] = slower

    def check(self, plan: Plan) -> None:
        """Raise PlanError unless ``plan`` was made for what was recorded, or for stages that it can be cut into."""
        trace = self._recorded
        stages = trace.stages
        if plan.world_size == trace.world_size and names_stages(plan.strategy):
            check_takes_plans(trace)
            stages = self.job_under(plan.strategy, plan.mesh).stages
        plan.check_recorded(trace.model, stages, trace.world_size)

    def simulate(self, job: Job, strategy: Strategy) -> Simulation:
        """Play ``job``, which was made of the recorded one."""
        return self._simulator.simulate(job, strategy)

    def replay(
        self,
        strategy: Strategy | None = None,
        what_if: WhatIf = WhatIf(),  # noqa: B008
        *,
        passes: Sequence[Pass] = (),
        fold: bool = True,
        mesh: Mapping[str, int] | None = None,
    ) -> Simulation:
        """Replay every recorded step under ``strategy`` (by default the recorded one), ``what_if`` and ``passes``.

        Ranks that do the same at the same moment are simulated once, unless ``fold`` is False.

        The first step is simulated once before, so that what a strategy carries over from step to step is in flight.
        A pipeline with ``split_points`` is replayed with these stages, along ``mesh`` if that has several dimensions.
        Raises UnsupportedError for a strategy that the recorded job does not permit, PlanError for stages of which the
        recording does not say enough.
        """
        with times_in_range():
            played = self._strategy_run(strategy)
            job = self._faithful_job if strategy is None else self.job_under(strategy, mesh)
            changed = _changed(job, what_if, passes)
            if (slower := self._slower.get(job)) is not None:
                self.may_be_slower(changed, _changed(slower, what_if, passes))
            return self._simulator.simulate(changed, played, fold=fold)

    def replay_horizon(
        self,
        strategy: Strategy,
        what_if: WhatIf = WhatIf(),  # noqa: B008
        *,
        passes: Sequence[Pass] = (),
    ) -> Outcome | None:
        """What ranks do in a time under ``strategy`` where they do not finish steps together; None where they do.

        Raises as ``replay`` does.
        """
        with times_in_range():
            played = self._strategy_run(strategy)
            job = rewritten(what_if.rewrite(self._faithful_job), passes)
            check_lives_through(job, played)
            with asking("strategy", played):
                return plugin_of(played).over_a_horizon(job, played)

    def lay_out(
        self,
        strategy: Strategy | None = None,
        what_if: WhatIf = WhatIf(),  # noqa: B008
    ) -> tuple[GraphBuilder[Any], OperationGraph]:
        """The graph that ``replay`` would play, with all ranks."""
        with times_in_range():
            played = self._strategy_run(strategy)
            job = self._faithful_job if strategy is None else self.job_under(strategy)
            return self._simulator.lay_out(what_if.rewrite(job), played)

    @cached_property
    def _faithful_job(self) -> Job:
        """The job, of which a replay communicates what was recorded."""
        check_fidelity(self.trace, self.recorded_strategy, self.job)
        return self.job

    def _strategy_run(self, asked: Strategy | None) -> Strategy:
        if asked is not None:
            check_takes_plans(self._recorded)
        if asked is None or (asked.name == self.recorded_strategy.name and self._is_recorded(asked)):
            return self.recorded_strategy
        with asking("strategy", asked):
            return plugin_of(asked).as_run(asked, self.job)

    def _is_recorded(self, asked: Strategy) -> bool:
        return decided(asked, self.job) == self._recorded_schedule

    @cached_property
    def _recorded_schedule(self) -> Schedule:
        return decided(self.recorded_strategy, self.job)


def _changed(job: Job, what_if: WhatIf, passes: Sequence[Pass]) -> Job:
    return rewritten(what_if.rewrite(job), passes)


def _standard_error_ms(times_ms: Sequence[float]) -> float:
    return float(np.std(times_ms, ddof=1) / math.sqrt(len(times_ms))) if len(times_ms) > 1 else 0.0


def _fitted(trace: Trace) -> Cluster:
    try:
        return cluster_from_trace(trace)
    except ValidationError as failure:
        complaint = failure.errors(include_url=False)[0]
        raise TraceError(
            f"links cannot be fitted from the trace: {complaint['loc'][0]}: {complaint['msg']}",
            got=repr(complaint["input"]), fix="Pass --cluster.",
        ) from None  # fmt: skip


def _with_host_costs(cluster: Cluster, trace: Trace) -> Cluster:
    """``cluster`` with the costs of updates on the recorded hosts, unless it has them itself, and the job's library."""
    library = cluster.library if "library" in cluster.model_fields_set else library_of(trace)
    for name in trace.manifest.ranks[0].strategy:
        if name in registry.names():
            cluster = registry.plugin_named(name).without_own_costs(cluster)
    algorithms = {**host_costs(trace), **cluster.algorithms}
    return cluster.model_copy(update={"library": library, "algorithms": algorithms})
