"""Runs a user's command, unmodified, such that its ranks record or follow a plan."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from headway.errors import LaunchError
from headway.integrations.reports import (
    RANK_VARIABLE,
    REPORTS_VARIABLE,
    Report,
    first_refusal,
    read_reports,
    reports_value,
)
from headway.plugins import RANK_VARIABLES

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_SPREADING = ("srun", "mpirun", "mpiexec", "prun", "orterun", "jsrun", "aprun", "flux", "ssh", "pdsh", "dsh")
_NODES, _PER_NODE = ("--nnodes",), ("--nproc-per-node", "--nproc_per_node")


def stated_world_size(command: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The number of ranks that ``command`` starts on all hosts together; None if the command does not tell."""
    options = _options(command)
    if options is None:
        return None
    per_node = _stated(options, _PER_NODE, environment.get("PET_NPROC_PER_NODE", ""))
    nodes = _stated(options, _NODES, environment.get("PET_NNODES", "1"))
    return int(per_node) * int(nodes) if per_node.isdecimal() and nodes.isdecimal() else None


def spreads(command: Sequence[str]) -> bool:
    """Whether ``command`` starts processes on other hosts, which do not see this host's temporary folder."""
    return Path(command[0]).name in _SPREADING


def starts_all_here(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether all ranks of the job are on this host, as far as ``command`` and ``environment`` tell."""
    if any(environment.get(name) for name in RANK_VARIABLES):
        return False
    options = _options(command)
    return options is None or _stated(options, _NODES, environment.get("PET_NNODES", "1")) == "1"


def _options(command: Sequence[str]) -> Sequence[str] | None:
    """The words between torchrun and the script."""
    for number, word in enumerate(command):
        if Path(word).name == "torchrun" or (number and command[number - 1] == "-m" and word in _MODULES):
            words = command[number + 1 :]
            ends = [
                at
                for at, option in enumerate(words)
                if option.endswith(".py") or option in ("-m", "--module")
            ]
            return words[: ends[0]] if ends else None
    return None


def _stated(options: Sequence[str], names: tuple[str, ...], default: str) -> str:
    """The last value of an option, or "" if it is abbreviated."""
    stated = default
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name in names:
            stated = value if equals else "".join(options[at + 1 : at + 2])
        elif name.startswith("--n") and any(full.startswith(name) for full in names):
            return ""  # an abbreviation, which torchrun takes too
    return stated


RECORD_VARIABLE = "HEADWAY_RECORD"
PLAN_VARIABLE = "HEADWAY_PLAN"
TIME_VARIABLE = "HEADWAY_TIME"
POLL_S = 0.5
SENT_TO_ALL_WITHIN_S = 2.0  # within which some process ends if a signal was sent to all of them
INSIST_AFTER_S = 12.0
RECORDINGS_WITHIN_S = 20.0  # for ranks of a command that has ended to write their recordings
END_AFTER_REFUSAL_S = 30.0  # for a command to end by itself where a rank refused
LEFT_BEHIND_S = 60.0  # for the remaining ranks to leave after the first
KILL_AFTER_S = 35.0  # torchrun takes 30 s to end workers that do not want to

_INJECT = Path(__file__).parent / "inject"
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How a command ended: its exit status (128 + N for signal N), the signal sent to Headway (or 0), and the reports.

    ``out_of_time`` says that the command was stopped because it took too long.
    """

    status: int
    interrupted_by: int
    reports: tuple[Report, ...]
    out_of_time: bool = False

    @property
    def exit_status(self) -> int:
        """The status with which Headway should exit."""
        return 128 + self.interrupted_by if self.interrupted_by else self.status


def injected_environment(
    base: Mapping[str, str], *, record: str | None = None, plan: str | None = None, time: str | None = None
) -> dict[str, str]:
    """The environment under which ranks activate Headway.

    ``record`` and ``time`` are RecordOptions and TimeOptions as JSON, ``plan`` is a path.
    """
    environment = dict(base)
    environment.pop(RANK_VARIABLE, None)  # a rank may start a command of its own
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(_INJECT) not in entries:
        entries.insert(0, str(_INJECT))
    environment["PYTHONPATH"] = os.pathsep.join(entries)
    if record is not None:
        environment[RECORD_VARIABLE] = record
    if plan is not None:
        environment[PLAN_VARIABLE] = plan
    if time is not None:
        environment[TIME_VARIABLE] = time
    return environment


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    reports: Path,
    on_reports: Callable[[tuple[Report, ...]], None] = lambda _: None,
    *,
    output: IO[bytes] | None = None,
    leaving: bool = False,
    most_s: float = math.inf,
) -> CommandOutcome:
    """Run ``command``, forward SIGINT and SIGTERM, and wait until its ranks on this host have written their recordings.

    ``reports`` is an empty folder for reports of processes; ``on_reports`` is called with them whenever they change.
    The command's output goes to ``output``, if not None. ``leaving`` says that ranks leave when they are done: the
    command is stopped if some ranks have left and others do not, or if not all have left within ``most_s`` seconds.

    Raises LaunchError if the command cannot be started, or with the first error that a rank reported.
    """
    try:
        variables = {REPORTS_VARIABLE: reports_value(environment, reports)}
        process = subprocess.Popen(
            command,
            env={**environment, **variables},
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )
    except OSError as failure:
        raise LaunchError(
            f"cannot start {command[0]}",
            got=failure.strerror,
            expected="a command on PATH",
            fix="Check its spelling.",
        ) from None
    running = _Running(process, reports, on_reports, leaving=leaving, most_s=most_s)
    # Signals that the shell ignores for a background command stay ignored.
    heeded = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, running.forward) for number in heeded}
    try:
        status = running.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    last_reports = read_reports(reports)
    if not running.interrupted_by and (refusal := first_refusal(last_reports)):
        raise LaunchError(refusal)
    status = 128 - status if status < 0 else status
    return CommandOutcome(status, running.interrupted_by, last_reports, running.out_of_time)


class _Running:
    """A running command and the reports of its processes."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        on_reports: Callable[[tuple[Report, ...]], None],
        *,
        leaving: bool,
        most_s: float,
    ) -> None:
        self._process = process
        self._leaving = leaving
        self._out_of_time_at_s = time.monotonic() + most_s
        self.out_of_time = False
        self._folder = folder
        self._on_reports = on_reports
        self._seen_ns = 0
        self._reports: tuple[Report, ...] = ()
        self._end_at_s = float("inf")
        self._ending = signal.SIGTERM
        self._descendants: tuple[int, ...] = ()
        self._forward_at_s = self._insist_at_s = float("inf")
        self.interrupted_by = 0

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal; the first one is delayed, since a terminal or scheduler sends it to every process itself.

        torchrun leaves its ranks behind if a second signal arrives while it ends them.
        """
        if self.interrupted_by:
            self._process.send_signal(number)
            self._forward_at_s = float("inf")
            return
        self.interrupted_by = number
        self._descendants = _descendants(self._process.pid)
        self._forward_at_s = time.monotonic() + SENT_TO_ALL_WITHIN_S
        self._insist_at_s = time.monotonic() + INSIST_AFTER_S

    def _hand_on(self) -> None:
        """Forward the signal if no process of the command has ended since, or if too much time has passed."""
        now_s = time.monotonic()
        if now_s < self._forward_at_s:
            return
        if now_s >= self._insist_at_s or all(map(_is_alive, self._descendants)):
            self._process.send_signal(self.interrupted_by)
            self._forward_at_s = float("inf")

    def wait(self) -> int:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(POLL_S)
                self._wait_for_recordings()
                return status
            self._look()
            self._hand_on()
            if not self.out_of_time and time.monotonic() >= self._out_of_time_at_s:
                self.out_of_time = True
                self._end_at_s = time.monotonic()
            if time.monotonic() >= self._end_at_s:
                self._process.send_signal(self._ending)
                self._ending = signal.SIGKILL
                self._end_at_s = time.monotonic() + KILL_AFTER_S

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            changed_ns = self._folder.stat().st_mtime_ns
            if changed_ns == self._seen_ns:
                return
            self._seen_ns = changed_ns
            self._reports = read_reports(self._folder)
            self._on_reports(self._reports)
            if first_refusal(self._reports):
                self._end_at_s = min(self._end_at_s, time.monotonic() + END_AFTER_REFUSAL_S)
            elif self._leaving:
                self._wait_for_those_left()

    def _wait_for_those_left(self) -> None:
        """Limit the time of remaining ranks, which may wait forever for one that left, until all have left."""
        if self.out_of_time:
            return
        ranks = [report for report in self._reports if report.rank >= 0]
        done = sum(report.done for report in ranks)
        if done and done >= max(report.world_size for report in ranks):
            self._end_at_s = self._out_of_time_at_s = float("inf")
        elif done:
            self._end_at_s = min(self._end_at_s, time.monotonic() + LEFT_BEHIND_S)

    def _wait_for_recordings(self) -> None:
        """Wait for recordings: ranks may outlive their launcher, as under torchrun after two signals."""
        deadline = time.monotonic() + RECORDINGS_WITHIN_S
        while time.monotonic() < deadline:
            self._look()
            here = socket.gethostname()
            if not any(
                report.records and not report.done and report.host == here and _is_alive(report.pid)
                for report in self._reports
            ):
                return
            time.sleep(0.1)


def _descendants(pid: int) -> tuple[int, ...]:
    """``pid`` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name.isdecimal() and (parent := _stat(int(entry.name))[1:2]):
            children.setdefault(int(parent[0]), []).append(int(entry.name))
    pids = [pid]
    for parent_pid in pids:
        pids += children.get(parent_pid, [])
    return tuple(pids)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _stat(pid)[:1] not in (["Z"], ["X"])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; [] if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
