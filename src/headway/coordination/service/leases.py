"""Leases of workers: who says nothing for too long is taken for dead."""

from __future__ import annotations

from collections.abc import Sequence

from headway.coordination.generator import Worker

LOOKS_A_LEASE = 8
"""How often a coordinator looks for leases that have ended, during one."""
PAUSE = 0.5
"""Of a lease: a coordinator that has not looked for so long was itself stopped, and has not heard what was said."""


class Leases:
    """When each worker was heard last, in seconds of one clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._ends: dict[Worker, float] = {}
        self._looked: float | None = None

    @property
    def look_s(self) -> float:
        """How long to wait between looks."""
        return self.lease_s / LOOKS_A_LEASE

    def renew(self, worker: Worker, now: float) -> None:
        """A worker is heard."""
        self._ends[worker] = now + self.lease_s

    def drop(self, worker: Worker) -> None:
        """A worker has left."""
        self._ends.pop(worker, None)

    def ended(self, now: float) -> Sequence[Worker]:
        """The workers whose leases have ended; after a pause of the coordinator itself, all have one more."""
        looked, self._looked = self._looked, now
        if looked is not None and now - looked > self.lease_s * PAUSE:
            self._ends = {worker: max(end, now + self.lease_s) for worker, end in self._ends.items()}
        return sorted(worker for worker, end in self._ends.items() if end <= now)
