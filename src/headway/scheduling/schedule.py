"""What a strategy decides: one of a few kinds of schedule, each an immutable value."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule


class HorizonSchedule(ABC):
    """What a strategy of another package decides whose ranks do not finish their steps together.

    The base of a frozen dataclass. No replay lays it out: the strategy's ``over_a_horizon`` says what ranks do.
    """

    @property
    @abstractmethod
    def parts(self) -> str:
        """What it cuts training into, in words."""

    @property
    @abstractmethod
    def collectives(self) -> int:
        """How many collectives it asks of a rank before it repeats."""


Schedule = (
    BucketSchedule
    | PipelineSchedule
    | ReplicatedSchedule
    | GroupSchedule
    | CoordinatedGroups
    | HorizonSchedule
)
"""Gradients in buckets, over all ranks; micro-batches through stages, of one pipeline or of several side by side;
models averaged in groups of ranks, which are fixed or formed while training; or what another package makes of it."""
