"""Copies of wrapped models, on real ranks: the same as of stock DistributedDataParallel under every strategy."""

from __future__ import annotations

import pytest
from tests import workers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def test_a_model_is_copied_and_saved_under_every_strategy() -> None:
    found = workers.run(2, "tests.behaviour.copying_cases:under_every_strategy", timeout_s=90)
    assert [each for rank in found for each in rank] == []
