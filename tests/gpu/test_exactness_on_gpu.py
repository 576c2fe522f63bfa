"""The cases of ``tests.behaviour.decoupled`` on CUDA tensors: NCCL with one rank, Gloo with several on one GPU."""

from __future__ import annotations

import pytest
import torch
from tests.behaviour.decoupled import harness
from tests.gpu.setups import SETUPS, Setup

if not torch.cuda.is_available():  # one line rather than one a case
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(harness.ALL_LIMIT_S + 60)]


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
