"""What a strategy decides: one of a few kinds of schedule, each an immutable value."""

from __future__ import annotations

from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.groups import GroupSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule

Schedule = BucketSchedule | PipelineSchedule | GroupSchedule
"""Gradients in buckets, over all ranks; micro-batches through stages; or models averaged in groups of ranks."""
