"""Computes one bucket size in elements, for tools with a single size for all buckets."""

from __future__ import annotations

from collections.abc import Sequence

from headway.interop.settings.request import Bucketed, SettingsRequest
from headway.model import DTYPE_BYTES
from headway.scheduling.buckets import Bucket, BucketSchedule
from headway.strategies.decoupled.policy import DecoupledStrategy

WHY = "it counts elements"


def elements(bucket: Bucket) -> int:
    """The number of elements of a bucket."""
    return bucket.size_bytes // DTYPE_BYTES[bucket.dtype]


def one_size(request: SettingsRequest, strategy: Bucketed, *, closes_before: bool) -> tuple[int, str]:
    """The bucket size limit in elements, and what it leaves out of the plan ("" for nothing).

    It is the buckets' common cap, or else their mean size, which gives about as many. ``closes_before`` says that the
    tool closes a bucket before it exceeds the limit, not once it has reached it. Raises PlanError without a model.
    """
    schedules = request.schedules(WHY)
    if isinstance(strategy, DecoupledStrategy):
        cap_bytes = 0 if strategy.buckets else strategy.bucket_cap_bytes
    else:
        limits = set(strategy.size_limits_bytes())
        cap_bytes = max(1, *limits) if len(limits) == 1 else 0
    of_elements = {DTYPE_BYTES[bucket.dtype] for schedule in schedules for bucket in schedule.buckets}
    if cap_bytes and len(of_elements) == 1:
        alike = closes_before == isinstance(strategy, DecoupledStrategy)
        way = "before it exceeds the size" if closes_before else "when it reaches the size"
        return max(1, cap_bytes // of_elements.pop()), (
            "" if alike else f"bucket boundaries: a bucket is closed {way}, unlike in the plan"
        )
    sizes = _sizes(schedules)
    mean = max(1, round(sum(sizes) / len(sizes)))
    return (
        mean,
        f"a size for each bucket ({min(sizes):,} to {max(sizes):,} elements): all get {mean:,}",
    )


def _sizes(schedules: Sequence[BucketSchedule]) -> list[int]:
    return [elements(bucket) for schedule in schedules for bucket in schedule.buckets]
