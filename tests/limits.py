"""Time limits that a busy machine stretches: load makes tests slow, and does not make them fail.

A limit is meant for a machine of the kind it was chosen on, with its cores to itself. It is stretched by how much
slower this machine is and by how many processes want each of its cores, as seen whenever it would strike. Even then it
strikes only if the processes it is for do next to nothing: while they work they are waited for, ``CAP`` times as long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import cache

import psutil

CAP = 5.0
LOOK_S = 10.0  # how long processes are watched that have outlasted their limit
WORKING = 0.05  # of a core: what a process that only asks now and then does not use
CALIBRATION_S = 0.03  # what _calibration takes of the processor on the machine that limits were chosen on


def stretch() -> float:
    """By how much this machine, with its load of the last minute, is slower than limits are meant for; at least 1."""
    return max(1.0, _slowness()) * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def stretched(limit_s: float) -> float:
    """``limit_s`` for a wait that cannot look again: stretched as the machine is now, with something to spare."""
    return limit_s * (1.0 if (factor := stretch()) < 1.5 else 2 * factor)


class Limit:
    """``limit_s`` seconds from now for what ``processes``, and all that they start, have to do."""

    def __init__(self, limit_s: float, processes: Callable[[], Iterable[int]] = lambda: ()) -> None:
        self._limit_s, self._processes = limit_s, processes
        self._started_s = time.monotonic()
        self._stretch = 1.0
        self._seen: tuple[float, float] | None = (
            None  # when the processes were last looked at, what they had used
        )

    def left_s(self) -> float:
        """How long to wait before asking again; 0 where the limit is over."""
        now = time.monotonic()
        self._stretch = max(self._stretch, stretch())
        elapsed_s, allowed_s = now - self._started_s, self._limit_s * self._stretch
        if elapsed_s < allowed_s:
            return allowed_s - elapsed_s
        if self._seen is not None:
            seen_s, used_s = self._seen
            if now < seen_s + LOOK_S:
                return seen_s + LOOK_S - now
            working = abs(_used_s(self._processes()) - used_s) > WORKING * (now - seen_s) / self._stretch
            if not working or elapsed_s > CAP * allowed_s:
                return 0.0
        self._seen = (now, _used_s(self._processes()))
        return LOOK_S

    def over(self) -> bool:
        """Whether there is no more reason to wait."""
        return self.left_s() <= 0.0


def _used_s(pids: Iterable[int]) -> float:
    """What the processes and their descendants have used of the processor; it jumps when one of them ends."""
    used_s = 0.0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
        for member in family:
            try:
                times = member.cpu_times()
            except psutil.Error:
                continue
            used_s += times.user + times.system
    return used_s


@cache
def _slowness() -> float:
    """How much slower this machine's processor is, with nothing else on it, than the one limits were chosen on."""
    return min(_calibration() for _ in range(3)) / CALIBRATION_S


def _calibration() -> float:
    started_s = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number & 7
    return time.process_time() - started_s
