"""The driver of tuning: puts proposals in force between a model's steps, and measures."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from headway.errors import UnsupportedError, one_line
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule, restricted
from headway.strategies.adaptive.counting import (
    ASKED_EVERY_STEPS,
    Interval,
    StepCount,
    Study,
    Tunable,
    Turn,
    agreement_of,
    typical_ms,
)
from headway.strategies.adaptive.policy import HOME
from headway.strategies.adaptive.proposals import (
    Proposer,
    Setting,
    Trial,
    Tuned,
)
from headway.strategies.adaptive.proposer import PlannedProposer
from headway.strategies.base import Strategy
from headway.strategies.candidates import Candidate, Learned, Question, TuningEndedError
from headway.strategies.decisions import Journal
from headway.strategies.live.agreement import Agreement
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.replicas import is_so_anywhere
from headway.strategies.registry import plugin_of

WARM_STEPS = 3
WATCHED_STEPS = 4
MEASURED_STEPS = 3
SERVERS_SETTLE = 3
MOST_RESTARTS, MOST_CHANGES = 2, 20
SEVERAL_BACKWARDS = (
    "stock DDP was not tried: it reduces one backward behind a forward, and this script has several"
)
SEVERAL_FORWARDS = (
    "stock DDP was not tried: with find_unused_parameters it looks at one forward before a backward, and this script "
    "has several"
)

_log = logging.getLogger("headway")


class Tuner(StepCount):
    """Tunes one wrapped model as ``proposer`` says, and leaves ``wrapped.tuning`` behind.

    A proposal is measured over ``measured_steps``, behind one step in which it settles. ``afterwards`` is called when
    it is done. Another model of this process that is being tuned comes first.
    """

    def __init__(
        self,
        wrapped: Tunable,
        proposer: Proposer,
        measured_steps: int,
        afterwards: Callable[[Tunable, Tuned], None] | None = None,
    ) -> None:
        super().__init__(wrapped)
        self._began_under = wrapped.strategy
        self._note = ""
        self._afterwards = afterwards
        self._proposer = proposer
        self._measured_steps = measured_steps
        self._initial = wrapped.schedule
        self._restarts = self._changes = (
            0  # of what is trained; all of them, and those that began tuning anew
        )
        self._turn = Turn(wrapped)
        self._waited_steps = 0
        self._watch: Any = None
        self._unwatched: weakref.finalize[..., Any] | None = None
        self._begin(wrapped)

    def _begin(self, wrapped: Tunable) -> None:
        self._told: dict[Candidate, list[float]] = {}
        self._learned: Learned | None = None
        super()._begin(wrapped)

    def _disturb(self) -> None:
        super()._disturb()
        if self._watch is not None:
            self._watch.disturb()

    def before_forward(self, *, learning: bool) -> None:
        """As of ``StepCount``; a watch is told that a forward which learns is next."""
        super().before_forward(learning=learning)
        wrapped = self._model()
        learns = learning and wrapped.module.training and not wrapped.joining
        if learns and self._watch is not None:
            self._watch.expect_forward(wrapped.reductions)

    def _resume(self, interval: Interval) -> None:
        self._turn.steps = self._steps
        super()._resume(interval)

    # What is done ------------------------------------------------------------------------------------

    def _made_study(self) -> Study:
        yield
        self._refuse_alone()
        yield from self._wait_for_turn()
        if self._model().is_stock:  # which shows nothing of what its steps consist of
            self._put_in_force(self._initial)
        for _ in range(WARM_STEPS - 1):
            yield
        if self._proposer.learns and self._clock.host:
            self._watch = self._watch_steps()
            for _ in range(WATCHED_STEPS):
                yield
            self._learned = self._learn(self._watch)
        setting = self._setting()
        self._proposer.begin(setting)
        while not self._proposer.is_ready():
            yield
        while (candidate := self._proposer.propose()) is not None:
            try:
                self._try(candidate.strategy)
            except UnsupportedError as error:
                if candidate.strategy.name == HOME:
                    raise
                self._note = f"{candidate.strategy.describe()} was not tried: {one_line(str(error))}"
                continue
            for _ in range(settling_steps(candidate)):
                yield
            intervals = []
            for _ in range(self._measured_steps):
                intervals.append((yield))  # noqa: PERF401 - a comprehension cannot yield
            (measured_ms,) = setting.agreement.slowest([typical_ms(intervals)])
            self._told.setdefault(candidate, []).append(measured_ms)
            self._proposer.tell(candidate, measured_ms)

    def _wait_for_turn(self) -> Study:
        while self._another_has_its_turn():
            for _ in range(ASKED_EVERY_STEPS):
                self._waited_steps += 1
                yield
        self._turn.take()

    def _another_has_its_turn(self) -> bool:
        wrapped = self._model()
        return is_so_anywhere(not self._turn.ask(), wrapped.process_group, wrapped.join_device)

    def _refuse_alone(self) -> None:
        if dist.get_world_size(self._model().process_group) == 1:
            raise TuningEndedError("a single worker does not communicate")

    def _watch_steps(self) -> Any:
        wrapped = self._model()
        watch = wrapped.watch_steps()
        self._unwatched = weakref.finalize(wrapped, watch.detach)
        self._unwatched.atexit = False
        return watch

    def _learn(self, watch: Any) -> Learned:
        """What was watched on the slowest rank, and what rings cost with nothing else in flight."""
        wrapped = self._model()
        self._stop_watching()
        return wrapped.learn(watch, agreement_of(wrapped))

    def _setting(self) -> Setting:
        wrapped = self._model()
        in_force, forms = wrapped.schedule, wrapped.permitted_forms
        if in_force.gather not in forms:
            in_force = replace(in_force, gather=forms[0])
        agreement = agreement_of(wrapped)
        self._note = self._why_no_stock(agreement)
        on_stock_ddp = self._began_on_stock_ddp
        # What is cast for its way would not be under stock DDP.
        may_be_stock = not self._note and in_force.halves is None
        question = Question(
            model_spec(wrapped.module),
            in_force,
            forms,
            wrapped.channels,
            self._learned,
            stock=self._stock_of(wrapped) if may_be_stock else None,
            on_stock_ddp=on_stock_ddp,
            script_stock=None if on_stock_ddp is None else wrapped.stock_strategy,
            may_serve=may_be_stock and wrapped.device.type == "cpu",
        )
        return Setting(question, agreement)

    def _why_no_stock(self, agreement: Agreement) -> str:
        """What of the steps so far stock DDP, if it has not done them, would reduce wrongly or refuse; "" for none."""
        most_reductions, most_forwards = agreement.slowest([self._most_reductions, self._most_forwards])
        if most_reductions > 1:
            return SEVERAL_BACKWARDS
        looks_at_one = self._model().find_unused_parameters and self._began_on_stock_ddp is None
        return SEVERAL_FORWARDS if most_forwards > 1 and looks_at_one else ""

    @property
    def _began_on_stock_ddp(self) -> Strategy | None:
        """What stock DDP did when tuning began, with all-reduces of its own or with servers; None where ours was."""
        return None if self._began_under.name == HOME else self._began_under

    def _stock_of(self, wrapped: Tunable) -> Strategy:
        """What was in force where that was stock DDP without servers, else that of the script's options."""
        under = self._began_under
        return under if under.name == wrapped.stock_strategy.name else wrapped.stock_strategy

    def _try(self, strategy: Strategy, *, for_good: bool = False) -> None:
        wrapped = self._model()
        if strategy.name == HOME:
            schedule = strategy.decide(Job.of(model_spec(wrapped.module)))
            assert isinstance(schedule, BucketSchedule)
            self._put_in_force(schedule)
        else:
            wrapped.use_stock_ddp(strategy, keep_connections=not for_good)
            self._note_what_is_in_force(wrapped)

    def _put_in_force(self, schedule: BucketSchedule) -> None:
        wrapped = self._model()
        if wrapped.is_stock or schedule != wrapped.schedule:
            wrapped.reschedule(schedule)
        self._note_what_is_in_force(wrapped)

    # Ending ------------------------------------------------------------------------------------------

    def _scheduled_otherwise(self, wrapped: Tunable) -> None:
        self._finish("the script put another schedule in force", keep=True)

    def _trained_otherwise(self, wrapped: Tunable) -> None:
        # What was learned and tried is of no use.
        self._stop_watching()
        self._initial = restricted(self._initial, model_spec(wrapped.module))
        self._changes += 1
        if not self._turn.is_taken and self._changes <= MOST_CHANGES:  # nothing was tried
            self._begin(wrapped)
            return
        self._turn.give_back()  # who waits holds up nobody
        self._put_in_force(self._initial)
        self._restarts += 1
        if self._restarts > MOST_RESTARTS or self._changes > MOST_CHANGES:
            again = "the set of trainable parameters changes again and again"
            self._finish(again, keep=self._began_on_stock_ddp is None)
        else:
            self._begin(wrapped)

    def _finish(self, reason: str, *, keep: bool = False) -> None:
        """Put the best in force, or what was in force before; where ``keep``, leave what is."""
        wrapped = self._model()
        self._turn.give_back()
        self._stop_watching()
        trials = [Trial.of(candidate, times) for candidate, times in self._told.items()]
        chosen = self._proposer.choose(trials) if trials and not reason else None
        if chosen is not None:
            self._try(trials[chosen].candidate.strategy, for_good=True)
        elif (began := self._began_on_stock_ddp) is not None and not keep:
            self._try(began, for_good=True)
        elif not keep and not self._is_stock_alone(wrapped):
            self._put_in_force(self._initial)
        wrapped.tuning = Tuned(
            strategy=wrapped.strategy,
            candidates=tuple(trial.candidate for trial in trials),
            measured_ms=tuple(trial.measured_ms for trial in trials),
            chosen=chosen,
            steps=self._steps - self._waited_steps,
            waited_steps=self._waited_steps,
            learned=self._learned,
            ended_early=reason,
            note=self._note,
        )
        wrapped.tuner = None
        if agreement_of(wrapped).rank == 0:
            _log.info("%s", wrapped.tuning.describe())
        if self._afterwards is not None:
            self._afterwards(wrapped, wrapped.tuning)
        elif agreement_of(wrapped).rank == 0 and (journal := Journal.wanted()) is not None:
            journal.add(wrapped.tuning.entry(self._steps, self._began_under.describe()))

    def _is_stock_alone(self, wrapped: Tunable) -> bool:
        """Whether this worker has no other, and stock DDP, which costs less than ours, does its steps."""
        alone = dist.get_world_size(wrapped.process_group) == 1
        if not alone or self._why_no_stock(agreement_of(wrapped)) or self._initial.halves:
            return False
        try:
            self._try(self._stock_of(wrapped), for_good=True)
        except UnsupportedError:
            return False
        return True

    def _stop_watching(self) -> None:
        if self._unwatched is not None:
            self._unwatched()  # which lets go of what was watched, too
            self._watch = self._unwatched = None


def settling_steps(candidate: Candidate) -> int:
    """How many steps a candidate settles in: servers bind what they run to DDP's buckets, which it replaces once."""
    steps = plugin_of(candidate.strategy).on_stock_ddp(candidate.strategy)
    return SERVERS_SETTLE if steps is not None and steps.carry is not None else 1


def tune(
    wrapped: Tunable,
    proposer: Proposer | None = None,
    measured_steps: int = MEASURED_STEPS,
    afterwards: Callable[[Tunable, Tuned], None] | None = None,
) -> None:
    """Tune ``wrapped`` during its next steps, on every rank; ``wrapped.tuning`` is there when that is done.

    Without a ``proposer`` schedules are planned from the steps themselves (``PlannedProposer``). Each that is tried is
    measured over ``measured_steps``: with three of them all is done within 80 steps, or 100 where servers are tried.
    ``afterwards`` is called then.
    """
    wrapped.tuner = Tuner(wrapped, proposer or PlannedProposer(), measured_steps, afterwards)


__all__ = ["Tuner", "tune"]
