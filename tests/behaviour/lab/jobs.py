"""Runs of the lab, and of its commands, as tests start them."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import pytest
from tests import limits
from tests.commands import communicate

from headway.errors import HeadwayError
from headway.lab.launch import Mode, run
from headway.lab.spec import LabSpec


class Job:
    """What a run printed, noticed and returned."""

    def __init__(
        self,
        spec: LabSpec,
        command: Sequence[str],
        *,
        mode: Mode = "loopback",
        grace_s: float = 2.0,
        timeout_s: float | None = 30.0,
    ) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.notices: list[str] = []
        self.status = run(
            spec,
            command,
            mode=mode,
            grace_s=grace_s,
            timeout_s=None if timeout_s is None else limits.stretched(timeout_s),
            on_line=lambda *line: self.lines.append(line),
            on_notice=self.notices.append,
        )

    def text_of(self, rank: int, stream: str = "stdout") -> list[str]:
        return [text for number, name, text in self.lines if (number, name) == (rank, stream)]


@functools.cache
def refusal(mode: Mode) -> str | None:
    """Why ``mode`` is not permitted here, or None."""
    try:
        run(LabSpec(hosts=1), ["true"], mode=mode, on_notice=lambda _: None)
    except HeadwayError as failure:
        return str(failure)
    return None


def permitted(mode: Mode) -> Mode:
    if why := refusal(mode):
        pytest.skip(why)
    return mode


def start_cli(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start ``headway lab`` as users do. Interrupts are ours to send, not the terminal's.

    And they are not ignored, as they are where the tests themselves were started in the background.
    """
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = f"{heard}; from headway.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", run, "lab", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    with start_cli(*arguments) as process:
        out, err = communicate(process, 40)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def wait_until(true: object, patience_s: float = 10.0) -> None:
    assert callable(true)
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
