"""Metrics of a coordinator for Prometheus, and log lines about workers that join or leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from headway.errors import UserError
from headway.strategies.partial_all_reduce.coordinator.observer import Observer
from headway.strategies.partial_all_reduce.coordinator.transport import missing
from headway.strategies.partial_all_reduce.generators.generator import Worker
from headway.strategies.partial_all_reduce.matrices import MOST_RANKS, Mixing
from headway.units import counted

if TYPE_CHECKING:
    from prometheus_client import Gauge


class MixingMeter:
    """Measures repeatedly how long models take to mix: multiplies mixing matrices until within ``TOLERANCE``.

    It restarts whenever workers come or go, and measures nothing for more than ``MOST_RANKS`` workers.
    """

    def __init__(self) -> None:
        self._workers: set[Worker] = set()
        self._places: dict[Worker, int] = {}
        self._mixing: Mixing | None = None

    def joined(self, worker: Worker) -> None:
        """Add a worker."""
        if worker not in self._workers:
            self._workers.add(worker)
            self._mixing = None

    def gone(self, worker: Worker) -> None:
        """Remove a worker."""
        self._workers.discard(worker)
        self._mixing = None

    def averaged(self, members: Sequence[Worker]) -> float | None:
        """Add a group; returns the iterations per worker since the last restart once all have mixed, else None."""
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


MAX_REPORTED_NAMES = 32
"""Number of distinct reported metric names that are shown; further ones are only counted."""
REQUEST_S = 5.0
_FAST_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
_SLOW_S = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 1024)


class PrometheusObserver(Observer):
    """Counts the events of a coordinator. Raises UserError if prometheus-client is missing."""

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError:
            raise missing("prometheus-client, for metrics,") from None
        self.registry = registry = CollectorRegistry()
        prefix = "headway_coordinator_"

        def histogram(name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Any:
            return Histogram(prefix + name, words, labels, buckets=buckets, registry=registry)

        def counter(name: str, words: str, *labels: str) -> Any:
            return Counter(prefix + name, words, labels, registry=registry)

        self._requests = counter("requests", "Messages from workers, by kind.", "kind")
        self._handling = histogram("handling_seconds", "Time to handle a message.", _FAST_S, "kind")
        self._members = Gauge(prefix + "workers", "Workers in the job.", registry=registry)
        self._running = Gauge(prefix + "groups_running", "Groups that are running.", registry=registry)
        self._sizes = histogram("group_size", "Workers per group.", _SIZES)
        self._waits = histogram(
            "wait_seconds", "Time from a worker's request to the start of its group.", _SLOW_S
        )
        self._groups = histogram("group_seconds", "Duration of a group.", _SLOW_S)
        self._decided = counter("decisions", "Groups that ended, committed or aborted.", "outcome")
        self._joined = counter("joins", "Workers that joined.")
        self._resumed = counter("reconnections", "Workers that reconnected.")
        self._gone = counter("departures", "Workers that left, by reason: left, lease, replaced.", "reason")
        self._sync = histogram("journal_sync_seconds", "Time to sync the journal to disk.", _SLOW_S)
        self._round_trips = histogram(
            "beat_seconds", "Round-trip time of heartbeats, measured by workers.", _FAST_S
        )
        self._dropped = counter(
            "reports_dropped", "Reported values dropped because there are too many names."
        )
        self._reported: Gauge = Gauge(
            "headway_worker_reported", "Metrics that workers report.", ("worker", "name"), registry=registry
        )
        self._mixed = Gauge(
            prefix + "mixing_iterations",
            "Iterations per worker until all models last mixed.",
            registry=registry,
        )
        self._meter = MixingMeter()
        self._names: dict[str, set[int]] = {}  # to the workers that reported them

    def heard(self, kind: str, handled_s: float) -> None:
        """Count a message."""
        self._requests.labels(kind).inc()
        self._handling.labels(kind).observe(handled_s)

    def members(self, count: int) -> None:
        """Show how many workers there are."""
        self._members.set(count)

    def joined(self, worker: int, *, resumed: bool) -> None:
        """Count a worker that joined or reconnected."""
        (self._resumed if resumed else self._joined).inc()
        self._meter.joined(worker)

    def gone(self, worker: int, reason: str) -> None:
        """Count a departure and remove the worker's metrics."""
        self._gone.labels(reason).inc()
        self._meter.gone(worker)
        for name, workers in list(self._names.items()):
            if worker in workers:
                workers.discard(worker)
                self._reported.remove(str(worker), name)
                if not workers:
                    del self._names[name]

    def started(self, size: int, running: int) -> None:
        """Count a group."""
        self._sizes.observe(size)
        self._running.set(running)

    def waited(self, seconds: float) -> None:
        """Observe the waiting time of a worker."""
        self._waits.observe(seconds)

    def decided(self, committed: bool, seconds: float, running: int) -> None:
        """Count the end of a group."""
        self._decided.labels("committed" if committed else "aborted").inc()
        self._groups.observe(seconds)
        self._running.set(running)

    def averaged(self, members: Sequence[int]) -> None:
        """Measure how fast workers mix."""
        if (iterations := self._meter.averaged(members)) is not None:
            self._mixed.set(iterations)

    def synced(self, seconds: float) -> None:
        """Count a sync of the journal."""
        self._sync.observe(seconds)

    def round_trip(self, seconds: float) -> None:
        """Count a beat."""
        self._round_trips.observe(seconds)

    def reported(self, worker: int, metrics: Mapping[str, float]) -> None:
        """Show metrics that a worker reported."""
        for name, value in metrics.items():
            if name not in self._names and len(self._names) >= MAX_REPORTED_NAMES:
                self._dropped.inc()
                continue
            self._names.setdefault(name, set()).add(worker)
            self._reported.labels(str(worker), name).set(value)


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S  # for silent connections

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class MetricsPort:
    """Serves the metrics of ``observer`` on HOST, PORT; port 0 picks a free port."""

    def __init__(self, observer: PrometheusObserver, host: str, port: int) -> None:
        from prometheus_client import make_wsgi_app

        try:
            self._server = make_server(
                host, port, make_wsgi_app(observer.registry), WSGIServer, handler_class=_Handler
            )
        except OSError as failure:
            raise UserError(f"cannot serve metrics on {host} port {port}", got=failure.strerror) from None
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="headway-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


_GONE = {
    "left": "has left",
    "lease": "is considered dead: its lease expired",
    "replaced": "was replaced by another process",
}


class Narrating(Observer):
    """Calls ``say`` with a line for each worker that joins, reconnects or leaves, and the number of workers."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say
        self._news = ""

    def joined(self, worker: int, *, resumed: bool) -> None:
        """Note a worker that joined or reconnected."""
        super().joined(worker, resumed=resumed)
        self._news = f"worker {worker} {'is back' if resumed else 'has joined'}"

    def gone(self, worker: int, reason: str) -> None:
        """Note a worker that left."""
        super().gone(worker, reason)
        self._news = f"worker {worker} {_GONE.get(reason, reason)}"

    def members(self, count: int) -> None:
        """Report the last event with the new number of workers."""
        super().members(count)
        if self._news:
            self._say(f"{self._news}: {counted(count, 'worker')}")
            self._news = ""


class NarratingWithMetrics(Narrating, PrometheusObserver):
    """``Narrating`` and ``PrometheusObserver``. Raises UserError if prometheus-client is missing."""
