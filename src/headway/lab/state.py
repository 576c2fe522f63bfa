"""Which labs run, and which left something behind: one small file a lab, in a folder of the user's own.

A lab is running while its launcher lives. A launcher that was killed leaves its file, and perhaps two things more.
Where no process namespace could be had, processes: they are known by ``HEADWAY_LAB_ID`` in their environment.
And a control group: it has the lab's name, so that whatever is in it is the lab's too. A process is named by pid
and start time, so that a reused pid is never mistaken for it. Labs started from another process namespace (a
container, say) that shares the folder are seen but never judged.
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
    """A process, told apart from a later one with the same pid by when it started."""

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
    """What is kept about one lab while it runs."""

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
    """A lab as found: its record, what has become of it, and the pids that are still there."""

    record: Record
    state: State
    pids: tuple[int, ...]


def pid_namespace() -> str:
    """The identity of our process namespace."""
    return os.readlink("/proc/self/ns/pid")


def folder() -> Path:
    """The folder of the records, made where missing. Raises LabError where it is not ours alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        tops = [Path(runtime) / "headway"]
    else:  # where other users can have taken a name
        name = Path(tempfile.gettempdir()) / f"headway-{os.getuid()}"
        tops = [name, *(name.with_name(f"{name.name}-{number}") for number in range(2, _MOST_NAMES + 1))]
    for top in tops:
        try:
            if all(_is_private(path) for path in (top, top / "labs")):
                return top / "labs"
        except OSError as failure:
            raise LabError(f"the folder of running labs {top} cannot be made", got=failure.strerror) from None
    raise LabError(
        "the folder of running labs is not private to you", got=tops[0],
        fix="Set XDG_RUNTIME_DIR to a folder that only you can write into.",
    )  # fmt: skip


def _is_private(path: Path) -> bool:
    """Whether a folder, which is made where it is missing, is this user's alone."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def write(record: Record) -> None:
    """Note a lab that is about to run."""
    files.write_text(_path(record.id), record.model_dump_json() + "\n", LabError)


def remove(lab_id: str) -> None:
    """Forget a lab that has ended."""
    _path(lab_id).unlink(missing_ok=True)


def _path(lab_id: str) -> Path:
    return folder() / f"{lab_id}.json"


def labs() -> list[Lab]:
    """All labs on record, oldest first. Files that are not records are passed over."""
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
    """Remove what dead launchers left; returns the labs cleaned, and those where something would not go.

    Labs that run are not touched, nor any process that no lab of ours started.
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
    """Hold the process first, look again, then kill it: between looking and killing a pid can change hands."""
    handle = os.pidfd_open(pid)
    try:
        orchestrator = pid == record.orchestrator.pid and record.orchestrator.alive
        if orchestrator or pid in _members(record):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
