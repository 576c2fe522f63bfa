"""Absence: members that do not train now: they evaluate, save, or wait in a collective of the script.

Groups may be drawn before their members have come. A member that is in a script's own barrier comes only when all have
come there, also those that wait for it in a group: without this, neither would ever go on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.coordination.generator import Worker

LEAST_S = 5.0
FIRST_S = 60.0
"""How long a member that has never asked is waited for at least."""
FACTOR = 10.0
"""How many times as long as it usually takes a member may take to ask, until groups go on without it."""
REMEMBERED = 5
"""Usual is the median of so many of a member's last times: a single long one, as for an evaluation, counts little."""


@dataclass(slots=True)
class _Pace:
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    free_since: float | None = None  # it computes since then
    returned: bool = False  # it was there before: even its first time is no longer than usual
    told: bool = False  # that it is absent

    def limit_s(self, longest_s: float) -> float:
        """After how long it is absent; ``longest_s`` is the longest time that any member is known to have taken."""
        if self.times_s:
            return max(LEAST_S, FACTOR * statistics.median(self.times_s))
        return LEAST_S if self.returned else max(FIRST_S, FACTOR * longest_s)


class Absences:
    """Who has not asked for so long that others do not wait for it. Times are seconds of one clock.

    A member of which no time is known may take longer: its first iteration may take long. While nobody's is known,
    nobody is absent.
    """

    def __init__(self) -> None:
        self._paces: dict[Worker, _Pace] = {}

    def joined(self, worker: Worker, now: float) -> None:
        """A member is there for the first time, and computes."""
        self._paces[worker] = _Pace(free_since=now)

    def returned(self, worker: Worker, now: float) -> None:
        """A member is there again, or its iterations were seen by an earlier coordinator; it may wait for others."""
        pace = self._paces.setdefault(worker, _Pace())
        pace.free_since, pace.returned, pace.told = now, True, False

    def asked(self, worker: Worker, now: float) -> None:
        """A member has finished an iteration."""
        pace = self._paces.setdefault(worker, _Pace())
        if pace.free_since is not None:
            pace.times_s.append(now - pace.free_since)
        pace.free_since, pace.told = None, False

    def freed(self, worker: Worker, now: float) -> None:
        """A member that has asked computes again: its group has ended, or it goes on alone."""
        if (pace := self._paces.get(worker)) is not None:
            pace.free_since, pace.told = now, False

    def gone(self, worker: Worker) -> None:
        """It is no member any more. Its times are kept: it may return."""
        if (pace := self._paces.get(worker)) is not None:
            pace.free_since = None

    def absent(self, now: float) -> Sequence[Worker]:
        """Members that became absent since this was called last."""
        longest_s = max(
            (max(pace.times_s) for pace in self._paces.values() if pace.times_s), default=math.inf
        )
        found = [
            worker
            for worker, pace in sorted(self._paces.items())
            if pace.free_since is not None
            and not pace.told
            and now - pace.free_since > pace.limit_s(longest_s)
        ]
        for worker in found:
            self._paces[worker].told = True
        return found
