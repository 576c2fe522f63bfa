"""What one rank alone does, and the others do not: it is recorded, and every command takes the recording."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import workers
from tests.behaviour import alone_cases

import headway

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    losses = workers.run(2, "tests.behaviour.alone_cases:recordings", str(folder), timeout_s=120)
    for case in alone_cases.CASES:
        if case not in ("accumulates", "everything"):
            assert [of_rank[case] for of_rank in losses] == [of_rank[""] for of_rank in losses], case
    return folder


@pytest.mark.parametrize("case", alone_cases.CASES)
def test_what_one_rank_does_alone_is_recorded_and_understood(recorded: Path, case: str) -> None:
    trace = headway.load_trace(recorded / case)
    assert trace.steps == tuple(range(alone_cases.FIRST, alone_cases.STOP))
    assert not [note for note in trace.manifest.notes if "observer" in note]
    assert headway.diagnose(trace).verdict
    assert headway.replay(trace).step_ms > 0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, marks=() if each == "everything" else pytest.mark.exhaustive)
        for each in alone_cases.CASES
    ],
)
def test_plans_are_made_from_it(recorded: Path, case: str) -> None:
    assert headway.optimize(recorded / case).plan
