"""What the processes of a command tell their launcher: one small file a process, renamed into place.

A process that imports torch leaves a file in each folder of ``REPORTS_VARIABLE`` (its launcher's, and those of who
started that one) and replaces it as it becomes a rank, applies the plan or refuses. Launchers read them while the
command runs. The writing half is plain Python, for it runs in other people's processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headway.errors import one_line
from headway.rpc.interface import host_name

REPORTS_VARIABLE = "HEADWAY_REPORTS"
RANK_VARIABLE = (
    "HEADWAY_RANK_PROCESS"  # a rank's process, in its environment and so in that of what it starts
)
PREFIX = "process-"
MAX_REPORTS = 20_000
MAX_REPORT_BYTES = 16_384
MAX_SAID = 1000


@dataclass(frozen=True, slots=True)
class Report:
    """What one process said of itself; ``rank`` is -1 until its default process group was initialised.

    ``host`` is the machine, ``host_in_plans`` its name in traces and plans: that of an imitated host in a lab.

    ``refused`` is an error of Headway's own, ``blind`` says why this Python cannot import Headway, ``alone`` that it
    trains without a process group, ``records`` that it began to record and ``done`` that its recording is written;
    ``left`` that it was to leave then, and ``went_on`` that it trains further all the same.

    Rank 0 under a plan also says when it began, by its host's clock, how many optimizer steps it has made, and what
    the last ``timed_steps`` of them took, on average, with their standard deviation.
    """

    host: str = ""
    host_in_plans: str = ""
    pid: int = 0
    rank: int = -1
    world_size: int = 0
    applied: bool = False
    alone: bool = False
    records: bool = False
    done: bool = False
    left: bool = False
    went_on: bool = False
    refused: str = ""
    blind: str = ""
    began_s: float = 0.0
    steps: int = 0
    timed_steps: int = 0
    step_ms: float = 0.0
    spread_ms: float = 0.0


_said: dict[str, Any] = {}


def is_below_a_rank() -> bool:
    """Whether a rank of the command has started this process: process groups that it makes are not the job's."""
    return os.environ.get(RANK_VARIABLE, "") not in ("", str(os.getpid()))


def say(**news: Any) -> bool:
    """Change this process's report by ``news``, fields of ``Report``. Returns whether a launcher can read it.

    What a rank has started reports nothing.
    """
    if is_below_a_rank():
        return False
    if _said.get("pid") != os.getpid():  # a forked child is a process of its own
        _said.clear()
        _said.update(
            pid=os.getpid(), host=socket.gethostname(), host_in_plans=host_name(), name=os.urandom(4).hex()
        )
    _said.update(news)
    text = json.dumps({key: value for key, value in _said.items() if key != "name"})
    readable = False
    for path in _paths():
        being_written = path.with_suffix(".writing")
        with contextlib.suppress(OSError):
            being_written.write_text(text, encoding="utf-8")
            being_written.replace(path)
            readable = True
    return readable


def withdraw() -> None:
    """Remove this process's report where it says no more than that the process is there."""
    if _said.get("pid") == os.getpid() and set(_said) == {"pid", "host", "host_in_plans", "name"}:
        for path in _paths():
            with contextlib.suppress(OSError):
                path.unlink()


def _paths() -> list[Path]:
    folders = os.environ.get(REPORTS_VARIABLE, "").split(os.pathsep)
    return [Path(folder) / f"{PREFIX}{_said['pid']}-{_said['name']}.json" for folder in folders if folder]


def heard_by(environment: Mapping[str, str], folder: Path) -> str:
    """The value of ``REPORTS_VARIABLE`` with which a command started in ``environment`` reports to ``folder``, too."""
    outer = environment.get(REPORTS_VARIABLE, "")
    return f"{folder}{os.pathsep}{outer}" if outer else str(folder)


def said(field: str) -> Any:
    """What this process last said under ``field``, or None."""
    return _said.get(field) if _said.get("pid") == os.getpid() else None


def read_reports(folder: Path) -> tuple[Report, ...]:
    """Every readable report in ``folder``, ranks first and in order; what is damaged or too large is passed over."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.startswith(PREFIX))
    except OSError:
        return ()
    found = [
        report for name in names[:MAX_REPORTS] if name.endswith(".json") and (report := _read(folder / name))
    ]
    return tuple(sorted(found, key=lambda report: (report.rank < 0, report.rank, report.host, report.pid)))


def first_refusal(reports: Iterable[Report]) -> str:
    """The first of Headway's own errors that a process ended with, or ""."""
    return next((report.refused for report in reports if report.refused), "")


def _read(path: Path) -> Report | None:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_REPORT_BYTES:
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    given: dict[str, Any] = {}
    for field in fields(Report):
        value = document.get(field.name, field.default)
        if type(value) is not type(field.default):
            return None
        given[field.name] = one_line(value, MAX_SAID) if isinstance(value, str) else value
    return Report(**given)
