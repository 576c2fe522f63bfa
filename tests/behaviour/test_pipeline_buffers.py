"""Statistics and random numbers of stages are those of the batches alone, although torch tries stages out at first."""

from __future__ import annotations

import pytest
import torch
from tests import workers
from tests.behaviour import pipeline_buffer_cases as cases

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def test_the_first_step_leaves_no_trace_in_buffers_and_random_numbers() -> None:
    alone = cases.alone()
    for found in workers.run(2, "tests.behaviour.pipeline_buffer_cases:trained", timeout_s=60):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
