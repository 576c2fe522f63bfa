"""Reports of a command's processes to their launcher: one small file per process, replaced atomically.

A process that imports torch writes a file into each folder of ``REPORTS_VARIABLE`` (those of its launcher and of outer
launchers) and replaces it when it becomes a rank, applies the plan or refuses. Launchers read the files while the
command runs. The writing half is plain Python, because it runs in the user's processes.
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
RANK_VARIABLE = "HEADWAY_RANK_PROCESS"  # the pid of the rank, inherited by the processes that it starts
PREFIX = "process-"
MAX_REPORTS = 20_000
MAX_REPORT_BYTES = 16_384
MAX_SAID = 1000


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one process; ``rank`` is -1 until its default process group is initialised.

    ``host`` is the machine, ``host_in_plans`` its name in traces and plans (in a lab, that of the emulated host).

    ``refused`` is an error raised by Headway; ``blind`` is why this Python cannot import Headway; ``alone``: it trains
    without a process group; ``records``: it has started to record; ``done``: its recording is written; ``left``: it
    was told to exit then; ``went_on``: it trained on all the same.

    Under a plan, rank 0 also reports when it began (Unix time of its host), its number of optimizer steps, and the mean
    and standard deviation of the last ``timed_steps`` steps.
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


_report: dict[str, Any] = {}


def is_started_by_rank() -> bool:
    """Whether a rank has started this process, so that its process groups are not the job's."""
    return os.environ.get(RANK_VARIABLE, "") not in ("", str(os.getpid()))


def update(**news: Any) -> bool:
    """Update this process's report with ``news``, fields of ``Report``. Returns whether a launcher can read it.

    Processes started by a rank report nothing.
    """
    if is_started_by_rank():
        return False
    if _report.get("pid") != os.getpid():  # a forked child is a process of its own
        _report.clear()
        _report.update(
            pid=os.getpid(), host=socket.gethostname(), host_in_plans=host_name(), name=os.urandom(4).hex()
        )
    _report.update(news)
    text = json.dumps({key: value for key, value in _report.items() if key != "name"})
    readable = False
    for path in _paths():
        being_written = path.with_suffix(".writing")
        with contextlib.suppress(OSError):
            being_written.write_text(text, encoding="utf-8")
            being_written.replace(path)
            readable = True
    return readable


def withdraw() -> None:
    """Remove this process's report if it contains no news."""
    if _report.get("pid") == os.getpid() and set(_report) == {"pid", "host", "host_in_plans", "name"}:
        for path in _paths():
            with contextlib.suppress(OSError):
                path.unlink()


def _paths() -> list[Path]:
    folders = os.environ.get(REPORTS_VARIABLE, "").split(os.pathsep)
    return [Path(folder) / f"{PREFIX}{_report['pid']}-{_report['name']}.json" for folder in folders if folder]


def reports_value(environment: Mapping[str, str], folder: Path) -> str:
    """The value of ``REPORTS_VARIABLE`` with which a command started in ``environment`` reports to ``folder``, too."""
    outer = environment.get(REPORTS_VARIABLE, "")
    return f"{folder}{os.pathsep}{outer}" if outer else str(folder)


def reported(field: str) -> Any:
    """The value of ``field`` in this process's report, or None."""
    return _report.get(field) if _report.get("pid") == os.getpid() else None


def read_reports(folder: Path) -> tuple[Report, ...]:
    """All readable reports in ``folder``, ranks first and in order; damaged or oversized files are skipped."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.startswith(PREFIX))
    except OSError:
        return ()
    all_reports = [
        report for name in names[:MAX_REPORTS] if name.endswith(".json") and (report := _read(folder / name))
    ]
    return tuple(
        sorted(all_reports, key=lambda report: (report.rank < 0, report.rank, report.host, report.pid))
    )


def first_refusal(reports: Iterable[Report]) -> str:
    """The first error of Headway that a process reported, or ""."""
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
    values: dict[str, Any] = {}
    for field in fields(Report):
        value = document.get(field.name, field.default)
        if type(value) is not type(field.default):
            return None
        values[field.name] = one_line(value, MAX_SAID) if isinstance(value, str) else value
    return Report(**values)
