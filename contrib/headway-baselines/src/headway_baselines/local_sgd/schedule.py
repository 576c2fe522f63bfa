"""Periodic averaging: how often ranks that train independently average their models, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.ext import HorizonSchedule

Policy = Literal["local", "averaged"]


@dataclass(frozen=True)
class OuterStep:
    """An SGD step on the averaged change of parameters, whose negative is the gradient.

    ``nesterov`` selects Nesterov momentum instead of classical momentum.
    """

    learning_rate: float
    momentum: float
    nesterov: bool


@dataclass(frozen=True)
class PeriodicSchedule(HorizonSchedule):
    """All ranks average after every ``steps`` local optimizer steps.

    Parameters are always averaged; ``moments`` and ``buffers`` are the policies for the optimizer's state and for
    statistics of normalisation layers. Without ``outer``, all ranks continue with the mean.
    """

    world_size: int
    steps: int
    moments: Policy = "local"
    buffers: Policy = "averaged"
    outer: OuterStep | None = None

    @property
    def parts(self) -> str:
        """The parts of training, in words."""
        return f"periods of {self.steps} steps"

    @property
    def collectives(self) -> int:
        """The number of collectives per period."""
        return 1

    def averages_after(self, iteration: int) -> bool:
        """Whether ranks average after ``iteration`` steps, counted from 1."""
        return iteration % self.steps == 0
