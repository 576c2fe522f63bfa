"""Runs a command's ranks in a lab, and cleans up afterwards."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from headway.errors import LabError, LaunchError, how_to_install
from headway.lab import slow
from headway.lab.session import Attempt, LabJob, OnLine, RefusedError, Session, printer
from headway.lab.spec import LabSpec

Mode = Literal["auto", "root", "user", "loopback"]
MODES: tuple[Mode, ...] = ("auto", "root", "user", "loopback")
DEFAULT_GRACE_S = 10.0
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
    """Run ``command`` once per rank in the lab ``spec`` and wait for it; returns the exit status.

    The status is 0 when every rank ends with 0, otherwise that of the rank that failed first (128+N if
    signal N ended it), or 124 when ``timeout_s`` passed first. When a rank fails, the others have ``grace_s``
    to end by themselves; then they get SIGTERM, and ``grace_s`` later SIGKILL. SIGINT, SIGTERM and SIGHUP
    are passed on to the ranks, with the same ``grace_s`` before SIGKILL, if this is the main thread. However
    this function or its process ends, the ranks end too.

    Args:
        spec: The lab.
        command: The program and its arguments, found as a shell would find it.
        env: The ranks' whole environment but for what the lab sets; by default this process's.
        mode: ``root`` and ``user`` shape links in namespaces, with and without privilege, ``loopback`` does not
            shape anything; ``auto`` takes the first of these that is permitted.
        grace_s: Seconds between asking and forcing, see above.
        timeout_s: Seconds the ranks may run.
        prefix: Print ``[rank N]`` before each line of output.
        on_line: Called with (rank, ``"stdout"`` or ``"stderr"``, line without its end) instead of printing.
        on_notice: Called with each notice (the mode, changes on the timeline) instead of printing to stderr.

    Raises:
        LaunchError: The command cannot be found.
        LabError: A mode or CPU quotas were asked for and are not permitted, or pyroute2 is missing.
        HeadwayError: The lab ended without a status, as when the machine runs out of memory.
    """
    env = dict(os.environ if env is None else env)
    executable = _find(command, env)
    lab_id = _new_id()
    quotas, why_no_quotas = slow.choose(spec, lab_id)
    job = LabJob(
        id=lab_id,
        spec=spec,
        command=tuple(command),
        executable=executable,
        env=env,
        grace_s=grace_s,
        timeout_s=timeout_s,
        quotas=quotas,
        why_no_quotas=why_no_quotas,
    )
    notice = on_notice or _print_notice
    with _opened(job, mode, notice) as lab:
        return lab.run(on_line or printer(prefix=prefix), notice)


def best_mode() -> str:
    """The mode that ``auto`` takes on this machine: ``root``, ``user`` or ``loopback``. Takes about a second.

    Raises LabError if pyroute2 is missing.
    """
    job = LabJob(
        id=_new_id(),
        spec=LabSpec(hosts=1, rate="1gbit"),
        command=("true",),
        executable="true",
        env={},
        grace_s=0.0,
        timeout_s=None,
    )
    with _opened(job, "auto", lambda _: None) as session:
        return session.attempt.mode


def _new_id() -> str:
    return f"lab-{os.getpid()}-{secrets.token_hex(4)}"


def _print_notice(text: str) -> None:
    print(f"headway lab: {text}", file=sys.stderr, flush=True)


def _find(command: Sequence[str], env: Mapping[str, str]) -> str:
    if not command:
        raise LaunchError("no command to run", expected="a program and its arguments")
    executable = shutil.which(command[0], path=env.get("PATH", os.defpath))
    if executable is None:
        raise LaunchError("command not found", got=command[0], expected="a program on PATH or a path to one")
    return str(Path(executable).absolute())


def _attempts(mode: Mode) -> list[Attempt]:
    """Ways to isolate, the best first; a process namespace ensures that no process survives."""
    if mode == "loopback":
        return [Attempt("loopback", False)]
    if find_spec("pyroute2") is None:
        raise LabError(
            "shaping links needs pyroute2, which is not installed",
            fix=f"Run: {how_to_install('lab')}, or choose the loopback mode, which does not shape links.",
        )
    if mode != "auto":
        return [Attempt(mode, True), Attempt(mode, False)]
    modes = ["root", "user"] if _has_capabilities() else ["user"]
    return [
        *(Attempt(name, with_pid_namespace) for name in modes for with_pid_namespace in (True, False)),
        Attempt("loopback", False),
    ]


def _has_capabilities() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16) & _ADMIN_CAPABILITIES == _ADMIN_CAPABILITIES
    return False


@contextmanager
def _opened(job: LabJob, mode: Mode, notice: Callable[[str], None]) -> Iterator[Session]:
    """Open the best permitted lab and print its mode; always close it."""
    if sys.platform != "linux":
        raise LabError("the lab needs Linux", got=sys.platform)
    reasons = []
    for attempt in _attempts(mode):
        with ExitStack() as stack:
            try:
                lab = stack.enter_context(Session.opened(job, attempt))
            except RefusedError as refusal:
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


def _say_mode(spec: LabSpec, attempt: Attempt, reasons: list[str], notice: Callable[[str], None]) -> None:
    what = {
        "root": "network namespaces (root)",
        "user": "network namespaces (unprivileged)",
        "loopback": "plain loopback",
    }[attempt.mode]
    notice(f"{len(spec.links)} hosts, {spec.world_size} workers, {what}")
    if attempt.mode == "loopback":
        because = f" ({reasons[0]})" if reasons else ""
        notice(f"links are unshaped: hosts share one loopback interface, rates have no effect{because}")
