"""What a strategy decides: one of a few kinds of schedule, each an immutable value."""

from __future__ import annotations

from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule

Schedule = BucketSchedule | PipelineSchedule | ReplicatedSchedule | GroupSchedule | CoordinatedGroups
"""Gradients in buckets, over all ranks; micro-batches through stages, of one pipeline or of several side by side; or
models averaged in groups of ranks, which are fixed or formed while training."""
