"""A model that is trained under a plan, as by a script that calls ``headway.parallelize``."""

from __future__ import annotations

from torch import nn

import headway
from headway.plan import Plan
from headway.strategies.adaptive.wrapper import AdaptiveDataParallel
from headway.strategies.base import Strategy
from headway.strategies.decoupled.lifecycle import release
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from paced_training.jobs import PacedJob, optimizer_of
from paced_training.trainer import Trainer


class Planned(Trainer):
    name = "headway"

    def __init__(self, job: PacedJob, plan: Plan | Strategy) -> None:
        inner = job.make()
        optimizer = optimizer_of(inner.parameters())
        super().__init__(job, headway.parallelize(inner, optimizer, plan), inner, optimizer)

    def update(self) -> None:
        """Nobody counts gradients: under a decoupled plan a look at them would fetch them."""
        assert self.optimizer is not None
        self.optimizer.step()

    def finish(self) -> None:
        settle(self.wrapped)

    def close(self) -> None:
        end(self.wrapped)


def settle(wrapped: nn.Module) -> None:
    """Wait for what a decoupled model has in flight."""
    if isinstance(wrapped, AdaptiveDataParallel | DecoupledDataParallel) and wrapped.engine is not None:
        # Not flush(): nobody looks at gradients, which would have to be fetched.
        wrapped.engine.settlement.settle_values()


def end(wrapped: nn.Module) -> None:
    """Give back the threads and process groups of a decoupled model."""
    if isinstance(wrapped, AdaptiveDataParallel | DecoupledDataParallel) and wrapped.engine is not None:
        release(wrapped.engine)
