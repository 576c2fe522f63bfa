"""The resident memory of other processes, from outside: no allocator is asked, and nothing in them changes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

INTERVAL_S = 0.0005


class Watching:
    """Looks at the anonymous memory of processes until ``stop``; each counts from when it was first seen."""

    def __init__(self, pids: list[int]) -> None:
        self._status = [Path(f"/proc/{pid}/status") for pid in pids]
        self._first = [resident_bytes(status) for status in self._status]
        self._most = list(self._first)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.is_set():
            for place, status in enumerate(self._status):
                self._most[place] = max(self._most[place], resident_bytes(status))
            time.sleep(INTERVAL_S)

    def stop(self) -> list[int]:
        """By how many bytes each process was larger than at first, at most."""
        self._stopped.set()
        self._thread.join()
        return [most - first for most, first in zip(self._most, self._first, strict=True)]


def resident_bytes(status: Path) -> int:
    """Its own memory that is not a file's; 0 where the process is gone."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
