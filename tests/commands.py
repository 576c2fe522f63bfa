"""Running the command line as users do: in this process where no ranks are needed, else in processes of its own."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
from tests import limits

SCRIPTS = Path(__file__).parent / "scripts"
IN_PROCESS = ("decisions", "diagnose", "export", "import", "optimize", "predict", "replay", "settings")


def free_port() -> int:
    """A port of this host that nobody listens on at the moment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def headway(
    *arguments: object, timeout_s: float = 90, measuring: bool = False, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``headway`` with ``arguments``; output is captured, a hang fails.

    A job that is recorded does not stop to measure its machine, which takes seconds, unless ``measuring``.
    Commands that only compute run in this process: starting Python and importing torch takes a core two seconds.
    They run in a ``fresh`` one where a test is about what a process does once.
    """
    if not fresh and arguments[0] in IN_PROCESS and "--" not in arguments:
        return in_process(*arguments)
    if arguments[0] == "record" and not measuring:
        arguments = ("record", "--no-measuring", *arguments[1:])
    command = [sys.executable, "-m", "headway", *map(str, arguments)]
    return run(command, timeout_s, {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"})


def in_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``headway`` with ``arguments`` in this process; output is captured, and a traceback goes to stderr."""
    from headway.cli.main import run as run_command_line

    words = [str(argument) for argument in arguments]
    out, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(errors),
        warnings.catch_warnings(),
    ):
        patch.setenv("COLUMNS", "200")
        warnings.simplefilter("default")
        try:
            status = run_command_line(words)
        except Exception:
            traceback.print_exc()
            status = 1
    return subprocess.CompletedProcess(["headway", *words], status, out.getvalue(), errors.getvalue())


def run(
    command: list[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end; output is captured, a hang fails."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    out, said = communicate(process, timeout_s)
    return subprocess.CompletedProcess(command, process.returncode, out, said)


def communicate(process: subprocess.Popen[str], timeout_s: float) -> tuple[str, str]:
    """What ``process``, the first of a session, has printed when it ends.

    One that outlasts its limit, which a busy machine stretches (``limits``), is ended with all its group and fails.
    """
    limit = limits.Limit(timeout_s, lambda: [process.pid])
    try:
        while (left_s := limit.left_s()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=left_s)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    out, said = process.communicate()
    raise AssertionError(f"{process.args!r} took longer than {timeout_s:g} s:\n{out[-4000:]}\n{said[-4000:]}")


def record_into(out: Path, steps: str = "3:8") -> tuple[object, ...]:
    """The beginning of a command that records into ``out``, for ranks of their own launchers; it ends before ``--``."""
    return (sys.executable, "-m", "headway", "record", "--no-measuring", "-o", out, "--steps", steps)


def torchrun(script: str, *arguments: object, workers: int = 2) -> tuple[str, ...]:
    """The command that starts ``script`` of tests/scripts on ``workers`` local ranks."""
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
    )
    return (*launcher, str(SCRIPTS / script), *map(str, arguments))


def last_line(text: str) -> str:
    """The last line of an output that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
