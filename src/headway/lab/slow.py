"""Slows workers: by CPU quota if permitted, otherwise by stopping them repeatedly."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headway.errors import LabError
from headway.lab import processes
from headway.lab.spec import LabSpec

PERIOD_US = 20_000
LEAST_QUOTA_US = 1_000
MOST_PERIOD_US = 1_000_000
LEAST_SHARE = LEAST_QUOTA_US / MOST_PERIOD_US
_PREFIX = "headway-"


# CPU quotas use control groups: one group per lab, named after it, with one subgroup per rank. Version 2 and the
# ``cpu`` controller of version 1 are supported. Existing groups are never changed: if no group around us delegates the
# ``cpu`` controller (version 2), quotas are not permitted. See the kernel's admin-guide/cgroup-v2 and
# scheduler/sched-bwc.


class NotPermittedError(Exception):
    """Quotas cannot be used on this machine; the text says why."""


@dataclass(frozen=True)
class Parent:
    """A group that may hold a lab's group; ``is_own``: this process itself is in it."""

    path: Path
    version: int
    is_own: bool


def find_parent(process: Path = Path("/proc/self")) -> Parent:
    """The nearest group around us that may hold a lab's, going by ``mountinfo`` and ``cgroup`` in ``process``.

    Raises NotPermittedError if there is none.
    """
    reasons = []
    for version, mount, our_group in _hierarchies(process):
        around = [our_group, *our_group.parents]
        around = around[: around.index(mount) + 1]
        if version == 1:
            around = around[:1]
        else:
            around = [path for path in around if "cpu" in _words(path / "cgroup.subtree_control")]
        for path in around:
            if os.access(path, os.W_OK | os.X_OK) and os.access(path / "cgroup.procs", os.W_OK):
                return Parent(path, version, is_own=path == our_group)
        reasons.append(
            f"{around[0]} cannot be written" if around else f"{mount} does not delegate the cpu controller"
        )
    raise NotPermittedError(reasons[-1] if reasons else "no control groups with a cpu controller are mounted")


def _hierarchies(process: Path) -> Iterator[tuple[int, Path, Path]]:
    """Each mounted hierarchy that may control the CPU: version (2 first), mount point, our own group."""
    groups = [line.split(":", 2) for line in _lines(process / "cgroup")]
    mounts = [line.split(" - ") for line in _lines(process / "mountinfo") if " - cgroup" in line]
    for version in (2, 1):
        for place, filesystem in mounts:
            kind, *_, options = filesystem.split()
            if kind != ("cgroup2" if version == 2 else "cgroup"):
                continue
            if version == 1 and "cpu" not in options.split(","):
                continue
            root, mount = place.split()[3:5]
            for _, controllers, group in groups:
                ours = "cpu" in controllers.split(",") if version == 1 else not controllers
                if ours and ".." not in group and Path(group).is_relative_to(root):
                    yield version, Path(mount), Path(mount) / Path(group).relative_to(root)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def quota_us(share: float) -> tuple[int, int]:
    """Quota and period, in microseconds, that give ``share`` of a core, within the kernel's bounds."""
    period_us = min(max(PERIOD_US, math.ceil(LEAST_QUOTA_US / share)), MOST_PERIOD_US)
    return max(LEAST_QUOTA_US, round(share * period_us)), period_us


def group_name(lab_id: str) -> str:
    """The name of the group of lab ``lab_id``."""
    return _PREFIX + lab_id


@dataclass(frozen=True)
class Quotas:
    """The control groups of a lab and its ranks, made or not."""

    path: Path
    version: int
    is_own: bool = False

    @classmethod
    def within(cls, parent: Parent, lab_id: str) -> Quotas:
        """Lab ``lab_id``'s groups in ``parent``; nothing is made yet."""
        return cls(parent.path / group_name(lab_id), parent.version, parent.is_own)

    def make(self, ranks: int, shares: Iterable[float]) -> None:
        """Make the groups, and check that they accept ``shares`` and a process.

        Raises NotPermittedError, with nothing left behind, if they do not.
        """
        try:
            self.path.mkdir()
            if self.version == 2:
                (self.path / "cgroup.subtree_control").write_text("+cpu")
            if self.is_own:
                self._weigh(ranks)
            for rank in range(ranks):
                self._group(rank).mkdir()
            for share in (*shares, 1.0):
                self.apply(0, share)
            enter = ["sh", "-c", 'echo 0 > "$0"', str(self.entrance(0))]
            entered = subprocess.run(enter, check=False, capture_output=True, text=True)
            if entered.returncode:
                raise OSError(0, entered.stderr.strip())
        except OSError as failure:
            remove(self.path)
            raise NotPermittedError(f"{self.path}: {failure.strerror}") from None

    def _weigh(self, ranks: int) -> None:
        """Give every rank the weight of a process outside, a sibling of the lab's group."""
        if self.version == 2:
            (self.path / "cpu.weight").write_text(str(min(100 * ranks, 10_000)))
        else:
            (self.path / "cpu.shares").write_text(str(min(1024 * ranks, 262_144)))

    def apply(self, rank: int, share: float) -> None:
        """Let ``rank`` and all its children together have ``share`` of a core; 1 is no limit. Raises OSError."""
        group = self._group(rank)
        quota, period = quota_us(share)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{'max' if share >= 1 else quota} {period}")
            return
        # The kernel checks quota against period; without a quota any period is accepted.
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text(str(period))
        if share < 1:
            (group / "cpu.cfs_quota_us").write_text(str(quota))

    def describe(self, share: float) -> str:
        """The effect of ``share`` on a rank, in words."""
        return f"gets {share:.0%} of a core" if share < 1 else "has no CPU quota"

    def entrance(self, rank: int) -> Path:
        """The file into which a process writes 0 to join ``rank``'s group, with its future children."""
        return self._group(rank) / "cgroup.procs"

    def _group(self, rank: int) -> Path:
        return self.path / f"rank{rank}"


def members(path: Path) -> set[int]:
    """The pids of the processes in a lab's group and below it."""
    pids: set[int] = set()
    for file in path.rglob("cgroup.procs"):
        pids.update(int(word) for word in _words(file))
    return pids - {0}


def remove(path: Path, patience_s: float = 2.0) -> bool:
    """Remove a lab's group and those below it; returns whether all are gone. A group with a process in it stays."""
    deadline = time.monotonic() + patience_s
    while True:
        for folder, _, _ in os.walk(path, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)
        if not path.exists():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


DUTY_PERIOD_S = 0.04


def choose(spec: LabSpec, lab_id: str) -> tuple[Quotas | None, str]:
    """The quotas for ``spec``'s workers, not yet made; or None, and why they cannot be used.

    Raises LabError if the spec requires quotas and they are not permitted.
    """
    if spec.slow_by == "signals" or (spec.slow_by == "auto" and not spec.slow_shares):
        return None, ""
    try:
        if any(share < LEAST_SHARE for share in spec.slow_shares):
            raise NotPermittedError(f"the kernel permits no share below {LEAST_SHARE:g}")
        quotas = Quotas.within(find_parent(), lab_id)
        return (quotas if spec.slow_shares else None), ""
    except NotPermittedError as refusal:
        return None, instead(spec, refusal)


def instead(spec: LabSpec, refusal: NotPermittedError) -> str:
    """Why signals replace quotas. Raises LabError if the spec requires quotas."""
    if spec.slow_by == "quota":
        raise LabError(
            "slowing workers by CPU quota is not permitted here",
            got=refusal,
            fix="Choose signals or auto, or allow Headway to create control groups.",
        )
    return str(refusal)


def announcement(quotas: Quotas | None, why_not: str) -> str:
    """One line that says how workers are slowed."""
    if quotas:
        return f"slow workers get a CPU quota (cgroup v{quotas.version})"
    because = f" (no CPU quota: {why_not})" if why_not else ""
    return f"slow workers are stopped for part of every {DUTY_PERIOD_S * 1e3:g} ms{because}"


class DutyCycle:
    """Stops ranks for part of every period.

    ``pid_of`` are the ranks that live, and ``after`` calls a function once, after a time in seconds.
    """

    def __init__(self, pid_of: Mapping[int, int], after: Callable[[float, Callable[[], None]], None]) -> None:
        self._pid_of, self._after = pid_of, after
        self._duty_of: dict[int, tuple[float, float]] = {}

    def apply(self, rank: int, share: float) -> None:
        """Let ``rank`` and its children run ``share`` of the time from now on; 1 is all of it."""
        if rank in self._pid_of:
            self._duty_of[rank] = duty = (share, time.monotonic())
            processes.signal_group(self._pid_of[rank], signal.SIGCONT)
            self._turn(rank, duty)

    def describe(self, share: float) -> str:
        """The effect of ``share`` on a rank, in words."""
        return f"runs {share:.0%} of the time"

    def _turn(self, rank: int, duty: tuple[float, float]) -> None:
        """Stop and continue ``rank`` so that it runs its share of every period, until its duty changes."""
        share, began = duty
        if share >= 1 or self._duty_of[rank] is not duty or rank not in self._pid_of:
            return
        phase_s = (time.monotonic() - began) % DUTY_PERIOD_S
        runs = phase_s < share * DUTY_PERIOD_S
        processes.signal_group(self._pid_of[rank], signal.SIGCONT if runs else signal.SIGSTOP)
        next_s = (share * DUTY_PERIOD_S if runs else DUTY_PERIOD_S) - phase_s
        self._after(max(next_s, 0.0005), partial(self._turn, rank, duty))
