"""Counting the steps of a wrapped model, the same on every rank, to do something between them.

Everything happens inside the forward that begins a step, when the backward before it has been launched whole, and at
the same count of steps on every rank. What is done is written as one generator, a study, which each such forward
resumes. A step is the time from one such forward to the next.
"""

from __future__ import annotations

import statistics
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.tuning.agreement import Agreement
from headway.strategies.adaptive.tuning.clock import Clock
from headway.strategies.adaptive.tuning.proposals import Tuned, TuningEndedError
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.engine import Engine
from headway.strategies.decoupled.policy import DecoupledStrategy, OnStockDdp


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
    require_backward_grad_sync: bool
    """Whether backwards of forwards from now on are reduced."""
    tuner: StepCount | None
    """Told of forwards and of ``join()`` for as long as there is one."""
    tuning: Tuned | None
    """What came of the last tuning."""

    @property
    def engine(self) -> Engine | None:
        """What runs the model; None where stock DDP does for good."""

    @property
    def is_stock(self) -> bool:
        """Whether stock DDP does its steps, through servers or not."""

    @property
    def strategy(self) -> DecoupledStrategy | OnStockDdp:
        """What is in force."""

    @property
    def stock_strategy(self) -> DistributedDataParallelStrategy:
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

    def reschedule(self, schedule: BucketSchedule) -> None:
        """Put another schedule in force."""

    def use_stock_ddp(self, strategy: OnStockDdp | None = None, *, keep_connections: bool = False) -> None:
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

    def _parts(self) -> tuple[Tunable, Engine]:
        """The model and its engine, where that is in force."""
        wrapped = self._model()
        assert wrapped.engine is not None
        return wrapped, wrapped.engine


def agreement_of(wrapped: Tunable) -> Agreement:
    """How the ranks of a wrapped model tell each other something."""
    return Agreement(wrapped.process_group, wrapped.join_device)


def typical_ms(intervals: Sequence[Interval]) -> float:
    """The median of those undisturbed, or of all where none was."""
    calm = [interval.ms for interval in intervals if not interval.disturbed]
    return statistics.median(calm or [interval.ms for interval in intervals])
