"""A live module described as a value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from headway.compression.int8 import Int8
from headway.errors import UnsupportedError
from headway.strategies.ddp import runtime
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled import checks
from headway.strategies.live.module_spec import model_spec
from headway.strategies.parameter_server.runtime import check_module


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


@pytest.mark.parametrize(
    "refuse",
    [
        check_module, checks.check_module,
        lambda module: runtime.check_wire(module, DistributedDataParallelStrategy(wire=(Int8(),))),
    ],
    ids=["servers", "decoupled", "codecs"],
)  # fmt: skip
def test_sparse_gradients_are_refused_by_name(refuse: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    with pytest.raises(UnsupportedError, match="sparse gradients are not supported; got 0, with sparse=True"):
        refuse(model)
    model[0].weight.requires_grad = False
    refuse(model)
