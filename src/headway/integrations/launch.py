"""Starting somebody's command so that its ranks record, or follow a plan, without an edit to it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from headway.errors import LaunchError

RECORD_VARIABLE = "HEADWAY_RECORD"
PLAN_VARIABLE = "HEADWAY_PLAN"
ERRORS_VARIABLE = "HEADWAY_ERRORS"  # a folder in which ranks leave Headway's own errors

_INJECT = Path(__file__).parent / "inject"


def injected_environment(
    base: Mapping[str, str], *, record: str | None = None, plan: str | None = None
) -> dict[str, str]:
    """The environment under which ranks activate Headway: ``record`` is RecordOptions as JSON, ``plan`` a path."""
    environment = dict(base)
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(_INJECT) not in entries:
        entries.insert(0, str(_INJECT))
    environment["PYTHONPATH"] = os.pathsep.join(entries)
    if record is not None:
        environment[RECORD_VARIABLE] = record
    if plan is not None:
        environment[PLAN_VARIABLE] = plan
    return environment


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``command``, hand on SIGINT and SIGTERM, and return its exit status (128 + N for signal N).

    Raises LaunchError where it cannot be started, and the first of Headway's own errors that a rank ended with.
    """
    with tempfile.TemporaryDirectory(prefix="headway-") as errors:
        status = _wait_for(command, {**environment, ERRORS_VARIABLE: errors})
        said = sorted(Path(errors).iterdir())
        if status != 0 and said:
            raise LaunchError(said[0].read_text(encoding="utf-8")[:2000])
    return status


def _wait_for(command: Sequence[str], environment: Mapping[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=dict(environment))
    except OSError as failure:
        raise LaunchError(
            f"cannot start {command[0]}",
            got=failure.strerror,
            expected="a command on PATH",
            fix="Check its spelling.",
        ) from None

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
