"""Runs a command, one a rank, whose monotonic clock is ahead, in a time namespace: python skewed.py COMMAND ...

SKEW_MS in the environment says by how much: JSON, milliseconds by rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

CLONE_NEWTIME = 0x80


def main() -> None:
    milliseconds = json.loads(os.environ.get("SKEW_MS", "{}")).get(os.environ["RANK"], 0.0)
    if milliseconds:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWTIME) != 0:
            sys.exit(f"no time namespace: {os.strerror(ctypes.get_errno())}")
        Path("/proc/self/timens_offsets").write_text(f"monotonic 0 {round(milliseconds * 1e6)}\n")
        child = os.fork()  # children live in the new namespace
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
