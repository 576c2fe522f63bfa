"""A Sequential cut into stages: together these are the whole of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.errors import UnsupportedError
from headway.strategies.pipeline.cutting import cut


@pytest.mark.parametrize("points", [("1",), ("2",), ("3",), ()])
def test_a_module_that_comes_again_is_in_every_place(points: tuple[str, ...]) -> None:
    act, twice = nn.Tanh(), nn.Linear(3, 3)
    model = nn.Sequential(twice, act, nn.Linear(3, 3), act, twice)
    found = cut(model, 2, points)
    assert [name for own in found.stages for name in own] == ["0", "1", "2", "3", "4"]
    given = torch.randn(2, 3)
    output = given
    for stage in range(2):
        output = found.module(model, stage)(output)
    torch.testing.assert_close(output, model(given))
    assert ("0.weight", "4.weight") in found.tied


def test_statistics_of_several_stages_are_refused() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm)
    with pytest.raises(UnsupportedError, match="several stages share a buffer"):
        cut(model, 2, ("2",))
    assert cut(model, 2, ("1",)).stages == (("0",), ("1", "2", "3"))
