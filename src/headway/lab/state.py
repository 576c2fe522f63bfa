"""Records running labs, and finds and cleans up those that left something behind: one small file per lab.

A lab is running while its launcher lives. A killed launcher leaves its file, and possibly processes and a control
group. Without a process namespace, processes are found by ``HEADWAY_LAB_ID`` in their environment. The control group
has the lab's name, and all processes in it belong to the lab. A process is identified by pid and start time, so that a
reused pid is never mistaken for it. Labs of another process namespace (such as a container) that shares the folder are
listed but never changed.
"""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from headway import files
from headway.errors import LabError
from headway.lab import slow
from headway.lab.processes import members, start_time

_MAX_RECORD_BYTES = 4 * 2**20
_MOST_NAMES = 9
State = Literal["running", "leftover", "elsewhere"]


class Process(BaseModel):
    """A process, identified by pid and start time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int = Field(gt=1)
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The living process ``pid``, or None."""
        started = start_time(pid)
        return None if started is None else cls(pid=pid, start_time=started)

    @property
    def alive(self) -> bool:
        """Whether this very process still lives."""
        return start_time(self.pid) == self.start_time


class Record(BaseModel):
    """The file of a running lab."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[a-z0-9-]{1,64}$")
    mode: str
    hosts: int
    workers: int
    command: tuple[str, ...]
    started: AwareDatetime
    launcher: Process
    orchestrator: Process
    pid_namespace: str
    group: Path | None = None

    @model_validator(mode="after")
    def _names_its_own_group(self) -> Record:
        if self.group is not None and self.group.name != slow.group_name(self.id):
            raise ValueError("the control group is not this lab's")
        return self


@dataclass(frozen=True)
class Lab:
    """A lab: its record, its state, and the pids that still exist."""

    record: Record
    state: State
    pids: tuple[int, ...]


def pid_namespace() -> str:
    """The identity of our process namespace."""
    return os.readlink("/proc/self/ns/pid")


def folder() -> Path:
    """The folder of the records, created if missing. Raises LabError if it is not private."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        tops = [Path(runtime) / "headway"]
    else:  # other users may have taken a name there
        name = Path(tempfile.gettempdir()) / f"headway-{os.getuid()}"
        tops = [name, *(name.with_name(f"{name.name}-{number}") for number in range(2, _MOST_NAMES + 1))]
    for top in tops:
        try:
            if all(_is_private(path) for path in (top, top / "labs")):
                return top / "labs"
        except OSError as failure:
            raise LabError(f"cannot create the folder of running labs {top}", got=failure.strerror) from None
    raise LabError(
        "the folder of running labs is not private to you", got=tops[0],
        fix="Set XDG_RUNTIME_DIR to a folder that only you can write into.",
    )  # fmt: skip


def _is_private(path: Path) -> bool:
    """Whether a folder (created if missing) is private to this user."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def write(record: Record) -> None:
    """Record a lab that is about to run."""
    files.write_text(_path(record.id), record.model_dump_json() + "\n", LabError)


def remove(lab_id: str) -> None:
    """Forget a lab that has ended."""
    _path(lab_id).unlink(missing_ok=True)


def _path(lab_id: str) -> Path:
    return folder() / f"{lab_id}.json"


def labs() -> list[Lab]:
    """All labs on record, oldest first. Files that are not records are skipped."""
    return [_look(record) for record in sorted(_records(), key=lambda record: record.started)]


def _records() -> Iterator[Record]:
    for path in folder().glob("*.json"):
        with suppress(LabError):
            text = files.read_text(path, LabError, "lab record", _MAX_RECORD_BYTES)
            record = files.parse_yaml(text, Record, LabError, "lab record")
            if record.id == path.stem:
                yield record


def _look(record: Record) -> Lab:
    if record.pid_namespace != pid_namespace():
        return Lab(record, "elsewhere", ())
    pids = _members(record)
    if record.orchestrator.alive:
        pids.add(record.orchestrator.pid)
    state: State = "running" if record.launcher.alive else "leftover"
    return Lab(record, state, tuple(sorted(pids)))


def clean(patience_s: float = 5.0) -> tuple[list[Lab], list[Lab]]:
    """Clean up after dead launchers; returns the labs cleaned, and those where something could not be removed.

    Running labs, and processes that no lab of this user started, are not touched.
    """
    cleaned, stuck = [], []
    for lab in labs():
        if lab.state == "leftover":
            if _end_processes(lab.record, patience_s) and _remove_group(lab.record):
                remove(lab.record.id)
                cleaned.append(lab)
            else:
                stuck.append(lab)
    return cleaned, stuck


def _end_processes(record: Record, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        pids: Sequence[int] = _look(record).pids
        for pid in pids:
            with suppress(OSError):
                _kill_if_ours(pid, record)
        if not pids or time.monotonic() > deadline:
            return not pids
        time.sleep(0.05)


def _members(record: Record) -> set[int]:
    grouped = slow.members(record.group) if record.group else set()
    return grouped | set(members(record.id))


def _remove_group(record: Record) -> bool:
    return record.group is None or slow.remove(record.group)


def _kill_if_ours(pid: int, record: Record) -> None:
    """Open a handle, check again, then kill: a pid may be reused between the check and the kill."""
    handle = os.pidfd_open(pid)
    try:
        orchestrator = pid == record.orchestrator.pid and record.orchestrator.alive
        if orchestrator or pid in _members(record):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
