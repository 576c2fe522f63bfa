"""Ranks that start at once: forked from a process that has imported torch and has one thread.

To start Python and import torch costs a core two seconds, hundreds of times in a run of all tests. A forked rank has an
output and an end of its own as one that was started: exit handlers run, the interpreter is finalised.

A server reads requests from its standard input, a line of JSON each, and says on its standard output which process
answers each and how it ended. ``Forked`` is the other side of that, with the methods of ``subprocess.Popen``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# None of Headway: references are computed where it was never imported. Nor what starts threads (pyarrow).
IMPORTED = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo", "torch.distributed.tensor",
    "torch.utils.checkpoint", "torch.utils.data", "torch.distributed.checkpoint.state_dict", "torch.profiler",
    "numpy", "pydantic", "yaml", "click", "wrapt", "hypothesis", "pytest",
)  # fmt: skip
SERVERS = 2  # ranks of one group hash strings in at least two ways, as ranks that were started do


# In the process of the test ----------------------------------------------------------------------------


class Forked:
    """A process forked from a server, which runs ``tests.workers`` with one argument and writes to a file."""

    def __init__(self, server: _Server, argument: str, output: Path) -> None:
        self._server = server
        self.returncode: int | None = None
        self._number, self.pid = server.fork(argument, output)

    def poll(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.status_of(self._number)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end."""
        while (status := self.poll()) is None:
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        """End it at once, where it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Server:
    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._end)
        self._forked = 0
        self._ended: dict[int, int] = {}
        self._unread = b""

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def fork(self, argument: str, output: Path) -> tuple[int, int]:
        """The number of the new process among those of this server, and its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([argument, str(output)]).encode() + b"\n")
        self._process.stdin.flush()
        self._forked += 1
        while True:
            for said in self._said(wait_s=1.0):
                if "pid" in said:
                    return said["number"], said["pid"]

    def status_of(self, number: int) -> int | None:
        self._said(wait_s=0.0)
        return self._ended.get(number)

    def _said(self, wait_s: float) -> list[dict[str, int]]:
        output = self._process.stdout
        assert output is not None
        if select.select([output], [], [], wait_s)[0]:
            read = os.read(output.fileno(), 65536)
            assert read, "the server of ranks has ended"
            self._unread += read
        *lines, self._unread = self._unread.split(b"\n")
        said: list[dict[str, int]] = [json.loads(line) for line in lines]
        self._ended |= {one["number"]: one["status"] for one in said if "status" in one}
        return said


@cache
def _servers(environment: frozenset[tuple[str, str]]) -> tuple[_Server, ...]:
    return tuple(_Server(dict(environment)) for _ in range(SERVERS))


def start(rank: int, argument: str, output: Path, environment: dict[str, str]) -> Forked:
    """Run ``tests.workers`` with ``argument`` in a process of its own."""
    lasting = frozenset((name, value) for name, value in environment.items() if name != "PYTEST_CURRENT_TEST")
    return Forked(_servers(lasting)[rank % SERVERS], argument, output)


# In the process of the server --------------------------------------------------------------------------


def serve() -> str | None:
    """Answer requests until there are no more. Returns, in each forked process, the argument it is to work on."""
    for module in IMPORTED:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "what is forked from several threads may hang"
    gc.collect()
    gc.freeze()  # what was imported need not be gone through again by every rank
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers: dict[int, int] = {}
    forked, unread = 0, b""
    while True:
        ready, _, _ = select.select([0, awake], [], [])
        if awake in ready:
            os.read(awake, 4096)
            _tell_who_ended(numbers)
        if 0 not in ready:
            continue
        if not (read := os.read(0, 65536)):
            break
        *requests, unread = (unread + read).split(b"\n")
        for request in requests:
            argument, output = json.loads(request)
            pid = os.fork()
            if pid == 0:
                for end in (awake, wake):
                    os.close(end)
                _become_a_rank(output)
                return str(argument)
            numbers[pid] = forked = forked + 1
            _tell(number=forked, pid=pid)
    for pid in numbers:
        os.kill(pid, signal.SIGKILL)
    return None


def _tell(**said: int) -> None:
    os.write(1, json.dumps(said).encode() + b"\n")


def _tell_who_ended(numbers: dict[int, int]) -> None:
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _tell(number=numbers.pop(pid), status=os.waitstatus_to_exitcode(status))


def _become_a_rank(output: str) -> None:
    import numpy as np

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for file, number in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(file, number)
    os.close(nothing)
    os.close(written)
    np.random.seed()  # Python's own generator does so by itself


if __name__ == "__main__":
    if (found := serve()) is not None:
        from tests import workers

        workers.work(found)
