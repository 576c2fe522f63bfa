"""What would train wrongly is refused, with one clear line."""

from __future__ import annotations

import pytest
from tests import workers
from torch import nn

from headway.errors import UserError
from headway.strategies.decoupled.wrapper import DecoupledDataParallel

pytestmark = pytest.mark.processes


def test_refusals() -> None:
    (problems,) = workers.run(1, "tests.behaviour.decoupled_refusals:check_all")
    assert problems == []


def test_ranks_with_different_models_are_refused() -> None:
    for message in workers.run(2, "tests.behaviour.decoupled_refusals:disagreement"):
        assert "ranks do not agree" in message


def test_no_process_group() -> None:
    with pytest.raises(UserError, match="no process group"):
        DecoupledDataParallel(nn.Linear(2, 2))
