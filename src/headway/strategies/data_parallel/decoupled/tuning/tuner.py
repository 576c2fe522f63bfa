"""The driver of tuning: counts a model's steps, puts proposals in force between them, and measures.

Everything happens inside the forward that begins a step, when the backward before it has been launched whole, and at
the same count of steps on every rank. What the driver does is written as one generator, which each such forward
resumes. A step is the time from one such forward to the next.
"""

from __future__ import annotations

import logging
import statistics
import weakref
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from headway.graph.update_cost import update_cost
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule, GatherMode, restricted
from headway.strategies.data_parallel.decoupled.engine import Engine
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy, options_of
from headway.strategies.data_parallel.decoupled.tuning import links
from headway.strategies.data_parallel.decoupled.tuning.agreement import Agreement
from headway.strategies.data_parallel.decoupled.tuning.clock import Clock
from headway.strategies.data_parallel.decoupled.tuning.learning import numbers_of, slowest_steps
from headway.strategies.data_parallel.decoupled.tuning.planned import PlannedProposer
from headway.strategies.data_parallel.decoupled.tuning.proposals import (
    Candidate,
    Learned,
    Proposer,
    Setting,
    Trial,
    Tuned,
    TuningEndedError,
)
from headway.strategies.data_parallel.decoupled.tuning.watch import StepWatch
from headway.strategies.data_parallel.module_spec import model_spec

WARM_STEPS = 3
WATCHED_STEPS = 4
MEASURED_STEPS = 3
MOST_RESTARTS = 2

_log = logging.getLogger("headway")


class Interval(NamedTuple):
    """From one counted forward to the next, and whether something other than training happened meanwhile."""

    ms: float
    disturbed: bool


Study = Generator[None, Interval, None]


class Tunable(Protocol):
    """A wrapped model whose schedule can be changed while it trains."""

    module: nn.Module
    process_group: dist.ProcessGroup
    device: torch.device
    schedule: BucketSchedule
    trainable: frozenset[int]
    """The identities of the parameters that are trained."""
    uneven: Any
    """The ``join()`` that lasts, if one does."""
    tuner: Tuner | None
    """Told of forwards and of ``join()`` for as long as there is one."""
    tuning: Tuned | None
    """What came of it."""

    @property
    def engine(self) -> Engine | None:
        """What runs the model."""

    @property
    def join_device(self) -> torch.device:
        """Where its process group takes small tensors."""

    def reschedule(self, schedule: BucketSchedule) -> None:
        """Put another schedule in force."""


class Tuner:
    """Tunes one wrapped model as ``proposer`` says, and leaves ``wrapped.tuning`` behind.

    A proposal is measured over ``measured_steps``, behind one step in which it settles.
    """

    def __init__(self, wrapped: Tunable, proposer: Proposer, measured_steps: int) -> None:
        self._wrapped = weakref.ref(wrapped)
        self._proposer = proposer
        self._measured_steps = measured_steps
        self._initial = wrapped.schedule
        self._restarts = 0
        self._steps = 0
        self._watch: StepWatch | None = None
        self._clock = Clock(wrapped.device)
        self._begin(wrapped)

    def _begin(self, wrapped: Tunable) -> None:
        self._schedule = wrapped.schedule
        self._trainable = wrapped.trainable
        self._told: dict[Candidate, list[float]] = {}
        self._learned: Learned | None = None
        self._reductions: int | None = None
        self._begun_ns = 0
        self._disturbed = True
        self._study = self._tune()
        next(self._study)

    # Counting ---------------------------------------------------------------------------------------

    def before_forward(self, *, learning: bool) -> None:
        """A forward of the wrapped model begins; ``learning`` where gradients are recorded.

        Ranks must count alike, and scripts evaluate on some of them only, at times with gradients recorded.
        """
        wrapped, engine = self._parts()
        if not learning or not wrapped.module.training:
            self._disturb()
        elif (
            wrapped.uneven is not None
        ):  # join() has put a schedule of its own in force for as long as it lasts
            self.join_begins()
        elif wrapped.trainable is not self._trainable:
            self._begin_anew(wrapped)
        elif wrapped.schedule is not self._schedule:
            self._finish("the script put another schedule in force", keep=True)
        else:
            if engine.synchronise:
                self._count(engine)
            if self._watch is not None:
                self._watch.expect_forward(engine.layout.buckets[0].reductions)

    def _count(self, engine: Engine) -> None:
        reductions = engine.layout.buckets[0].reductions
        now_ns = self._clock.now_ns()
        if self._reductions is None:
            self._reductions, self._begun_ns, self._disturbed = reductions, now_ns, True
        elif reductions != self._reductions:  # of several forwards before a backward the first one counts
            self._steps += 1
            self._resume(Interval((now_ns - self._begun_ns) / 1e6, self._disturbed))
            self._reductions, self._disturbed = engine.layout.buckets[0].reductions, False
            self._begun_ns = self._clock.now_ns()

    def join_begins(self) -> None:
        """From here on ranks may take different numbers of steps, or none. Counting starts again."""
        self._disturb()
        self._reductions = None

    def _disturb(self) -> None:
        self._disturbed = True
        if self._watch is not None:
            self._watch.disturb()

    def _resume(self, interval: Interval) -> None:
        try:
            self._study.send(interval)
        except StopIteration:
            self._finish("")
        except TuningEndedError as reason:
            self._finish(str(reason))

    # What is done ------------------------------------------------------------------------------------

    def _tune(self) -> Study:
        """One yield a step; what is behind it happens in the next step's forward."""
        for _ in range(WARM_STEPS):
            yield
        self._refuse_alone()
        if self._proposer.learns and self._clock.host:
            self._watch = self._watch_steps()
            for _ in range(WATCHED_STEPS):
                yield
            self._learned = self._learn(self._watch)
        setting = self._setting()
        self._proposer.begin(setting)
        while (candidate := self._proposer.propose()) is not None:
            self._put_in_force(candidate.strategy.decide(Job.of(setting.model)))
            yield  # settling
            intervals = []
            for _ in range(self._measured_steps):
                intervals.append((yield))  # noqa: PERF401 - a comprehension cannot yield
            (measured_ms,) = setting.agreement.slowest([_typical_ms(intervals)])
            self._told.setdefault(candidate, []).append(measured_ms)
            self._proposer.tell(candidate, measured_ms)

    def _refuse_alone(self) -> None:
        if self._parts()[1].transport.world_size == 1:
            raise TuningEndedError("a single worker does not communicate")

    def _watch_steps(self) -> StepWatch:
        wrapped, engine = self._parts()
        watch = StepWatch(wrapped.module, engine, model_spec(wrapped.module))
        weakref.finalize(wrapped, watch.detach).atexit = False
        return watch

    def _learn(self, watch: StepWatch) -> Learned:
        """What was watched on the slowest rank, and what rings cost with nothing else in flight."""
        wrapped, engine = self._parts()
        agreement, spec = _agreement(wrapped), model_spec(wrapped.module)
        self._stop_watching()
        engine.settlement.settle_all()
        sharded = engine.schedule.gather == "parameters"
        sizes_bytes = {g.buckets[0].index: sum(b.size_bytes for b in g.buckets) for g in engine.layout.groups}
        if sharded:
            sizes_bytes = {bucket.index: bucket.size_bytes for bucket in engine.layout.buckets}
        update = update_cost(watch.updates, sizes_bytes, engine.transport.world_size if sharded else 1)
        steps = slowest_steps(agreement.from_each(numbers_of(watch.periods, update, spec)), spec)
        if steps is None:
            raise TuningEndedError("a rank saw no step of one forward and one backward")
        cluster = links.measure(
            engine.transport,
            agreement,
            spec.size_bytes,
            busy=steps.busy,
            update_overhead_ns=steps.update_overhead_ns,
        )
        return Learned(steps.profile, cluster)

    def _setting(self) -> Setting:
        wrapped, engine = self._parts()
        in_force, forms = wrapped.schedule, _forms(wrapped.schedule)
        if engine.settlement.needs_gradients:
            in_force, forms = replace(in_force, gather="gradients"), ("gradients",)
        return Setting(
            model_spec(wrapped.module),
            in_force,
            forms,
            engine.transport.channels,
            _agreement(wrapped),
            self._learned,
        )

    def _put_in_force(self, schedule: BucketSchedule) -> None:
        wrapped, _ = self._parts()
        if schedule != wrapped.schedule:
            wrapped.reschedule(schedule)
        self._schedule = wrapped.schedule

    # Ending ------------------------------------------------------------------------------------------

    def _begin_anew(self, wrapped: Tunable) -> None:
        """Other parameters are trained: what was learned and tried is of no use."""
        self._stop_watching()
        self._initial = restricted(self._initial, model_spec(wrapped.module))
        self._put_in_force(self._initial)
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            self._finish("the set of trainable parameters changes again and again", keep=True)
        else:
            self._begin(wrapped)

    def _finish(self, reason: str, *, keep: bool = False) -> None:
        """Put the best in force, or what was in force before; where ``keep``, leave what is."""
        wrapped, _ = self._parts()
        self._stop_watching()
        spec = model_spec(wrapped.module)
        trials = [Trial(candidate, statistics.mean(times)) for candidate, times in self._told.items()]
        chosen = self._proposer.choose(trials) if trials and not reason else None
        if chosen is not None:
            self._put_in_force(trials[chosen].candidate.strategy.decide(Job.of(spec)))
        elif not keep:
            self._put_in_force(self._initial)
        wrapped.tuning = Tuned(
            strategy=DecoupledStrategy.model_validate(options_of(wrapped.schedule, spec)),
            candidates=tuple(trial.candidate for trial in trials),
            measured_ms=tuple(trial.measured_ms for trial in trials),
            chosen=chosen,
            steps=self._steps,
            learned=self._learned,
            ended_early=reason,
        )
        wrapped.tuner = None
        if _agreement(wrapped).rank == 0:
            _log.info("%s", wrapped.tuning.describe())

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.detach()
            self._watch = None

    def _parts(self) -> tuple[Tunable, Engine]:
        wrapped = self._wrapped()
        assert wrapped is not None
        assert wrapped.engine is not None
        return wrapped, wrapped.engine


def _agreement(wrapped: Tunable) -> Agreement:
    return Agreement(wrapped.process_group, wrapped.join_device)


def _forms(schedule: BucketSchedule) -> tuple[GatherMode, ...]:
    return (schedule.gather, "gradients" if schedule.gather == "parameters" else "parameters")


def _typical_ms(intervals: list[Interval]) -> float:
    calm = [interval.ms for interval in intervals if not interval.disturbed]
    return statistics.median(calm or [interval.ms for interval in intervals])


def tune(wrapped: Tunable, proposer: Proposer | None = None, measured_steps: int = MEASURED_STEPS) -> None:
    """Tune ``wrapped`` during its next steps, on every rank; ``wrapped.tuning`` is there when that is done.

    Without a ``proposer`` schedules are planned from the steps themselves (``PlannedProposer``). Each that is tried is
    measured over ``measured_steps``: with three of them all is done in at most 40 steps.
    """
    wrapped.tuner = Tuner(wrapped, proposer or PlannedProposer(), measured_steps)


__all__ = ["Interval", "Tuner", "tune"]
