"""The clock of a lab's timeline, as its ranks know it."""

from __future__ import annotations

import os
import time
from pathlib import Path


def since_lab_s() -> float:
    """Seconds since this process started, which is when the lab's timeline begins."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
