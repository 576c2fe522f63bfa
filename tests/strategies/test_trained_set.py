"""A look before each forward notices whatever changes what is trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from headway.strategies.decoupled.checks import TrainedSet


def _freeze(module: nn.Sequential) -> None:
    module[0].weight.requires_grad_(False)


def _replace_parameter(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.zeros(2, 2))


def _remove_parameter(module: nn.Sequential) -> None:
    module[0].register_parameter("bias", None)


def _replace_module(module: nn.Sequential) -> None:
    module[1] = nn.Linear(2, 2)


def _compile_in_place(module: nn.Sequential) -> None:
    module[1].compile(backend="eager")


@pytest.mark.parametrize(
    "change", [_freeze, _replace_parameter, _remove_parameter, _replace_module, _compile_in_place]
)
def test_a_change_is_noticed(change: Callable[[nn.Sequential], None]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    trained = TrainedSet(module)
    assert not trained.changed(module)
    change(module)
    assert trained.changed(module)
    assert not TrainedSet(module).changed(module)


def test_training_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    trained = TrainedSet(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    module.eval()
    assert not trained.changed(module)


def test_another_module_in_its_place_is_noticed() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    trained = TrainedSet(module)
    assert trained.changed(nn.Sequential(module[0]))
    assert not trained.changed(module)
