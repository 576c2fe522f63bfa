"""Runs a coordinator as a child process of the job's launcher and restarts it after crashes."""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from headway import files
from headway.errors import LaunchError
from headway.rpc.interface import format_address
from headway.strategies.partial_all_reduce.coordinator import transport
from headway.strategies.partial_all_reduce.coordinator.options import DEFAULT_LEASE_S, GeneratorChoice
from headway.strategies.partial_all_reduce.coordinator.security import checked_secret, write_secret

ADDRESS_VARIABLE = "HEADWAY_COORDINATOR"
SECRET_VARIABLE = "HEADWAY_COORDINATOR_SECRET"
START_S = 60.0
END_S = 5.0
MAX_RESTARTS = 10
"""Restarts in a row before giving up."""
STEADY_S = 60.0
"""A coordinator that ran this long resets the count of restarts."""
RESTART_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # doubled from one to the next: a full disk may get room
_JOURNAL, _SECRET = "journal", "secret"
_LINE_BYTES = 4096

_log = logging.getLogger("headway")


class CoordinatorProcess:
    """A coordinator in a child process, with a new secret; it ends with this process at the latest.

    Secret and journal are in ``folder``, by default a temporary one of mode 700, which is removed on close or, if this
    process is killed, when the next coordinator starts. With the folder of an earlier coordinator, the job resumes from
    its journal. Raises LaunchError with the child's last line if it does not start.
    """

    def __init__(
        self,
        choice: GeneratorChoice,
        *,
        host: str = "127.0.0.1",
        lease_s: float = DEFAULT_LEASE_S,
        folder: Path | None = None,
        metrics: str | None = None,
    ) -> None:
        transport.require_grpc()
        self._kept = ExitStack()  # the temporary folder
        self._folder = folder or self._kept.enter_context(files.temporary_folder("headway-coordinator-"))
        self._choice, self._lease_s, self._metrics = choice, lease_s, metrics
        self._closing = threading.Event()
        try:
            secret = self._folder / _SECRET
            self._secret = secret.read_text().strip() if secret.exists() else write_secret(secret)
            self._process, self.address = self._started(format_address(host, 0))
        except BaseException:
            self._remove()
            raise
        self._watch = threading.Thread(target=self._restart, name="headway-coordinator", daemon=True)
        self._watch.start()

    @property
    def secret(self) -> bytes:
        """The secret that workers need."""
        return self._secret.encode()

    @property
    def pid(self) -> int:
        """Process id of the current coordinator, or of the last one."""
        return self._process.pid

    def environment(self) -> Mapping[str, str]:
        """Environment variables with address and secret for workers; other users cannot read them."""
        return {ADDRESS_VARIABLE: self.address, SECRET_VARIABLE: self._secret}

    def close(self) -> None:
        """Stop the coordinator and remove its temporary folder."""
        self._closing.set()
        process = self._process
        process.terminate()
        self._watch.join(END_S)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _close_pipes(self._process)
        self._remove()

    def _restart(self) -> None:
        """Restart the coordinator whenever it crashes."""
        crashes, started_s = 0, time.monotonic()
        while True:
            status = self._process.wait()
            _close_pipes(self._process)
            if self._closing.is_set():
                return
            crashes = 1 if time.monotonic() > started_s + STEADY_S else crashes + 1
            if crashes > MAX_RESTARTS:
                break
            _log.warning("the coordinator exited with status %d: restarting it", status)
            if self._closing.wait(min(RESTART_PAUSE_S * 2 ** (crashes - 1), LONGEST_PAUSE_S)):
                return
            started_s = time.monotonic()
            try:
                self._process, _ = self._started(self.address)
            except (LaunchError, OSError) as failure:
                _log.warning("%s", failure)
            if self._closing.is_set():
                self._process.terminate()
        _log.warning("the coordinator keeps crashing and is not restarted: workers train alone")

    def _started(self, listen: str) -> tuple[subprocess.Popen[bytes], str]:
        """Start a process; returns it and its address once it listens."""
        command = [
            sys.executable, "-P", "-m", "headway", "coordinate", "--json", "--with-parent", "--listen", listen,
            "--secret-file", str(self._folder / _SECRET), "--journal", str(self._folder / _JOURNAL),
            "--lease", f"{self._lease_s}s", "--generator", self._choice.text, "--seed", str(self._choice.seed),
        ]  # fmt: skip
        if self._metrics is not None:
            command += ["--metrics", self._metrics]
        log = self._folder / "said"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,  # signals from the terminal are for the launcher
            )  # fmt: skip
        assert process.stdout is not None
        line = _line(process.stdout, START_S)
        try:
            return process, str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError):
            process.kill()
            process.wait()
            _close_pipes(process)
            words = log.read_text(errors="replace").strip().splitlines()
            raise LaunchError(
                "the coordinator did not start", got=words[-1] if words else "no address in time"
            ) from None

    def _remove(self) -> None:
        self._kept.close()


def from_environment() -> tuple[str, bytes | None] | None:
    """Return address and secret from the environment; None without an address.

    Raises UserError if the secret is too short.
    """
    address, secret = os.environ.get(ADDRESS_VARIABLE), os.environ.get(SECRET_VARIABLE)
    if not address:
        return None
    return address, checked_secret(secret, SECRET_VARIABLE) if secret else None


def _line(pipe: IO[bytes], limit_s: float) -> bytes:
    """Read the first line from ``pipe``, or as much as arrives in time."""
    deadline = time.monotonic() + limit_s
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while b"\n" not in data and len(data) < _LINE_BYTES:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            part = os.read(pipe.fileno(), _LINE_BYTES)
            if not part:
                break
            data += part
    return data


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
