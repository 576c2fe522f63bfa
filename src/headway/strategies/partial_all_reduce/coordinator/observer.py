"""Observer interface of a coordinator; the base class ignores all events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Observer:
    """Receives the events of a coordinator. Methods must return immediately."""

    def heard(self, kind: str, handled_s: float) -> None:
        """A message of ``kind`` was handled in ``handled_s``."""

    def members(self, count: int) -> None:
        """The number of members has changed to ``count``."""

    def joined(self, worker: int, *, resumed: bool) -> None:
        """A worker has joined or reconnected."""

    def gone(self, worker: int, reason: str) -> None:
        """A worker has left, was considered dead (``lease``), or was replaced."""

    def started(self, size: int, running: int) -> None:
        """A group of ``size`` has begun; ``running`` groups are running now."""

    def waited(self, seconds: float) -> None:
        """A worker waited ``seconds`` for its group."""

    def decided(self, committed: bool, seconds: float, running: int) -> None:
        """A group has ended after ``seconds``; ``running`` groups are running now."""

    def averaged(self, members: Sequence[int]) -> None:
        """These workers have applied their mean, or a single worker has continued alone."""

    def synced(self, seconds: float) -> None:
        """The journal was synced to disk in ``seconds``."""

    def round_trip(self, seconds: float) -> None:
        """A worker measured the round-trip time of a heartbeat."""

    def reported(self, worker: int, metrics: Mapping[str, float]) -> None:
        """A worker has reported metrics."""
