"""Ranks that start at once: forked from a process that has imported torch and Headway and has one thread.

To start Python and import torch costs a core some seconds, hundreds of times in a run of all tests. A forked rank has
an output and an end of its own as one that was started: threads are joined and exit handlers run. The interpreter is
finalised where a test is about that, as it takes half a second.

A server listens on a socket that all processes of one run of tests share. It reads requests, a line of JSON each, and
answers which process works on each and how that ended. ``Forked`` is the other side of that, with the methods of
``subprocess.Popen``. A server ends with its last connection.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests import limits

ROOT = Path(__file__).parents[1]
# Nothing that starts threads (pyarrow).
IMPORTED = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo", "torch.distributed.tensor",
    "torch.utils.checkpoint", "torch.utils.data", "torch.distributed.checkpoint.state_dict", "torch.profiler",
    "numpy", "pydantic", "yaml", "click", "wrapt", "hypothesis", "pytest",
)  # fmt: skip
HEADWAY = (
    "headway.integrations.parallelize", "headway.integrations.plan_injection", "headway.recording.attach",
    "headway.strategies.registry", "headway.strategies.decoupled.wrapper",
    "headway.strategies.parameter_server.runtime", "headway.strategies.partial_all_reduce.host_wrapper",
    "headway.strategies.partial_all_reduce.wrapper", "headway.strategies.pipeline.runtime",
)  # fmt: skip
BARE = "bare"  # of a server: without Headway, for references that are computed where it was never imported
START_LIMIT_S = 60.0
SERVERS = 2  # ranks of one group hash strings in at least two ways, as ranks that were started do


# In the process of the test ----------------------------------------------------------------------------


_started: list[subprocess.Popen[bytes]] = []  # nobody waits for them: they end with their last connection


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
    """A connection to the server at ``path``, which is started where there is none."""

    def __init__(self, path: Path, environment: dict[str, str], arguments: Sequence[str]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._forked = 0
        self._ended: dict[int, int] = {}
        self._unread = b""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(OSError):
                self._socket.connect(str(path))
                return
            path.unlink(missing_ok=True)
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(path), *arguments],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            _started.append(server)
            self._await_server(path)

    def _await_server(self, path: Path) -> None:
        limit = limits.Limit(START_LIMIT_S, list)
        while not limit.over():
            with suppress(OSError):
                return self._socket.connect(str(path))
            time.sleep(0.01)
        raise AssertionError("the server of ranks does not start")

    def fork(self, argument: str, output: Path) -> tuple[int, int]:
        """The number of the new process among those of this connection, and its pid."""
        self._socket.sendall(json.dumps([argument, str(output)]).encode() + b"\n")
        self._forked += 1
        while True:
            for message in self._messages(wait_s=1.0):
                if "pid" in message:
                    return message["number"], message["pid"]

    def status_of(self, number: int) -> int | None:
        self._messages(wait_s=0.0)
        return self._ended.get(number)

    def _messages(self, wait_s: float) -> list[dict[str, int]]:
        if select.select([self._socket], [], [], wait_s)[0]:
            read = self._socket.recv(65536)
            assert read, "the server of ranks has ended"
            self._unread += read
        *lines, self._unread = self._unread.split(b"\n")
        messages: list[dict[str, int]] = [json.loads(line) for line in lines]
        self._ended |= {message["number"]: message["status"] for message in messages if "status" in message}
        return messages


@cache
def _servers(environment: frozenset[tuple[str, str]], *arguments: str) -> tuple[_Server, ...]:
    """Servers with ``environment``, which all processes of one run of tests share."""
    digest = hashlib.sha256(repr((sorted(environment), arguments)).encode()).hexdigest()[:16]
    folder = (
        Path(tempfile.gettempdir())
        / f"headway-ranks-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    )
    return tuple(_Server(folder / f"{digest}-{n}", dict(environment), arguments) for n in range(SERVERS))


def start(rank: int, argument: str, output: Path, environment: dict[str, str], *, bare: bool) -> Forked:
    """Run ``tests.workers`` with ``argument`` in a process of its own, which is ``bare`` of Headway or not."""
    lasting = frozenset(
        (name, value) for name, value in environment.items() if not name.startswith("PYTEST_")
    )
    return Forked(_servers(lasting, *([BARE] if bare else []))[rank % SERVERS], argument, output)


# In the process of the server --------------------------------------------------------------------------


def serve(path: str, *, bare: bool) -> str | None:
    """Answer requests until nobody is connected. Returns, in each forked process, the argument it is to work on."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    gc.disable()
    for module in IMPORTED if bare else (*IMPORTED, *HEADWAY):
        importlib.import_module(module)
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "what is forked from several threads may hang"
    gc.collect()
    gc.freeze()  # what was imported need not be gone through again by every rank
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    unread: dict[socket.socket, bytes] = {}  # of each that is connected
    numbers: dict[socket.socket, int] = {}
    ranks: dict[int, tuple[socket.socket, int]] = {}
    while True:
        waited: list[Any] = [listener, awake, *unread]
        ready, _, _ = select.select(waited, [], [])
        if awake in ready:
            os.read(awake, 4096)
            _tell_who_ended(ranks)
        if listener in ready:
            connection = listener.accept()[0]
            unread[connection], numbers[connection] = b"", 0
        for connection in [each for each in ready if each in unread]:
            read = _read(connection)
            *requests, unread[connection] = (unread[connection] + read).split(b"\n")
            for request in requests:
                argument, output = json.loads(request)
                pid = os.fork()
                if pid == 0:
                    for end in (awake, wake, listener.fileno(), *(each.fileno() for each in unread)):
                        os.close(end)
                    _become_a_rank(output)
                    return str(argument)
                numbers[connection] += 1
                ranks[pid] = connection, numbers[connection]
                _tell(connection, number=numbers[connection], pid=pid)
            if not read:
                del unread[connection]
                for pid in [pid for pid, (asker, _) in ranks.items() if asker is connection]:
                    os.kill(pid, signal.SIGKILL)
                if not unread:
                    Path(path).unlink(missing_ok=True)
                    Path(path).with_suffix(".lock").unlink(missing_ok=True)
                    with suppress(OSError):  # where others still serve
                        Path(path).parent.rmdir()
                    return None


def _read(connection: socket.socket) -> bytes:
    """What has come; nothing where the other side has ended, in whatever way."""
    try:
        return connection.recv(65536)
    except ConnectionError:
        return b""


def _tell(connection: socket.socket, **message: int) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _tell_who_ended(ranks: dict[int, tuple[socket.socket, int]]) -> None:
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection, number = ranks.pop(pid)
        _tell(connection, number=number, status=os.waitstatus_to_exitcode(status))


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
    if (argument := serve(sys.argv[1], bare=BARE in sys.argv)) is not None:
        from tests import workers

        workers.work(argument)
