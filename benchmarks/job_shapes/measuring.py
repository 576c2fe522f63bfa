"""Running one shape in full: recorded, planned, and run under the plans and as it is, in turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from headway import files
from job_shapes.catalogue import Shape
from job_shapes.running import Ran, run, step_ms

STEPS = 30
MEASURED = "measured.json"
UNPLANNED = "unplanned"


def measured(shape: Shape, folder: Path, rounds: int) -> dict[str, Any]:
    """What running ``shape`` gave: the document in ``folder``, whose rounds are made up to ``rounds``.

    The folder also holds the recording ``base`` and the plans ``NAME.yaml``. The document has how the
    recording ended, why there is no plan, and of each plan and the unplanned job the steps of its runs in ms, its
    status, loss and last line.
    """
    path = folder / MEASURED
    if path.is_file():
        document: dict[str, Any] = json.loads(path.read_text())
    else:
        folder.mkdir(parents=True, exist_ok=True)
        document = _planned(shape, folder)
    runs = document.get("runs", {})
    for number in range(max(map(len, runs.values()), default=rounds + 1) - 1, rounds):
        for name in list(runs) if number % 2 else reversed(list(runs)):
            plan = None if name == UNPLANNED else folder / f"{name}.yaml"
            ended = run(
                shape.name,
                STEPS,
                folder,
                hosts=shape.hosts,
                plan=plan,
                record=f"{name}-{number}",
                measure=False,
            )
            runs[name].append(_ended(ended))
    files.write_text(path, json.dumps(document, indent=1))
    return document


def _planned(shape: Shape, folder: Path) -> dict[str, Any]:
    """Record and plan the job; its runs so far are the recorded one."""
    base = run(shape.name, STEPS, folder, hosts=shape.hosts, record="base")
    if base.trace is None:
        return {"recorded": False, "last_line": base.last_line}
    found, why = headway("optimize", str(folder / "base"), "-o", str(folder / "best.yaml"))
    if not found:
        return {"recorded": True, "refused": why}
    plans = {"best": found["taken"]}
    if not plans["best"].startswith("decoupled"):
        arguments = ("-o", str(folder / "decoupled.yaml"), "--strategy", "decoupled")
        decoupled, _ = headway("optimize", str(folder / "base"), *arguments)
        if decoupled:
            plans["decoupled"] = next(p["name"] for p in found["plans"] if p["name"].startswith("decoupled"))
    return {
        "recorded": True,
        "plans": plans,
        "runs": {UNPLANNED: [_ended(base)], **{name: [] for name in plans}},
    }


def _ended(ran: Ran) -> dict[str, Any]:
    time_ms = None if ran.trace is None else step_ms(ran.trace)
    return {"status": ran.status, "loss": ran.loss, "last_line": ran.last_line, "time_ms": time_ms}


def headway(*arguments: str) -> tuple[dict[str, Any], str]:
    """The document that a command prints, or nothing and the line it refused with."""
    ended = subprocess.run(
        [sys.executable, "-m", "headway", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return {}, lines[-1] if lines else f"status {ended.returncode}"
    document: dict[str, Any] = json.loads(ended.stdout)
    return document, ""
