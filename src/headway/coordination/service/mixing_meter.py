"""MixingMeter: after how many iterations the workers of a job have mixed, measured while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from headway.coordination.generator import Worker
from headway.coordination.matrices import MOST_RANKS, Mixing


class MixingMeter:
    """Multiplies the mixing matrices of groups until their product is within ``TOLERANCE``, and begins anew.

    It begins anew too where workers come or go. Of more than ``MOST_RANKS`` workers it measures nothing.
    """

    def __init__(self) -> None:
        self._workers: set[Worker] = set()
        self._places: dict[Worker, int] = {}
        self._mixing: Mixing | None = None

    def joined(self, worker: Worker) -> None:
        """A worker is there."""
        if worker not in self._workers:
            self._workers.add(worker)
            self._mixing = None

    def gone(self, worker: Worker) -> None:
        """A worker is there no more."""
        self._workers.discard(worker)
        self._mixing = None

    def averaged(self, members: Sequence[Worker]) -> float | None:
        """These workers hold their mean; the iterations of a mean worker since the beginning if now all have mixed."""
        if not 1 < len(self._workers) <= MOST_RANKS:
            return None
        if self._mixing is None:
            self._places = {worker: place for place, worker in enumerate(sorted(self._workers))}
            self._mixing = Mixing(len(self._places))
        places = [self._places[worker] for worker in members if worker in self._places]
        count = self._mixing.averaged(places, len(members))
        if count is not None:
            self._mixing = None
        return count
