"""Who comes and goes, in words, for whoever has started a coordinator and looks at it."""

from __future__ import annotations

from collections.abc import Callable

from headway.coordination.service.observer import Observer
from headway.coordination.service.prometheus import PrometheusObserver
from headway.units import counted

_GONE = {
    "left": "has left",
    "lease": "was silent for too long, and is taken for dead",
    "replaced": "was replaced by another process",
}


class Narrating(Observer):
    """Hands ``say`` a line for each worker that joins, comes back or goes, with how many there are then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say
        self._news = ""

    def joined(self, worker: int, *, resumed: bool) -> None:
        """A worker has come."""
        super().joined(worker, resumed=resumed)
        self._news = f"worker {worker} {'is back' if resumed else 'has joined'}"

    def gone(self, worker: int, reason: str) -> None:
        """A worker has gone."""
        super().gone(worker, reason)
        self._news = f"worker {worker} {_GONE.get(reason, reason)}"

    def members(self, count: int) -> None:
        """That makes so many; said with what made them."""
        super().members(count)
        if self._news:
            self._say(f"{self._news}: {counted(count, 'worker')}")
            self._news = ""


class NarratingWithMetrics(Narrating, PrometheusObserver):
    """Both. Raises UserError without prometheus-client."""
