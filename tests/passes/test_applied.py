"""A module that is wrapped more than once under the same passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.errors import PluginError
from headway.ext.testing import check_pass
from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.optimizer import OptimizerImplementation
from headway.passes.other_forward import applied_to, apply_all
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(6, 4)).square().mean().backward()
    return [each.grad for each in model.parameters()]


@pytest.mark.parametrize(
    "changed",
    [
        Recompute(modules=("0", "2")), Accumulate(micro_batches=2), Precision(dtype="bfloat16"),
        OptimizerImplementation(implementation="foreach"),
    ],
    ids=lambda changed: changed.name,
)  # fmt: skip
def test_passes_are_what_the_test_kit_asks_for(changed: Pass) -> None:
    check_pass(changed)


@pytest.mark.parametrize(
    "passes",
    [(Recompute(modules=("0", "1")),), (Accumulate(micro_batches=2),), (Precision(dtype="bfloat16"),)],
)
def test_what_changes_a_module_is_done_once(passes: tuple[Pass, ...]) -> None:
    model, plain = net(), net()
    assert applied_to(model) == ()
    for _ in range(2):
        assert apply_all(passes, model, None) is model
        assert applied_to(model) == passes
        for mine, theirs in zip(gradients(model), gradients(plain), strict=True):
            assert torch.allclose(mine, theirs, atol=0.02)


@pytest.mark.parametrize(
    ("apply", "said"),
    [
        (lambda *_: None, r"TypeError: apply\(\) returned NoneType, expected a module"),
        (lambda *_: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_a_pass_of_another_package_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, apply: Any, said: str
) -> None:
    class Foreign(Recompute):
        pass

    monkeypatch.setattr(Foreign, "apply", apply)
    with pytest.raises(
        PluginError, match=f"the pass recompute of {__name__} cannot be used: it raised {said}"
    ):
        apply_all((Foreign(modules=("0",)),), net(), None)


def test_every_optimizer_is_switched() -> None:
    passes = (OptimizerImplementation(implementation="foreach"),)
    model = net()
    for _ in range(2):
        optimizer = torch.optim.Adam(model.parameters())
        apply_all(passes, model, optimizer)
        assert optimizer.param_groups[0]["foreach"]
