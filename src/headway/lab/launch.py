"""Run a command's ranks in a lab, and leave nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from headway.errors import HeadwayError, LabError, LaunchError
from headway.lab import isolation, state
from headway.lab.environment import rank_environments
from headway.lab.orchestrator import START
from headway.lab.output import Lines, OnLine, Stream, printer
from headway.lab.processes import LAB_ID
from headway.lab.spec import LabSpec

Mode = Literal["auto", "root", "user", "loopback"]
MODES: tuple[Mode, ...] = ("auto", "root", "user", "loopback")
DEFAULT_GRACE_S = 10.0
_ENDED = "the lab ended before its ranks did; was it killed, or is memory short?"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ADMIN_CAPABILITIES = 1 << 21 | 1 << 12  # CAP_SYS_ADMIN, CAP_NET_ADMIN


def run(
    spec: LabSpec,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    mode: Mode = "auto",
    grace_s: float = DEFAULT_GRACE_S,
    timeout_s: float | None = None,
    prefix: bool = True,
    on_line: OnLine | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> int:
    """Run ``command`` once a rank in the lab ``spec`` and wait for it; returns the exit status.

    The status is 0 when every rank ends with 0, otherwise that of the rank that failed first (128+N where
    signal N ended it), or 124 when ``timeout_s`` passed first. When a rank fails, the others have ``grace_s``
    to end by themselves; then they get SIGTERM, and ``grace_s`` later SIGKILL. SIGINT, SIGTERM and SIGHUP
    are passed on to the ranks, with the same ``grace_s`` before SIGKILL, if this is the main thread. However
    this function or its process ends, the ranks end too.

    Args:
        spec: The lab.
        command: The program and its arguments, found as a shell would find it.
        env: The ranks' whole environment but for what the lab sets; this process's own where None.
        mode: ``root`` and ``user`` shape links in namespaces, with and without privilege, ``loopback`` does not
            shape anything; ``auto`` takes the first of these that is permitted.
        grace_s: Seconds between asking and forcing, see above.
        timeout_s: Seconds the ranks may run.
        prefix: Print ``[rank N]`` before each line of output.
        on_line: Called with (rank, ``"stdout"`` or ``"stderr"``, line without its end) instead of printing.
        on_notice: Called with each notice (the mode, changes on the timeline) instead of printing to stderr.

    Raises:
        LaunchError: The command cannot be found.
        LabError: A mode was asked for and is not permitted, or pyroute2 is missing.
        HeadwayError: The lab ended without a status, as when the machine runs out of memory.
    """
    env = dict(os.environ if env is None else env)
    job = _Job(
        id=f"lab-{os.getpid()}-{secrets.token_hex(4)}",
        spec=spec,
        command=tuple(command),
        executable=_find(command, env),
        env=env,
        grace_s=grace_s,
        timeout_s=timeout_s,
    )
    notice = on_notice or _print_notice
    with _opened(job, mode, notice) as lab:
        return lab.run(on_line or printer(prefix=prefix), notice)


def _print_notice(text: str) -> None:
    print(f"headway lab: {text}", file=sys.stderr, flush=True)


def _find(command: Sequence[str], env: Mapping[str, str]) -> str:
    if not command:
        raise LaunchError("no command to run", expected="a program and its arguments")
    found = shutil.which(command[0], path=env.get("PATH", os.defpath))
    if found is None:
        raise LaunchError("command not found", got=command[0], expected="a program on PATH or a path to one")
    return str(Path(found).absolute())


@dataclass(frozen=True)
class _Job:
    id: str
    spec: LabSpec
    command: tuple[str, ...]
    executable: str
    env: dict[str, str]
    grace_s: float
    timeout_s: float | None


@dataclass(frozen=True)
class _Attempt:
    mode: str
    processes: bool


class _RefusedError(Exception):
    """An attempt is not permitted on this machine."""


def _attempts(mode: Mode) -> list[_Attempt]:
    """Ways to isolate, the best first; a process namespace makes sure that nothing survives."""
    if mode == "loopback":
        return [_Attempt("loopback", False)]
    if find_spec("pyroute2") is None:
        raise LabError(
            "shaping links needs pyroute2",
            fix="pip install 'headway[lab]', or choose the loopback mode, which shapes nothing.",
        )
    if mode != "auto":
        return [_Attempt(mode, True), _Attempt(mode, False)]
    modes = ["root", "user"] if _has_capabilities() else ["user"]
    return [*(_Attempt(name, own) for name in modes for own in (True, False)), _Attempt("loopback", False)]


def _has_capabilities() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16) & _ADMIN_CAPABILITIES == _ADMIN_CAPABILITIES
    return False


@contextmanager
def _opened(job: _Job, mode: Mode, notice: Callable[[str], None]) -> Iterator[_Lab]:
    """Open the best lab that is permitted, and say which; close it whatever happens."""
    if sys.platform != "linux":
        raise LabError("the lab needs Linux", got=sys.platform)
    reasons = []
    for attempt in _attempts(mode):
        with ExitStack() as stack:
            try:
                lab = stack.enter_context(_Lab.opened(job, attempt))
            except _RefusedError as refusal:
                reasons.append(f"{attempt.mode}: {refusal}")
                continue
            _say_mode(job.spec, attempt, reasons, notice)
            yield lab
            return
    raise LabError(
        f"the lab mode {mode} is not permitted here",
        got=reasons[0],
        fix="Choose another mode; auto takes the best that is permitted.",
    )


def _say_mode(spec: LabSpec, attempt: _Attempt, reasons: list[str], notice: Callable[[str], None]) -> None:
    what = {
        "root": "network namespaces (root)",
        "user": "network namespaces (unprivileged)",
        "loopback": "plain loopback",
    }[attempt.mode]
    notice(f"{len(spec.links)} hosts, {spec.world_size} workers, {what}")
    if attempt.mode == "loopback":
        because = f" ({reasons[0]})" if reasons else ""
        notice(f"links are unshaped: hosts share one loopback interface, rates do not hold{because}")


@dataclass
class _Lab:
    """A lab whose network stands and whose ranks have not started."""

    job: _Job
    attempt: _Attempt
    orchestrator: subprocess.Popen[bytes]
    control: socket.socket
    outputs: dict[int, tuple[int, Stream]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def opened(cls, job: _Job, attempt: _Attempt) -> Iterator[_Lab]:
        """Start the orchestrator and let it build. Raises _RefusedError where something is not permitted."""
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
        environments = rank_environments(job.spec, job.env, job.id, loopback_port=loopback_port)
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
            "ranks": ranks,
        }
        with suppress(OSError):  # an orchestrator that was refused has closed its end, and said so before
            self.control.sendall((json.dumps(message) + "\n").encode())
        answer = _read_line(self.control)
        if "refused" in answer:
            raise _RefusedError(answer["refused"])
        if "ready" not in answer:
            raise HeadwayError(_ENDED)

    def run(self, on_line: OnLine, notice: Callable[[str], None]) -> int:
        """Start the ranks and follow them to the end."""
        with _forwarding(self.control):
            state.write(self._record())
            try:
                self.control.sendall(START)
                status = self._follow(on_line, notice)
            finally:
                self.control.close()
                _end(self.orchestrator)
                state.remove(self.job.id)
        if status is None:
            raise HeadwayError(_ENDED)
        return status

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
                        ends = time.monotonic() + 2.0  # what a rank left behind may hold its output open
        return status


def _start_orchestrator(
    job: _Job, attempt: _Attempt, descriptors: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    source = Path(isolation.__file__)
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source.parents[2]), env.get("PYTHONPATH"))))
    env["OPENBLAS_NUM_THREADS"] = "1"
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
    """Let the orchestrator end everything, which the closed control socket asks of it, then insist."""
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


@contextmanager
def _forwarding(control: socket.socket) -> Iterator[None]:
    """Pass signals on to the ranks for as long as the block runs."""
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
