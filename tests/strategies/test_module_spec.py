"""A live module described as a value."""

from __future__ import annotations

import torch
from torch import nn

from headway.strategies.data_parallel.module_spec import model_spec


def test_parameters_in_registration_order_without_frozen_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, dtype=torch.float64))
    model[0].bias.requires_grad = False
    spec = model_spec(model)
    assert [p.name for p in spec.parameters] == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert [p.module for p in spec.parameters] == ["0", "1", "1", "2", "2"]
    assert spec.by_name["2.weight"].dtype == "float64"
    assert spec.by_name["0.weight"].shape == (3, 2)
    assert spec.buffer_bytes == 2 * 3 * 4 + 8
    assert spec.frozen_bytes == 3 * 4


def test_tied_parameters_count_once_and_own_parameters_have_no_module() -> None:
    model, again = nn.Linear(2, 2), nn.Linear(2, 2)
    again.weight = model.weight
    model.add_module("again", again)
    spec = model_spec(model)
    assert [p.name for p in spec.parameters] == ["weight", "bias", "again.bias"]
    assert spec.by_name["weight"].module == ""
