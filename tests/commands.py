"""Running the command line as users do, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def headway(
    *arguments: object, timeout_s: float = 90, measuring: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``headway`` with ``arguments``; output is captured, a hang fails.

    A job that is recorded does not stop to measure its machine, which takes seconds, unless ``measuring``.
    """
    if arguments[0] == "record" and not measuring:
        arguments = ("record", "--no-measuring", *arguments[1:])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "headway", *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout_s, env=environment, check=False,
    )  # fmt: skip


def record_into(out: Path, steps: str = "3:8") -> tuple[object, ...]:
    """The beginning of a command that records into ``out``, for ranks of their own launchers; it ends before ``--``."""
    return (sys.executable, "-m", "headway", "record", "--no-measuring", "-o", out, "--steps", steps)


def torchrun(script: str, *arguments: object, workers: int = 2) -> tuple[str, ...]:
    """The command that starts ``script`` of tests/scripts on ``workers`` local ranks."""
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
    )
    return (*launcher, str(SCRIPTS / script), *map(str, arguments))


def last_line(text: str) -> str:
    """The last line of an output that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
