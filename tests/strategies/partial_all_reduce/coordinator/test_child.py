"""A coordinator as a child process: it starts, is started again after a crash, and ends with its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import limits

from headway.errors import LaunchError
from headway.strategies.partial_all_reduce.coordinator import child
from headway.strategies.partial_all_reduce.coordinator.child import CoordinatorProcess, from_environment
from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.coordinator.messages import Member
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice

pytestmark = pytest.mark.processes


def wait_until(what: Callable[[], bool], limit_s: float = 30) -> None:
    limit = limits.Limit(limit_s)
    while not what():
        assert not limit.over(), "it does not happen"
        time.sleep(0.01)


def test_it_serves_and_is_started_again_where_it_was_killed(tmp_path: Path) -> None:
    process = CoordinatorProcess(GeneratorChoice("all"), folder=tmp_path)
    try:
        assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
        client = CoordinatorClient(process.address, process.secret)
        client.join(Member(0, 0, "a:1", "a"), limits.stretched(20))
        first = process.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: process.pid != first)
        wait_until(lambda: client.is_reachable)
        client.ask(0)
        assert client.granted(limits.stretched(20)) is not None
        assert (client.incarnation, client.rejoined) == (1, 0)
        client.leave()
    finally:
        process.close()


def test_workers_find_it_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment() is None
    process = CoordinatorProcess(GeneratorChoice("random", {"group_size": 2}))
    try:
        for name, value in process.environment().items():
            monkeypatch.setenv(name, value)
        assert from_environment() == (process.address, process.secret)
    finally:
        process.close()


def test_what_does_not_start_says_why() -> None:
    with pytest.raises(LaunchError, match="cannot listen on"):
        CoordinatorProcess(GeneratorChoice("all"), host="192.0.2.1")


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from headway.strategies.partial_all_reduce.coordinator.child import CoordinatorProcess\n"
        "from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "print(CoordinatorProcess(GeneratorChoice('all'), folder=folder).pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, timeout=120, check=False
    )
    pid = int(done.stdout)

    def gone() -> bool:
        return not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()

    wait_until(gone)


class Crashing:
    """A process that ends at once, again and again."""

    pid, stdin, stdout = 1, None, None

    def wait(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("steady_s", "starts"), [(3600.0, child.MAX_RESTARTS), (-1.0, 3 * child.MAX_RESTARTS)]
)
def test_crashes_count_that_follow_each_other(
    steady_s: float, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a day, of a job that lasts for weeks, is none that would go on."""
    monkeypatch.setattr(child, "STEADY_S", steady_s)
    monkeypatch.setattr(child, "RESTART_PAUSE_S", 0.0)
    process: Any = object.__new__(child.CoordinatorProcess)
    process._process, process._closing, process.address = Crashing(), threading.Event(), ""
    started: list[str] = []

    def start(listen: str) -> tuple[Crashing, str]:
        started.append(listen)
        if len(started) == 3 * child.MAX_RESTARTS:
            process._closing.set()
            process._process = Ended()
        return process._process, listen

    process._started = start
    process._restart()
    assert len(started) == starts


class Ended(Crashing):
    """One that is asked to end."""

    def terminate(self) -> None:
        pass
