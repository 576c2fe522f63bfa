"""Readiness: which buckets a backward may launch. One rule for the live runtime and for replay."""

from __future__ import annotations

from headway.scheduling.buckets import BucketSchedule


class BucketReadiness:
    """Counts the gradients of one backward: a bucket goes when it is full and every bucket before it has gone."""

    def __init__(self, schedule: BucketSchedule) -> None:
        self._buckets_of = schedule.buckets_of
        self._full = [len(bucket.parameters) for bucket in schedule.buckets]
        self._missing = list(self._full)
        self.next = 0

    def ready(self, parameter: str) -> range:
        """Note that the gradient of ``parameter`` is complete; returns the indices of buckets to launch now."""
        for index in self._buckets_of.get(parameter, ()):
            self._missing[index] -= 1
        begin = self.next
        while self.next < len(self._missing) and self._missing[self.next] <= 0:
            self.next += 1
        return range(begin, self.next)

    @property
    def complete(self) -> bool:
        """Whether every bucket has gone."""
        return self.next == len(self._missing)

    def restart(self) -> None:
        """Start counting again, for the next backward."""
        self._missing = list(self._full)
        self.next = 0
