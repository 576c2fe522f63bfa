"""Running a planted job in the lab and recording it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from headway.lab import launch
from headway.lab.spec import parse_spec
from planting.causes import RANKS, Cause

RATE = "2gbit"
STEPS = "5:25"
_HERE = Path(__file__).parent


def record(cause: Cause, out: Path) -> Path:
    """Run ``cause``'s job on four hosts and record it into ``out``. Exits where the job fails."""
    spec = parse_spec({"hosts": RANKS, "rate": RATE, **cause.lab})
    command = [sys.executable, "-m", "headway", "record", "--no-measuring", "-o", str(out), "--steps", STEPS]
    if cause.skewed:
        command = [sys.executable, str(_HERE / "skewed.py"), *command, "--no-clock-server"]
    environment = dict(os.environ) | {
        "PLANT": json.dumps(cause.plant),
        "SKEW_MS": json.dumps({str(rank): ms for rank, ms in cause.skewed.items()}),
        "OMP_NUM_THREADS": "1",
    }
    lines: list[str] = []
    status = launch.run(
        spec,
        [*command, "--", sys.executable, str(_HERE / "job.py")],
        env=environment,
        timeout_s=120,
        on_line=lambda rank, stream, text: lines.append(f"[{rank}] {text}"),
        on_notice=lines.append,
    )
    if status != 0:
        raise SystemExit("\n".join([*lines[-20:], f"the job ended with status {status}"]))
    return out
