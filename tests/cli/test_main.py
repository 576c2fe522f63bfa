from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from tests import limits

from headway.cli.main import COMMANDS, PIPE_CLOSED, run
from headway.cli.record import parse_steps
from headway.errors import UserError


def test_every_command_is_there_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        module = "import_" if name == "import" else name
        assert importlib.import_module(f"headway.cli.{module}")
        assert run([name, "--help"]) == 0
        assert "Usage: headway" in capsys.readouterr().out
    assert run(["--version"]) == 0


def test_steps_are_read_as_a_range() -> None:
    assert parse_steps("5:25") == (5, 25)
    for text in ("5", "25:5", "0:3", "a:b", "5:25:30", "-1:4", ""):
        with pytest.raises(UserError):
            parse_steps(text)


def test_bad_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("headway: Missing argument")
    assert len(error.strip().splitlines()) == 1


def test_a_pipe_that_nobody_reads_is_not_a_slower_job() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from headway.cli.main import main; main(['--help'])"
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=False,
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=limits.stretched(60),
        )
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_full_disk_is_one_line_and_status_2() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headway", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("headway: the output cannot be written")
    assert done.stderr.count("\n") == 1
