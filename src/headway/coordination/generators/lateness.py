"""Lateness: for whom others stand still, seen from when requests come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headway.coordination.generator import Worker

SMOOTHING = 4  # iterations over which means are taken


class Pace(BaseModel):
    """Of one worker, when it was last free and when it asked last, and the means of ``lag`` and ``period`` (ns)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    free_ns: int
    asked_ns: int | None = None
    lag_ns: int | None = Field(default=None, ge=0)
    period_ns: int | None = Field(default=None, ge=0)


class Lateness:
    """How long each worker takes from the end of its group until it asks again: its ``lag``.

    Counts of requests do not tell who is slow: workers that average with a slow one ask as rarely as it does. But they
    ask immediately, or after their own iteration, when their group has ended, and the slow one comes last.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self.paces: dict[Worker, Pace] = {}
        self._shortest_ns: int | None = None  # of mean periods; None: to be found again

    def asked(self, worker: Worker, now_ns: int) -> None:
        """A worker asks."""
        if not self._threshold:
            return
        pace = self.paces.get(worker) or Pace(free_ns=now_ns)
        if pace.asked_ns is None:
            self.paces[worker] = pace.model_copy(update={"asked_ns": now_ns})
            return
        lag_ns, period_ns = now_ns - max(pace.free_ns, pace.asked_ns), now_ns - pace.asked_ns
        self.paces[worker] = Pace(
            free_ns=pace.free_ns, asked_ns=now_ns, lag_ns=_mean(pace.lag_ns, max(0, lag_ns)),
            period_ns=_mean(pace.period_ns, max(0, period_ns)),
        )  # fmt: skip
        self._shortest_ns = None

    def freed(self, worker: Worker, now_ns: int) -> None:
        """The group of a worker has ended."""
        if (pace := self.paces.get(worker)) is not None:
            self.paces[worker] = pace.model_copy(update={"free_ns": now_ns})

    def left(self, worker: Worker) -> None:
        """A worker is not there any more."""
        self.paces.pop(worker, None)
        self._shortest_ns = None

    def is_late(self, worker: Worker, other: Worker) -> bool:
        """Whether ``worker`` comes later than ``other`` by the threshold, a share of the shortest iteration."""
        one, two = self.paces.get(worker), self.paces.get(other)
        if one is None or two is None or one.lag_ns is None or two.lag_ns is None:
            return False
        if self._shortest_ns is None:
            self._shortest_ns = min(
                pace.period_ns for pace in self.paces.values() if pace.period_ns is not None
            )
        return one.lag_ns - two.lag_ns > self._threshold * self._shortest_ns

    def known(self) -> dict[Worker, Any]:
        """All that it knows, as a JSON document."""
        return {worker: pace.model_dump(mode="json") for worker, pace in sorted(self.paces.items())}

    def take(self, paces: Mapping[Worker, Pace]) -> None:
        """Go on from what another one knew."""
        self.paces = dict(paces)
        self._shortest_ns = None


def _mean(mean: int | None, new: int) -> int:
    return new if mean is None else mean + (new - mean) // SMOOTHING
