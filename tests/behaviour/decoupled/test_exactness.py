"""Training in parallel is training alone on everybody's data: every situation of a script, in every way of wrapping."""

from __future__ import annotations

import importlib

import pytest
from tests.behaviour.decoupled import harness
from tests.behaviour.decoupled.job import DDP, GRADIENTS, PARAMETERS

MODES = (DDP, GRADIENTS, PARAMETERS)
WORLD_SIZES = (2, 3)
MODULES = tuple(
    f"tests.behaviour.decoupled.{subject}_cases"
    for subject in (
        "accumulation", "scaling", "schedule", "partial", "join", "structure", "reading", "optimizer", "own_ways",
    )
)  # fmt: skip

for _module in MODULES:
    importlib.import_module(_module)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(harness.ALL_LIMIT_S + 20)]


@pytest.mark.parametrize(
    ("mode", "world_size", "case"),
    [
        pytest.param(
            mode,
            size,
            case,
            id=f"{mode}-{size}-{case}",
            marks=pytest.mark.xdist_group(f"exactness-{mode}-{size}"),
        )
        for mode in MODES
        for size in WORLD_SIZES
        for case in harness.names_of(mode, size)
    ],
)
def test_same_as_in_one_process(mode: str, world_size: int, case: str) -> None:
    problem = harness.problems(MODULES, mode, world_size)[case]
    assert not problem, problem
