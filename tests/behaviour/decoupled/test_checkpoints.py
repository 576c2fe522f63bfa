"""Checkpoints are saved at any moment and resumed anywhere, with the loss curve of a run that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.behaviour.decoupled import checkpoint_cases, harness

MODULES = (checkpoint_cases.__name__,)
SAVING, RESUMING = 2, (3, 4)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(harness.ALL_LIMIT_S + 20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, str]:
    return harness.problems(MODULES, checkpoint_cases.CHECKPOINTS, SAVING, folder)


@pytest.mark.parametrize("case", harness.names_of(checkpoint_cases.CHECKPOINTS, SAVING))
def test_saving_changes_nothing(saved: dict[str, str], case: str) -> None:
    assert not saved[case], saved[case]


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        pytest.param(size, case, marks=[pytest.mark.exhaustive] if size != RESUMING[0] else [])
        for size in RESUMING
        for case in harness.names_of(checkpoint_cases.CHECKPOINTS, size)
    ],
)
@pytest.mark.usefixtures("saved")
def test_resumed_training_goes_on_with_the_same_curve(folder: Path, world_size: int, case: str) -> None:
    problem = harness.problems(MODULES, checkpoint_cases.CHECKPOINTS, world_size, folder)[case]
    assert not problem, problem
