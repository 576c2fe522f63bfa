"""One lab from the launcher's side: start the orchestrator, follow the ranks, end everything."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from headway.errors import HeadwayError, LabError
from headway.lab import isolation, slow, state
from headway.lab.network import INTERFACE, address
from headway.lab.orchestrator import START, START_IN_GROUPS
from headway.lab.processes import LAB_ID
from headway.lab.spec import LabSpec

MASTER_PORT = 29500
_FOREIGN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


def rank_environments(
    spec: LabSpec, base: Mapping[str, str], lab_id: str, *, mode: str, loopback_port: int | None = None
) -> list[dict[str, str]]:
    """One environment a rank, ``base`` with the lab's variables over it.

    With ``loopback_port`` the hosts are not namespaces: rank 0 listens there, on 127.0.0.1.
    ``OMP_NUM_THREADS`` and ``PYTHONUNBUFFERED`` default to 1.
    """
    loopback = loopback_port is not None
    interface = "lo" if loopback else INTERFACE
    common = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    common |= {name: value for name, value in base.items() if name not in _FOREIGN}
    common |= {
        "WORLD_SIZE": str(spec.world_size),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "GROUP_WORLD_SIZE": str(len(spec.links)),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1" if loopback else address(0),
        "MASTER_PORT": str(loopback_port or MASTER_PORT),
        "TORCHELASTIC_RUN_ID": lab_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "HEADWAY_LAB_MODE": mode,
        LAB_ID: lab_id,
    }
    environments: list[dict[str, str]] = []
    for group, link in enumerate(spec.links):
        for local_rank in range(link.workers):
            rank = len(environments)
            rank_variables = {
                "RANK": str(rank),
                "ROLE_RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(link.workers),
                "GROUP_RANK": str(group),
                "HEADWAY_HOST": link.name,
                "HEADWAY_PACE_FACTOR": f"{spec.pace.get(rank, 1.0):g}",
            }
            environments.append(common | rank_variables)
    return environments


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def forwarding(control: socket.socket) -> Iterator[None]:
    """Pass signals on over ``control``, one byte each, for as long as the block runs; from the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, _: object) -> None:
        with suppress(OSError):
            control.send(bytes([number]))

    heard = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


LONGEST_LINE_BYTES = 2**20
Stream = Literal["stdout", "stderr"]
OnLine = Callable[[int, Stream, str], None]


class Lines:
    """Splits a stream of bytes into lines; longer lines are cut at 1 MiB."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Add ``data``; returns the lines that are now complete, without line ends."""
        self._rest += data
        *complete, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(self._rest) > LONGEST_LINE_BYTES:
            complete.append(self._rest)
            self._rest = bytearray()
        return [_text(line) for line in complete]

    def end(self) -> list[str]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, bytearray()
        return [_text(rest)] if rest else []


def _text(line: bytes | bytearray) -> str:
    return line.decode("utf-8", errors="replace")


def printer(*, prefix: bool) -> OnLine:
    """Print lines to this process's own stdout and stderr, with ``[rank N]`` before them."""

    def show(rank: int, stream: Stream, line: str) -> None:
        file = sys.stdout if stream == "stdout" else sys.stderr
        file.write(f"[rank {rank}] {line}\n" if prefix else f"{line}\n")
        file.flush()

    return show


_ENDED = "the lab's process ended before its ranks; check whether it was killed or memory ran out"


@dataclass(frozen=True)
class LabJob:
    """A lab and the command to run in it; ``executable`` is the path of ``command[0]``.

    ``quotas`` are the control groups to make for the ranks, if any.
    """

    id: str
    spec: LabSpec
    command: tuple[str, ...]
    executable: str
    env: dict[str, str]
    grace_s: float
    timeout_s: float | None
    quotas: slow.Quotas | None = None
    why_no_quotas: str = ""


@dataclass(frozen=True)
class Attempt:
    """One way to isolate: ``root``, ``user`` or ``loopback``, with a process namespace or without."""

    mode: str
    processes: bool


class RefusedError(Exception):
    """An attempt is not permitted on this machine."""


@dataclass
class Session:
    """A lab with its network, before and while its ranks run."""

    job: LabJob
    attempt: Attempt
    orchestrator: subprocess.Popen[bytes]
    control: socket.socket
    outputs: dict[int, tuple[int, Stream]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def opened(cls, job: LabJob, attempt: Attempt) -> Iterator[Session]:
        """Start the orchestrator, which builds the network. Raises RefusedError if something is not permitted."""
        ours, theirs = socket.socketpair()
        outputs: dict[int, tuple[int, Stream]] = {}
        inputs: list[int] = []
        with ours, theirs, ExitStack() as stack:
            try:
                for rank in range(job.spec.world_size):
                    for stream in ("stdout", "stderr"):
                        read, write = os.pipe()
                        stack.callback(os.close, read)
                        inputs.append(write)
                        outputs[read] = (rank, "stdout" if stream == "stdout" else "stderr")
                orchestrator = _start_orchestrator(job, attempt, (theirs.fileno(), *inputs))
            except OSError as failure:
                raise LabError("the lab cannot be started", got=failure.strerror) from None
            finally:
                for write in inputs:
                    os.close(write)
                theirs.close()
            try:
                lab = cls(job, attempt, orchestrator, ours, outputs)
                lab._prepare(inputs)
                yield lab
            finally:
                ours.close()
                _end(orchestrator)

    def _prepare(self, inputs: list[int]) -> None:
        """Send the job and wait for the network."""
        loopback_port = _free_port() if self.attempt.mode == "loopback" else None
        job = self.job
        environments = rank_environments(
            job.spec, job.env, job.id, mode=self.attempt.mode, loopback_port=loopback_port
        )
        ranks = [
            {"env": env, "stdout": inputs[2 * rank], "stderr": inputs[2 * rank + 1]}
            for rank, env in enumerate(environments)
        ]
        message = {
            "spec": job.spec.model_dump_json(by_alias=True),
            "command": job.command,
            "executable": job.executable,
            "grace_s": job.grace_s,
            "timeout_s": job.timeout_s,
            "quotas": job.quotas and {"path": str(job.quotas.path), "version": job.quotas.version},
            "ranks": ranks,
        }
        with suppress(
            OSError
        ):  # an orchestrator that was refused has already sent the reason and closed its end
            self.control.sendall((json.dumps(message) + "\n").encode())
        answer = _read_line(self.control)
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        if "ready" not in answer:
            raise HeadwayError(_ENDED)

    def run(self, on_line: OnLine, notice: Callable[[str], None]) -> int:
        """Start the ranks and follow them to the end."""
        with forwarding(self.control):
            state.write(self._record())
            try:
                in_groups = self._choose_slowing(notice)
                self.control.sendall(START_IN_GROUPS if in_groups else START)
                status = self._follow(on_line, notice)
            finally:
                self.control.close()
                _end(self.orchestrator)
                if self.job.quotas is None or slow.remove(self.job.quotas.path):
                    state.remove(self.job.id)
        if status is None:
            raise HeadwayError(_ENDED)
        return status

    def _choose_slowing(self, notice: Callable[[str], None]) -> bool:
        """Make the ranks' control groups if there are any, and print how workers are slowed."""
        spec, quotas, why_not = self.job.spec, self.job.quotas, self.job.why_no_quotas
        if quotas is not None:
            try:
                quotas.make(spec.world_size, spec.slow_shares)
            except slow.NotPermittedError as refusal:
                quotas, why_not = None, slow.instead(spec, refusal)
        if spec.slow_shares:
            notice(slow.announcement(quotas, why_not))
        return quotas is not None

    def _record(self) -> state.Record:
        launcher = state.Process.of(os.getpid())
        orchestrator = state.Process.of(self.orchestrator.pid)
        if launcher is None or orchestrator is None:
            raise HeadwayError(_ENDED)
        return state.Record(
            id=self.job.id,
            mode=self.attempt.mode,
            hosts=len(self.job.spec.links),
            workers=self.job.spec.world_size,
            command=self.job.command,
            started=datetime.now(UTC),
            launcher=launcher,
            orchestrator=orchestrator,
            pid_namespace=state.pid_namespace(),
            group=self.job.quotas.path if self.job.quotas else None,
        )

    def _follow(self, on_line: OnLine, notice: Callable[[str], None]) -> int | None:
        status: int | None = None
        messages = Lines()
        cutters = {descriptor: Lines() for descriptor in self.outputs}
        with selectors.DefaultSelector() as selector:
            for descriptor in (self.control.fileno(), *self.outputs):
                selector.register(descriptor, selectors.EVENT_READ)
            ends: float | None = None
            while selector.get_map() and (ends is None or time.monotonic() < ends):
                for key, _ in selector.select(None if ends is None else 0.1):
                    data = _read(key.fd)
                    if not data:
                        selector.unregister(key.fd)
                    if key.fd in self.outputs:
                        rank, stream = self.outputs[key.fd]
                        cutter = cutters[key.fd]
                        for line in cutter.feed(data) if data else cutter.end():
                            on_line(rank, stream, line)
                        continue
                    for text in messages.feed(data):
                        message = json.loads(text)
                        status = message.get("status", status)
                        if "notice" in message:
                            notice(message["notice"])
                    if not data:
                        ends = time.monotonic() + 2.0  # a leftover process of a rank may keep its output open
        return status


def _start_orchestrator(
    job: LabJob, attempt: Attempt, descriptors: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    source = Path(isolation.__file__)
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source.parents[2]), env.get("PYTHONPATH"))))
    env["OPENBLAS_NUM_THREADS"] = "1"
    env.pop("RANK", None)  # what is injected into ranks stays out of this process
    env[LAB_ID] = job.id
    kind = "processes" if attempt.processes else "plain"
    return subprocess.Popen(
        [sys.executable, "-P", str(source), str(descriptors[0]), attempt.mode, kind],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
    )


def _end(orchestrator: subprocess.Popen[bytes]) -> None:
    """Wait for the orchestrator to end, which the closed control socket requests; kill it after 10 s."""
    try:
        orchestrator.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        orchestrator.kill()
        orchestrator.wait()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 2**16)
    except ConnectionResetError:
        return b""


def _read_line(control: socket.socket) -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = _read(control.fileno())
        if not part:
            return {}
        line += part
    message: dict[str, Any] = json.loads(line)
    return message


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
