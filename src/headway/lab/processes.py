"""Starts, finds and ends the processes of a lab."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from headway.lab.isolation import die_with_parent, enter_network

LAB_ID = "HEADWAY_LAB_ID"
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


def start_rank(
    executable: str,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    network: int | None,
    entrance: Path | None,
    stdout: int,
    stderr: int,
) -> int:
    """Start ``command`` in a session of its own, in the network namespace ``network``; returns its pid.

    ``entrance`` is the ``cgroup.procs`` of the control group that it joins first.
    """

    def run() -> None:
        os.setsid()
        if entrance is not None:
            entrance.write_text("0")
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
            os.dup2(source, target)
        os.execve(executable, list(command), dict(env))

    return start_helper(run, network=network)


def start_helper(work: Callable[[], None], *, network: int | None) -> int:
    """Run ``work`` in a forked process in the network namespace ``network``; returns its pid."""
    pid = os.fork()
    if pid == 0:
        _be_child(work, network)
    return pid


def _be_child(work: Callable[[], None], network: int | None) -> NoReturn:
    status = 126
    try:
        signal.set_wakeup_fd(-1)
        for number in _RESTORED:
            signal.signal(number, signal.SIG_DFL)
        die_with_parent()
        if network is not None:
            enter_network(network)
        work()
        status = 0
    except OSError as failure:
        with suppress(OSError):
            os.write(2, f"cannot start: {failure}\n".encode())
    finally:
        os._exit(status)


def reap() -> list[tuple[int, int]]:
    """The children that have ended, as (pid, exit status); 128+N for signal N."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended.append((pid, code if code >= 0 else 128 - code))


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the group that ``pid`` leads, or to ``pid`` if it leads none yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def members(lab_id: str) -> list[int]:
    """The pids of the processes that were started in lab ``lab_id``, going by their environment."""
    wanted = f"{LAB_ID}={lab_id}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def descendants(root: int) -> list[int]:
    """The pids of all living descendants of ``root``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    pids, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        pids += below
        waiting += below
    return pids


def end_everything(lab_id: str | None) -> None:
    """Kill every other process of the lab: all in this process namespace, or (with an id) all of that lab."""
    if lab_id is None:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    for _ in range(50):
        left = {*descendants(os.getpid()), *members(lab_id)}
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if not left:
            return
        time.sleep(0.02)


def start_time(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since boot, or None if there is no such process (zombies count as ended)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
