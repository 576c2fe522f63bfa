"""What halves of a backward hold, told from a whole one, against halves as torch computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from headway.memory.halves import WholeBackward
from headway.memory.pass_watch import Allocations
from headway.model import HalvedBackward

WIDTH, ROWS = 64, 256


class Residual(nn.Module):
    """A shortcut past a wide layer, whose gradient is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.back(nn.functional.gelu(self.wide(self.norm(x))))
        return out


class Joined(nn.Module):
    """Two branches put side by side: gradients of them are parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.out = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.cat([self.left(x), torch.relu(self.right(x))], dim=1))
        return out


class Tied(nn.Module):
    """One weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(torch.tanh(self.one(x)))
        return out


def rows() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def images() -> torch.Tensor:
    return torch.randn(2, 4, 32, 32)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "dense": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2 * WIDTH)), rows),
    "residual": (lambda: nn.Sequential(Residual(), Residual()), rows),
    "joined": (lambda: nn.Sequential(Joined(), Joined()), images),
    "tied": (Tied, rows),
}


def measured(model: nn.Module, inputs: torch.Tensor, *, loss: bool) -> tuple[list[int], int]:
    """What torch's halves of two backwards hold, each beyond what there was, and what is left between the first two."""
    found, left_bytes = [], 0
    with Allocations() as allocations:
        for _ in range(2):
            given = inputs.clone().requires_grad_()
            outputs, gradients = put_out(model, given, loss=loss)
            allocations.peak_bytes()
            before = allocations.held_bytes
            _, groups = stage_backward_input(outputs, gradients, [given], model.parameters())
            found.append(allocations.peak_bytes() - before)
            left_bytes = allocations.held_bytes - before
            before = allocations.held_bytes
            stage_backward_weight(model.parameters(), groups)
            found.append(allocations.peak_bytes() - before)
            del outputs, gradients, groups, given
    return found, left_bytes


def put_out(model: nn.Module, given: torch.Tensor, *, loss: bool) -> tuple[list[Any], list[Any] | None]:
    output = model(given)
    if loss:
        return [nn.functional.mse_loss(output.exp(), torch.zeros_like(output))], None
    return [output], [torch.ones_like(output)]


def told(model: nn.Module, inputs: torch.Tensor, *, loss: bool) -> HalvedBackward | None:
    with Allocations() as allocations:
        given = inputs.clone().requires_grad_()
        outputs, gradients = put_out(model, given, loss=loss)
        whole = WholeBackward(allocations, outputs, [given], list(model.parameters()))
        torch.autograd.backward(outputs, gradients)
        return whole.end()


@pytest.mark.parametrize("loss", [False, True], ids=["outputs", "loss"])
@pytest.mark.parametrize("name", CASES)
def test_halves_hold_what_was_told(name: str, loss: bool) -> None:
    make, batch = CASES[name]
    model, inputs = make(), batch()
    found = told(model, inputs, loss=loss)
    assert found is not None
    model.zero_grad(set_to_none=True)
    (first_input, first_weight, _, weight), left_bytes = measured(model, inputs, loss=loss)
    unit = inputs.nbytes
    assert found.input_bytes == pytest.approx(first_input, rel=0.05, abs=0.05 * unit)
    assert found.put_off_bytes == pytest.approx(left_bytes, rel=0.05, abs=0.05 * unit)
    assert first_weight - unit <= found.first_weight_bytes <= first_weight + 2 * unit
    assert weight - unit <= found.weight_bytes <= weight + 2 * unit


@pytest.mark.parametrize("name", CASES)
def test_looking_changes_no_bit(name: str) -> None:
    make, batch = CASES[name]
    model, inputs = make(), batch()
    told(model, inputs, loss=True)
    seen = [each.grad for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    given = inputs.clone().requires_grad_()
    outputs, gradients = put_out(model, given, loss=True)
    torch.autograd.backward(outputs, gradients)
    for one, parameter in zip(seen, model.parameters(), strict=True):
        assert one is not None
        assert parameter.grad is not None
        assert torch.equal(one, parameter.grad)


def test_the_first_stage_has_no_halves() -> None:
    """Its input needs no gradient: all of the backward is put off."""
    model = nn.Linear(WIDTH, WIDTH)
    with Allocations() as allocations:
        given = rows()
        loss = model(given).sum()
        whole = WholeBackward(allocations, [loss], [given], list(model.parameters()))
        loss.backward()
        assert whole.end() is None
