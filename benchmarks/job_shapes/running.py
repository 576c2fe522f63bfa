"""Running a shape over two lab hosts: plain, recorded, or recorded under a plan."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.lab import launch
from headway.lab.spec import parse_spec
from headway.trace.events import Kind
from headway.trace.folder import load_trace
from headway.trace.format import Trace

RATE = "200mbit"
TIMEOUT_S = 240.0
START = Path(__file__).parent / "start.py"
_LOSS = re.compile(r"final loss (\S+)")


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended: its status, the loss it printed last, and what it said."""

    status: int
    loss: float | None
    said: tuple[str, ...]
    trace: Trace | None = None

    @property
    def last_line(self) -> str:
        """What a person would see last, of Headway's own lines if there are any."""
        own = [line for line in self.said if line.startswith(("headway:", "Error:"))]
        return (own or [line for line in self.said if line.strip()] or [""])[-1]


def run(
    name: str,
    steps: int,
    folder: Path,
    *,
    hosts: int = 2,
    plan: Path | None = None,
    record: str = "",
    measure: bool = True,
) -> Ran:
    """Run a shape; ``record`` names a folder in ``folder`` for its trace.

    ``measure`` as people record: the job measures its links and cores after the recorded steps.
    """
    headway = [sys.executable, "-m", "headway"]
    before: list[str] = []
    if plan is not None:
        before += [*headway, "run", "--plan", str(plan), "--"]
    if record:
        before += [*headway, "record", "-o", str(folder / record), "--steps", f"6:{steps - 1}"]
        before += ["--"] if measure else ["--no-measuring", "--"]
    lines: list[str] = []
    status = launch.run(
        parse_spec({"hosts": hosts, "rate": RATE}),
        [sys.executable, str(START), name, str(steps), *before],
        env={**os.environ, "OMP_NUM_THREADS": "1", "SNAPSHOT": str(folder / "snapshot.pt")},
        timeout_s=TIMEOUT_S,
        on_line=lambda _rank, _stream, line: lines.append(line),
        on_notice=lines.append,
    )
    losses = [float(found[1]) for line in lines if (found := _LOSS.search(line))]
    trace = load_trace(folder / record) if record and (folder / record).is_dir() else None
    return Ran(status, losses[-1] if losses else None, tuple(lines), trace)


def step_ms(trace: Trace) -> float:
    """The mean recorded step, over steps and ranks."""
    events = trace.events
    durations = [
        rows.duration_ns[np.asarray(rows.kind) == Kind.STEP].mean() for rows in events.values() if len(rows)
    ]
    return float(np.mean(durations)) / 1e6
