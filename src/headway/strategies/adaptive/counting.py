"""Counting the steps of a wrapped model, the same on every rank, to do something between them."""

from __future__ import annotations

import statistics
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from headway.scheduling.buckets import BucketSchedule, GatherMode
from headway.strategies.adaptive.proposals import Tuned
from headway.strategies.base import Strategy
from headway.strategies.candidates import Learned, TuningEndedError
from headway.strategies.live.agreement import Agreement


class Clock:
    """Tells the time at which all is computed that the host asked for. ``host`` says that this is so immediately."""

    def __init__(self, device: torch.device) -> None:
        self.host = device.type == "cpu"
        self._device = device

    def now_ns(self) -> int:
        """Nanoseconds; on a device this waits for what is computed, and not for what is communicated meanwhile.

        Collectives that run under the next forward would be waited for on the whole device, and hide nothing.
        """
        if not self.host:
            torch.cuda.current_stream(self._device).synchronize()
        return time.monotonic_ns()


ASKED_EVERY_STEPS = 10
MOST_IDLE_ASKS = 10
"""So many times in a row another model may have taken no step before its turn is passed over."""


class Turn:
    """One model's turn. It ends with ``give_back()``, with the model, or when the model takes no steps any more."""

    def __init__(self, model: object) -> None:
        self.steps = 0
        """How many steps the model has taken; whoever waits looks whether they become more."""
        self._model = weakref.ref(model)
        self._seen: weakref.WeakKeyDictionary[Turn, tuple[int, int]] = weakref.WeakKeyDictionary()

    def ask(self) -> bool:
        """Whether no other model that takes steps is having its turn. To be asked every ``ASKED_EVERY_STEPS``."""
        model = self._model()
        turns = [turn for turn in _taken if turn._model() not in (None, model)]
        return not [turn for turn in turns if not self._is_idle(turn)]

    @property
    def is_taken(self) -> bool:
        """Whether it is being had."""
        return self in _taken

    def take(self) -> None:
        """Have it, from now on; who is idle may have one at the same time."""
        _taken.add(self)

    def give_back(self) -> None:
        """Let others have theirs."""
        _taken.discard(self)

    def _is_idle(self, turn: Turn) -> bool:
        steps, idle_asks = self._seen.get(turn, (-1, 0))
        idle_asks = idle_asks + 1 if turn.steps == steps else 0
        self._seen[turn] = turn.steps, idle_asks
        return idle_asks >= MOST_IDLE_ASKS


_taken: weakref.WeakSet[Turn] = weakref.WeakSet()


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
    require_backward_grad_sync: bool
    """Whether backwards of forwards from now on are reduced."""
    tuner: StepCount | None
    """Told of forwards and of ``join()`` for as long as there is one."""
    tuning: Tuned | None
    """What came of the last tuning."""

    @property
    def schedule(self) -> BucketSchedule:
        """The decoupled schedule that is in force, or was before stock DDP."""

    @property
    def trainable(self) -> frozenset[int]:
        """The identities of the parameters that are trained."""

    @property
    def is_stock(self) -> bool:
        """Whether stock DDP does its steps, through servers or not."""

    @property
    def strategy(self) -> Strategy:
        """What is in force."""

    @property
    def stock_strategy(self) -> Strategy:
        """What stock DDP would decide, with the script's own options."""

    @property
    def reductions(self) -> int:
        """How many backwards have been reduced under what is in force."""

    find_unused_parameters: bool
    """As of DistributedDataParallel."""
    handovers: int
    """How often its steps were handed over to stock DDP, or stock DDP got other buckets."""

    @property
    def joining(self) -> bool:
        """Whether a ``join()`` lasts, with a schedule of its own."""

    @property
    def join_device(self) -> torch.device:
        """Where its process group takes small tensors."""

    @property
    def permitted_forms(self) -> tuple[GatherMode, ...]:
        """What decoupled steps may gather, what they gather now first."""

    @property
    def channels(self) -> int:
        """How many collectives its connections can have in flight at a time."""

    def watch_steps(self) -> Any:
        """Begin to watch its steps, until the watch is told to ``detach``."""

    def learn(self, watch: Any, agreement: Agreement) -> Learned:
        """What ``watch`` saw on the slowest rank, and what collectives cost. Collective."""

    def reschedule(self, schedule: BucketSchedule) -> None:
        """Put another schedule in force."""

    def use_stock_ddp(self, strategy: Strategy | None = None, *, keep_connections: bool = False) -> None:
        """Have stock DDP do the steps, through servers where ``strategy`` is one of servers."""


class StepCount(ABC):
    """Counts the steps of one wrapped model and resumes ``_study`` after each."""

    def __init__(self, wrapped: Tunable) -> None:
        self._wrapped = weakref.ref(wrapped)
        self._steps = 0
        self._clock = Clock(wrapped.device)

    def _begin(self, wrapped: Tunable) -> None:
        """Begin the study, again if other parameters are trained than before."""
        self._note_what_is_in_force(wrapped)
        self._trainable = wrapped.trainable
        self._reductions: int | None = None
        self._forwards = 0  # that learn, since the last reduction
        self._most_forwards = self._most_reductions = 0  # of one step
        self._begun_ns = 0
        self._disturbed = True
        self._study = self._made_study()
        next(self._study)

    def before_forward(self, *, learning: bool) -> None:
        """A forward of the wrapped model begins; ``learning`` where gradients are recorded.

        Ranks must count alike, and scripts evaluate on some of them only, at times with gradients recorded.
        """
        wrapped = self._model()
        if not learning or not wrapped.module.training:
            self._disturb()
        elif wrapped.joining:  # what is in force is its own for as long as it lasts
            self.join_begins()
        elif wrapped.trainable is not self._trainable and wrapped.trainable != self._trainable:
            self._trained_otherwise(wrapped)
        elif wrapped.schedule is not self._schedule or self._stock_state != (
            wrapped.is_stock,
            wrapped.handovers,
        ):
            self._scheduled_otherwise(wrapped)
        elif wrapped.require_backward_grad_sync:
            self._count(wrapped)

    def join_begins(self) -> None:
        """From here on ranks may take different numbers of steps, or none. Counting starts again."""
        self._disturb()
        self._reductions = None

    def _count(self, wrapped: Tunable) -> None:
        reductions = wrapped.reductions
        now_ns = self._clock.now_ns()
        if self._reductions is None:
            self._reductions, self._begun_ns, self._disturbed = reductions, now_ns, True
            self._forwards = 1
        elif reductions != self._reductions:  # of several forwards before a backward the first one counts
            self._steps += 1
            self._most_forwards = max(self._most_forwards, self._forwards)
            self._forwards = 1
            self._most_reductions = max(self._most_reductions, reductions - self._reductions)
            self._resume(Interval((now_ns - self._begun_ns) / 1e6, self._disturbed))
            self._reductions, self._disturbed = wrapped.reductions, False
            self._begun_ns = self._clock.now_ns()
        else:
            self._forwards += 1

    def _resume(self, interval: Interval) -> None:
        try:
            self._study.send(interval)
        except StopIteration:
            self._finish("")
        except TuningEndedError as reason:
            self._finish(str(reason))

    def _disturb(self) -> None:
        """Something that is no part of training happens."""
        self._disturbed = True

    @abstractmethod
    def _made_study(self) -> Study:
        """The study: one yield a step; what is behind it happens in the next step's forward."""

    @abstractmethod
    def _finish(self, reason: str) -> None:
        """The study is over; ``reason`` says why it ended early, where it did."""

    @abstractmethod
    def _trained_otherwise(self, wrapped: Tunable) -> None:
        """Other parameters are trained than when the study began."""

    @abstractmethod
    def _scheduled_otherwise(self, wrapped: Tunable) -> None:
        """The script put another schedule in force."""

    def _note_what_is_in_force(self, wrapped: Tunable) -> None:
        """Remember it: whatever else is in force later was put there by the script."""
        self._schedule, self._stock_state = wrapped.schedule, (wrapped.is_stock, wrapped.handovers)

    def _model(self) -> Tunable:
        wrapped = self._wrapped()
        assert wrapped is not None
        return wrapped


def agreement_of(wrapped: Tunable) -> Agreement:
    """How the ranks of a wrapped model tell each other something."""
    return Agreement(wrapped.process_group, wrapped.join_device)


def typical_ms(intervals: Sequence[Interval]) -> float:
    """The median of those undisturbed, or of all where none was."""
    calm = [interval.ms for interval in intervals if not interval.disturbed]
    return statistics.median(calm or [interval.ms for interval in intervals])
