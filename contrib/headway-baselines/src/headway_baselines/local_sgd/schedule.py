"""Periodic averaging: when ranks that train by themselves make one model of theirs, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.ext import HorizonSchedule

Policy = Literal["local", "averaged"]


@dataclass(frozen=True)
class OuterStep:
    """What is made of the averaged change of parameters: a step of SGD, whose gradient is its negative.

    ``nesterov`` asks for Nesterov's momentum in the place of the classical one.
    """

    learning_rate: float
    momentum: float
    nesterov: bool


@dataclass(frozen=True)
class PeriodicSchedule(HorizonSchedule):
    """Every rank takes ``steps`` optimizer steps of its own, and then all ranks average.

    Parameters are averaged in any case; ``moments`` and ``buffers`` say what becomes of the optimizer's state and of
    the statistics of normalisation layers. Without ``outer`` the mean is the model that all go on with.
    """

    world_size: int
    steps: int
    moments: Policy = "local"
    buffers: Policy = "averaged"
    outer: OuterStep | None = None

    @property
    def parts(self) -> str:
        """What it cuts training into, in words."""
        return f"periods of {self.steps} steps"

    @property
    def collectives(self) -> int:
        """How many collectives end a period."""
        return 1

    def averages_after(self, iteration: int) -> bool:
        """Whether ranks average when each has made ``iteration`` steps, counted from 1."""
        return iteration % self.steps == 0
