"""What a strategy decides: one of a few kinds of schedule, each an immutable value."""

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
"""Gradients in buckets, over all ranks; micro-batches through stages, of one pipeline or of several side by side;
models averaged in groups of ranks, which are fixed or formed while training; models of all ranks averaged at the end of
each period; or parameters in shards, each of which has a server."""
