"""``Schedule``: the union of all schedules that a strategy may decide."""

from __future__ import annotations

from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule
from headway.scheduling.periods import PeriodicSchedule
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule
from headway.scheduling.shards import ShardSchedule

Schedule = (
    BucketSchedule
    | PipelineSchedule
    | ReplicatedSchedule
    | GroupSchedule
    | CoordinatedGroups
    | PeriodicSchedule
    | ShardSchedule
)
"""Buckets of gradients over all ranks; one pipeline, or several replicated ones; averaging in groups that are fixed or
formed during training; periodic averaging; or parameter shards with a server each."""
