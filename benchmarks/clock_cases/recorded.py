"""Real recordings whose ranks read one clock, so that it is known how their times stand to each other."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headway.arrays import Ints
from headway.lab.launch import best_mode
from headway.trace.events import Events
from headway.trace.folder import load_trace
from headway.trace.format import ClockFit

SCRIPT = Path(__file__).parents[2] / "tests" / "scripts" / "train_small.py"
TIMEOUT_S = 180


@dataclass(frozen=True)
class Recording:
    """A job to record: DDP over Gloo, on this machine's loopback or on the shaped links of a lab."""

    ranks: int
    steps: int
    width: int = 160
    rate: str = ""  # of the lab's links; on loopback where empty


def possible(recording: Recording) -> bool:
    """Whether this machine permits it: labs need namespaces."""
    return not recording.rate or best_mode() != "loopback"


def record(recording: Recording, folder: Path) -> dict[int, Events]:
    """Record the job into ``folder``; returns every rank's events on the clock that all of them read."""
    script = [str(SCRIPT), "--steps", str(recording.steps), "--width", str(recording.width)]
    if recording.rate:
        lab = ["-m", "headway", "lab", "run", "--hosts", str(recording.ranks), "--rate", recording.rate, "--"]
        command = [sys.executable, *lab, sys.executable, *script]
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(recording.ranks)]
        command = [sys.executable, *torchrun, *script]
    out = folder / "trace"
    record_it = [
        sys.executable,
        "-m",
        "headway",
        "record",
        "--no-measuring",
        "--steps",
        f"5:{recording.steps - 1}",
    ]
    done = subprocess.run(
        [*record_it, "-o", str(out), "--", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=TIMEOUT_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"the job could not be recorded:\n{done.stderr}")
    trace = load_trace(out)
    return {info.rank: _as_read(trace.events[info.rank], info.clock) for info in trace.manifest.ranks}


def _as_read(events: Events, fit: ClockFit) -> Events:
    """Events as the rank's clock read them, before the recorder aligned them."""

    def read_ns(aligned_ns: Ints) -> Ints:
        own_ns = aligned_ns - fit.offset_ns
        own: Ints = np.rint(own_ns - fit.drift_ppm * 1e-6 * (own_ns - fit.reference_ns)).astype(np.int64)
        return own

    start_ns = read_ns(events.start_ns)
    return replace(
        events,
        start_ns=start_ns,
        duration_ns=np.maximum(read_ns(events.end_ns) - start_ns, 0),
        enqueue_ns=np.where(events.enqueue_ns >= 0, read_ns(events.enqueue_ns), -1),
    )
