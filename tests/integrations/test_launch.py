from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.commands import run

from headway.errors import LaunchError
from headway.integrations.launch import (
    PLAN_VARIABLE,
    RECORD_VARIABLE,
    CommandOutcome,
    injected_environment,
    run_command,
)
from headway.integrations.reports import REPORTS_VARIABLE


def ended(folder: Path, code: str) -> CommandOutcome:
    return run_command([sys.executable, "-c", code], os.environ, folder)


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
    done = run([sys.executable, "-c", "print('the script')"], 60, environment)
    assert done.returncode == 0
    assert done.stdout.split("\n")[:2] == ["the other one", "the script"]


def test_processes_that_import_no_torch_are_left_alone(tmp_path: Path) -> None:
    environment = injected_environment({**os.environ, REPORTS_VARIABLE: str(tmp_path)}, record="{}")
    code = "import json, sys; sys.exit('headway' in sys.modules or 'wrapt' in sys.modules)"
    assert run([sys.executable, "-c", code], 60, environment).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_headway_says_so_where_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('trained')")
    (tmp_path / "wrapt.py").write_text("raise ImportError('not here')")
    environment = injected_environment({**os.environ, "PYTHONPATH": str(tmp_path)}, record="{}")
    done = run_command([sys.executable, "-c", "import torch"], environment, tmp_path)
    assert done.status == 0
    assert [report.blind for report in done.reports] == [f"{sys.executable} cannot import headway (not here)"]


def test_the_exit_status_of_the_command_is_returned(tmp_path: Path) -> None:
    assert ended(tmp_path, "import sys; sys.exit(7)").exit_status == 7
    assert ended(tmp_path, "import os; os.kill(os.getpid(), 9)").exit_status == 137


@pytest.mark.parametrize("status", [0, 1])
def test_what_a_rank_left_as_its_error_is_raised_however_the_command_ends(
    status: int, tmp_path: Path
) -> None:
    left = json.dumps({"pid": 1, "rank": 1, "refused": "the plan is for\nanother model"})
    code = f"""
import os, pathlib, sys
pathlib.Path(os.environ['{REPORTS_VARIABLE}'], 'process-1-a.json').write_text({left!r})
sys.exit({status})
"""
    with pytest.raises(LaunchError, match="the plan is for another model"):
        ended(tmp_path, code)


def test_a_command_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot start"):
        run_command(["no-such-command"], os.environ, tmp_path)


def test_ranks_that_wait_for_one_that_has_left_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.integrations.launch.LEFT_BEHIND_S", 0.0)
    ranks = [{"pid": 1, "rank": rank, "world_size": 2, "done": rank == 0} for rank in range(2)]
    code = f"""
import json, os, pathlib, time
for said in {ranks!r}:
    pathlib.Path(os.environ['{REPORTS_VARIABLE}'], f"process-1-{{said['rank']}}.json").write_text(json.dumps(said))
time.sleep(600)
"""
    with (tmp_path / "output").open("wb") as output:
        done = run_command([sys.executable, "-c", code], os.environ, tmp_path, output=output, leaving=True)
    assert done.status == 128 + 15


def test_what_a_command_prints_goes_where_it_is_told(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as output:
        run_command(
            [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"],
            os.environ, tmp_path, output=output,
        )  # fmt: skip
    assert sorted((tmp_path / "output").read_text().split()) == ["err", "out"]
