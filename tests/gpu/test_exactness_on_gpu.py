"""The cases of ``tests.behaviour.decoupled`` on CUDA tensors: NCCL with one rank, Gloo with several on one GPU."""

from __future__ import annotations

import pytest
from tests.behaviour.decoupled import harness
from tests.gpu.setups import SETUPS, Setup, needs_gpu

pytestmark = [needs_gpu, pytest.mark.processes, pytest.mark.timeout(harness.ALL_LIMIT_S + 60)]


@pytest.mark.parametrize(
    ("setup", "mode", "case"),
    [
        pytest.param(setup, mode, case, id=f"{setup.name}-{mode}-{case}")
        for setup in SETUPS
        for mode in setup.modes
        for case in setup.names(mode)
    ],
)
def test_same_as_in_one_process(setup: Setup, mode: str, case: str) -> None:
    problem = setup.problems(mode)[case]
    assert not problem, problem
