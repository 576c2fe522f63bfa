"""What whoever watches a coordinator is told of; the one here looks away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Observer:
    """Gets what a coordinator does. Methods return immediately."""

    def heard(self, kind: str, handled_s: float) -> None:
        """A worker has sent a message of ``kind``, which took ``handled_s`` to handle."""

    def members(self, count: int) -> None:
        """So many workers are members now."""

    def joined(self, worker: int, *, resumed: bool) -> None:
        """A worker has joined, or is back on another connection."""

    def gone(self, worker: int, reason: str) -> None:
        """A worker has left, or was taken for dead (``lease``)."""

    def started(self, size: int, running: int) -> None:
        """A group of ``size`` begins; ``running`` run now."""

    def waited(self, seconds: float) -> None:
        """A worker was granted a group after so long."""

    def decided(self, committed: bool, seconds: float, running: int) -> None:
        """A group has ended after so long; ``running`` run now."""

    def averaged(self, members: Sequence[int]) -> None:
        """These workers have taken the mean of their models, or one alone has gone on."""

    def synced(self, seconds: float) -> None:
        """The journal was written to the disk in so long."""

    def round_trip(self, seconds: float) -> None:
        """What a beat took, as a worker has measured."""

    def reported(self, worker: int, metrics: Mapping[str, float]) -> None:
        """A worker reports numbers about itself."""
