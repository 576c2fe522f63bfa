from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.errors import LaunchError
from headway.integrations.launch import (
    ERRORS_VARIABLE,
    PLAN_VARIABLE,
    RECORD_VARIABLE,
    injected_environment,
    run_command,
)


def test_the_injection_stands_first_on_the_path_once_and_keeps_the_rest() -> None:
    once = injected_environment({"PYTHONPATH": f"/a{os.pathsep}/b"}, record="{}")
    twice = injected_environment(once, plan="/plan.yaml")
    entries = twice["PYTHONPATH"].split(os.pathsep)
    assert entries[1:] == ["/a", "/b"]
    assert (Path(entries[0]) / "sitecustomize.py").is_file()
    assert twice[RECORD_VARIABLE] == "{}"
    assert twice[PLAN_VARIABLE] == "/plan.yaml"


def test_another_sitecustomize_keeps_working(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    environment = injected_environment({**os.environ, "PYTHONPATH": str(tmp_path)}, record="{}")
    done = subprocess.run(
        [sys.executable, "-c", "print('the script')"], env=environment, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["the other one", "the script"]


def test_processes_that_are_no_ranks_are_left_alone() -> None:
    environment = injected_environment({k: v for k, v in os.environ.items() if k != "RANK"}, record="{}")
    code = "import sys; sys.exit('headway' in sys.modules or 'wrapt' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0
    )


def test_the_exit_status_of_the_command_is_returned() -> None:
    assert run_command([sys.executable, "-c", "import sys; sys.exit(7)"], os.environ) == 7
    assert run_command([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], os.environ) == 137


def test_what_a_rank_left_as_its_error_is_raised() -> None:
    code = f"""
import os, pathlib, sys
pathlib.Path(os.environ['{ERRORS_VARIABLE}'], 'rank-00001').write_text('the plan is for another model')
sys.exit(1)
"""
    with pytest.raises(LaunchError, match="the plan is for another model"):
        run_command([sys.executable, "-c", code], os.environ)


def test_a_command_that_is_not_there_is_refused() -> None:
    with pytest.raises(LaunchError, match="cannot start"):
        run_command(["no-such-command"], os.environ)
