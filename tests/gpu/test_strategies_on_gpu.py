"""Every strategy trains on CUDA tensors as on the CPU, over Gloo on one GPU, or refuses them."""

from __future__ import annotations

import pytest
from tests import workers
from tests.gpu.setups import needs_gpu
from tests.gpu.strategy_cases import STRATEGIES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
ON_DEVICE, CASES = "tests.gpu.on_device:called", "tests.gpu.strategy_cases"
FOR_THE_CPU = {"parameter server"}


@needs_gpu
def test_as_on_the_cpu() -> None:
    expected = workers.run(2, f"{CASES}:trained")[0]
    for found in workers.run(2, ON_DEVICE, f"{CASES}:trained"):
        assert set(found) == set(STRATEGIES)
        for name, values in found.items():
            if name in FOR_THE_CPU:
                assert "cuda:0" in values, name
            else:
                off = 1e-3 if "bfloat16" in name else 1e-9
                assert values == pytest.approx(expected[name], rel=off, abs=off / 1e3), name


@needs_gpu
def test_a_pipeline_is_refused_whose_messages_gloo_would_have_to_send() -> None:
    """Torch itself ends such a process."""
    for message in workers.run(2, ON_DEVICE, f"{CASES}:pipelined"):
        assert "Gloo only sends CPU tensors" in message
