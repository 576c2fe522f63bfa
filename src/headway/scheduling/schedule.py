"""``Schedule``: the union of all schedules that a strategy may decide."""

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
"""Buckets of gradients over all ranks; one pipeline, or several replicated ones; averaging in groups that are fixed or
formed during training; or a schedule of another package."""
