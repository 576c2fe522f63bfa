"""Copies, pickles and modes: the decoupled all-reduce sees the numbers of one process, and of stock DDP."""

from __future__ import annotations

import pytest
from tests import workers

CASES = "tests.behaviour.decoupled_cases:compare"
ONE_PARAMETER_MB, UNEVEN_MB, ONE_BUCKET_MB = 1e-6, 0.0004, 25.0

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("world_size", "caps_mb"),
    [(1, [ONE_BUCKET_MB]), (2, [ONE_PARAMETER_MB, UNEVEN_MB]), (3, [UNEVEN_MB])],
)
def test_same_numbers(world_size: int, caps_mb: list[float]) -> None:
    for result in workers.run(world_size, CASES, caps_mb, timeout_s=110):
        assert result["problems"] == []
        assert result["compared"] > 100 * len(caps_mb)
