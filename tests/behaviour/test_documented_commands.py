"""The commands of the README, the tutorial and other pages, run as they stand there, in their order."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.commands import run
from tests.documented import ROOT, Documented, commands_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

NOT_RUN = {
    r"^(git|pip|make|source|python3 -m venv)\b": "it installs Headway or runs the tests themselves",
    r"^srun|--nnodes|/shared/": "it needs several hosts, which test_several_launchers has",
    r"--nccl-tests": "it needs logs of a cluster, of which tests/cli/test_probe makes some",
    r"coordinate .*--listen 10\.": "it listens on another machine's address, and test_coordinator serves",
    r"^headway lab run examples": "it takes minutes, and tests/behaviour/lab runs such files",
}
PAGES = ("diagnosis", "lab", "predict", "recording", "replay", "settings", "tutorial")


def run_page(page: Path, folder: Path) -> dict[str, str]:
    """Run the commands of ``page`` in ``folder``; returns what each printed. Fails where one fails."""
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    printed: dict[str, str] = {}
    for command in filter(is_run, commands_of(page)):
        done = run(["bash", "-c", f"cd {folder} && {command.text}"], 300, environment)
        longer = "--baseline" in command.text  # with which status 1 says that the step became longer
        assert done.returncode in (0, longer), f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        printed[command.text] = done.stdout + done.stderr
    return printed


def is_run(command: Documented) -> bool:
    return not any(re.search(pattern, command.text) for pattern in NOT_RUN)


def test_the_readme(tmp_path: Path) -> None:
    printed = run_page(ROOT / "README.md", tmp_path)
    assert len(printed) >= 7
    answers = " ".join(printed.values())
    for word in ("Next: headway optimize", "ms a step", "bucket_cap_mb", "times as fast", "own model"):
        assert word in answers, word
    assert (tmp_path / "report.html").exists()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script, recordings of it, a plan and a cluster."""
    folder = tmp_path_factory.mktemp("prepared")
    run_page(ROOT / "README.md", folder)
    (folder / "examples").unlink()
    shutil.copy(folder / "trace" / "cluster.yaml", folder / "cluster.yaml")
    for name in ("last-week", "monday", "tuesday"):
        shutil.copytree(folder / "trace", folder / name)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES)
def test_a_page(prepared: Path, tmp_path: Path, page: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(prepared, folder)
    if any("record -o trace" in command.text for command in commands_of(ROOT / "docs" / f"{page}.md")):
        shutil.rmtree(folder / "trace")
    assert run_page(ROOT / "docs" / f"{page}.md", folder)
