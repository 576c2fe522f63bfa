"""What Headway starts of itself imports nothing from the folder of a job; the job's own command does as ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.interop.readers import importing
from headway.strategies.partial_all_reduce.coordinator.child import CoordinatorProcess
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TRAPS = ("secrets", "random", "typing", "tempfile", "numpy", "headway_trap")


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder whose modules leave a mark when they are run."""
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'sprung')!r}, 'a').write('{name} ')\nraise ImportError('trap')\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def sprung(folder: Path) -> str:
    return (folder / "sprung").read_text() if (folder / "sprung").exists() else ""


@pytest.mark.parametrize("options", [("-m", "headway"), ("-um", "headway"), ("-mheadway",)])
def test_python_m_runs_nothing_of_the_current_folder(trapped: Path, options: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, *options, "--help"], check=False, capture_output=True, text=True, timeout=100
    )
    assert sprung(trapped) == "", ended.stderr


def test_the_command_of_the_user_has_its_own_path(trapped: Path) -> None:
    command = [sys.executable, "-m", "headway_trap"]
    launcher = [sys.executable, "-P", "-m", "headway", "record", "-o", "trace", "--", *command]
    ended = subprocess.run(launcher, check=False, capture_output=True, text=True, timeout=100)
    assert sprung(trapped) == "headway_trap ", ended.stderr


def test_a_coordinator_runs_nothing_of_the_current_folder(trapped: Path) -> None:
    coordinator = CoordinatorProcess(GeneratorChoice("all"))
    coordinator.close()
    assert sprung(trapped) == ""


def test_processes_that_read_runs_nothing_of_the_current_folder(trapped: Path) -> None:
    with importing._safe_path():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert "PYTHONSAFEPATH" not in os.environ
    assert sprung(trapped) == ""
