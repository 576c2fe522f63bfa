"""A coordinator and its workers as processes: they are killed, stopped and continued with real signals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import commands, limits

from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.coordinator.journal import Journal
from headway.strategies.partial_all_reduce.coordinator.messages import Member
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice

pytestmark = pytest.mark.processes
LIMIT_S = 60.0
MAX_LEASE_S = 6.0
SCRIPT = commands.SCRIPTS / "average_in_groups.py"


def wait_until(what: Callable[[], bool]) -> None:
    limit = limits.Limit(LIMIT_S)
    while not what():
        assert not limit.over(), "it does not happen"
        time.sleep(0.005)


class Coordinator:
    """``headway coordinate`` as a process."""

    def __init__(self, journal: Path, *options: object) -> None:
        self._options = ("--json", "--journal", journal, *options)
        self._words = journal.with_name("words")
        self.process, self.address = self._started("127.0.0.1:0")

    def _started(self, listen: str) -> tuple[subprocess.Popen[bytes], str]:
        command = [
            sys.executable,
            "-m",
            "headway",
            "coordinate",
            "--listen",
            listen,
            *map(str, self._options),
        ]
        with self._words.open("ab") as words:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["address"]

    def takes_for_dead(self, worker: int) -> bool:
        """Whether it has said so of the worker."""
        return f"worker {worker} is considered dead" in self._words.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def restart(self) -> None:
        self.process, address = self._started(self.address)
        assert address == self.address


class Worker:
    """A worker as a process, and all that it has said."""

    def __init__(self, address: str, number: int, share_reduced: float = 1.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), address, str(number), str(share_reduced)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.said: list[dict[str, Any]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def has_since(self, count: int, what: Callable[[dict[str, Any]], bool]) -> bool:
        return any(map(what, self.said[count:]))

    def end(self) -> None:
        """Let it leave."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            assert self.process.wait(limits.stretched(LIMIT_S)) == 0
        self.reader.join()


@pytest.fixture
def started() -> Iterator[list[Coordinator | Worker]]:
    """What a test has started, and which is ended with it."""
    everything: list[Coordinator | Worker] = []
    yield everything
    for one in everything:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        if isinstance(one, Worker):
            one.reader.join()
        for pipe in (one.process.stdin, one.process.stdout):
            if pipe is not None:
                pipe.close()


def test_decisions_outlive_a_coordinator_that_is_killed_in_the_middle_of_votes(
    tmp_path: Path, started: list[Coordinator | Worker]
) -> None:
    choice = GeneratorChoice("pairs", {"neighbours": "any"})
    coordinator = Coordinator(tmp_path / "journal", "--generator", choice.text)
    workers = [Worker(coordinator.address, number, 0.8) for number in range(4)]
    started += [coordinator, *workers]
    for _ in range(4):
        counts = [len(worker.said) for worker in workers]
        wait_until(lambda: all(len(w.said) > n + 20 for w, n in zip(workers, counts, strict=True)))  # noqa: B023
        coordinator.kill()
        coordinator.restart()
    counts = [len(worker.said) for worker in workers]
    wait_until(lambda: all(len(w.said) > n + 20 for w, n in zip(workers, counts, strict=True)))
    for worker in workers:
        worker.end()
    _check_what_they_heard(workers, coordinator.address)
    coordinator.process.terminate()
    assert coordinator.process.wait(limits.stretched(LIMIT_S)) == 0
    assert all(said["rejoined"] == 0 for worker in workers for said in worker.said)
    ledger = Journal(tmp_path / "journal", str(choice)).open(choice.make, "another")
    assert not ledger.members


def _check_what_they_heard(workers: list[Worker], address: str) -> None:
    """All members of a group heard the same, what the coordinator says still, and what their votes allow."""
    by_key: dict[str, list[dict[str, Any]]] = {}
    for worker in workers:
        for said in worker.said:
            if "reduced" in said:
                by_key.setdefault(said["key"], []).append(said)
    numbers = [group[0]["number"] for group in by_key.values()]
    assert len(set(numbers)) == len(numbers), "a number was granted twice"
    watcher = CoordinatorClient(address)
    watcher.join(Member(9, 0, "9:1", "9"), limits.stretched(LIMIT_S))
    outcomes = []
    for group in by_key.values():
        assert len({json.dumps(each["members"]) for each in group}) == 1
        outcome = watcher.outcome(group[0]["number"], limits.stretched(LIMIT_S))
        outcomes.append(outcome)
        for each in group:
            assert each["heard"] in (None, outcome)
            assert each["committed"] is (each["heard"] is True)
            assert not (outcome and not each["reduced"])
    watcher.leave()
    assert True in outcomes
    assert False in outcomes


def test_workers_that_are_killed_or_stopped_are_not_waited_for(
    tmp_path: Path, started: list[Coordinator | Worker]
) -> None:
    lease_s = min(limits.stretched(1.0), MAX_LEASE_S)
    coordinator = Coordinator(tmp_path / "journal", "--generator", "all", "--lease", f"{lease_s}s")
    started.append(coordinator)
    workers = [Worker(coordinator.address, number) for number in range(3)]
    started += workers
    first, second, third = workers

    def sees(*members: int) -> Callable[[dict[str, Any]], bool]:
        return lambda said: [worker for worker, _ in said["members"]] == list(members)

    wait_until(lambda: first.has_since(0, sees(0, 1, 2)))
    third.process.kill()
    third.process.wait()
    count = len(first.said)
    wait_until(lambda: first.has_since(count, sees(0, 1)))
    os.kill(second.process.pid, signal.SIGSTOP)
    count = len(first.said)
    wait_until(lambda: first.has_since(count, sees(0)))
    # Groups go on without a worker that is only late, which may come before its lease has ended.
    wait_until(lambda: coordinator.takes_for_dead(1))
    os.kill(second.process.pid, signal.SIGCONT)
    count = len(second.said)
    wait_until(lambda: second.has_since(count, lambda said: sees(0, 1)(said) and said["rejoined"] > 0))
    assert second.said[-1]["members"][1][1] > 1, "a new incarnation"
    first.end()
    second.end()


def test_a_coordinator_whose_words_nobody_reads_goes_on() -> None:
    command = [
        sys.executable,
        "-m",
        "headway",
        "coordinate",
        "--json",
        "--listen",
        "127.0.0.1:0",
        "--lease",
        "2s",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    address = json.loads(process.stdout.readline())["address"]
    process.stderr.close()
    for worker in range(2):
        client = CoordinatorClient(address)
        client.join(Member(worker, 0, f"{worker}:1", f"{worker}"), limits.stretched(LIMIT_S))
        client.leave()
    assert process.poll() is None
    process.terminate()
    assert process.wait(limits.stretched(LIMIT_S)) == 0
    process.stdout.close()


def test_workers_outlive_a_coordinator_that_is_stopped(
    tmp_path: Path, started: list[Coordinator | Worker]
) -> None:
    lease_s = min(limits.stretched(1.0), MAX_LEASE_S)
    coordinator = Coordinator(tmp_path / "journal", "--generator", "all", "--lease", f"{lease_s}s")
    client = CoordinatorClient(coordinator.address)
    started.append(coordinator)
    client.join(Member(0, 0, "0:1", "0"), limits.stretched(LIMIT_S))
    os.kill(coordinator.process.pid, signal.SIGSTOP)
    wait_until(lambda: not client.is_reachable)
    client.ask(0)
    assert client.granted(limits.stretched(LIMIT_S)) is None
    os.kill(coordinator.process.pid, signal.SIGCONT)
    wait_until(lambda: client.is_reachable)
    client.ask(1)
    assert client.granted(limits.stretched(LIMIT_S)) is not None
    client.leave()


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, started: list[Coordinator | Worker]) -> None:
    done = commands.headway("coordinate", "--listen", "0.0.0.0:0")
    assert (done.returncode, "needs a secret" in done.stderr) == (2, True)
    done = commands.headway("coordinate", "--listen", "127.0.0.1:0", "--generator", "nobody")
    assert (done.returncode, "unknown group generator" in done.stderr) == (2, True)
    coordinator = Coordinator(tmp_path / "journal")
    started.append(coordinator)
    done = commands.headway("coordinate", "--listen", "127.0.0.1:0", "--journal", tmp_path / "journal")
    assert (done.returncode, "is in use" in done.stderr) == (2, True)
    done = commands.headway("coordinate", "--listen", coordinator.address)
    assert (done.returncode, "cannot listen on" in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr
    coordinator.process.send_signal(signal.SIGINT)
    assert coordinator.process.wait(limits.stretched(LIMIT_S)) == 0


def test_a_full_disk_ends_it_and_workers_train_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headway", "coordinate", "--json", "--generator", "all"]
    command += ["--listen", "127.0.0.1:0", "--journal", str(tmp_path / "journal")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # what is written has to be whole
    limited = ["sh", "-c", f"ulimit -f 16; exec {shlex.join(command)}"]  # blocks of 512 bytes, or of 1024
    with subprocess.Popen(
        limited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        client = CoordinatorClient(json.loads(process.stdout.readline())["address"])
        client.join(Member(0, 0, "0:1", "0"), limits.stretched(LIMIT_S))
        while client.is_reachable:
            client.ask(0)
            client.granted(limits.stretched(LIMIT_S))
        said = process.communicate(timeout=limits.stretched(LIMIT_S))[1].decode()
    client.leave()
    assert process.returncode == 2
    assert "journal cannot be written; got File too large" in said
    assert "Traceback" not in said
    Journal(tmp_path / "journal", str(GeneratorChoice("all"))).open(GeneratorChoice("all").make, "another")
