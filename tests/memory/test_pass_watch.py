"""What a pass holds, against sums of what is known to be there."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from headway.memory.pass_watch import Allocations, PassMemoryWatch
from headway.model import PassMemory

FLOAT = 4


def test_memory_counts_from_when_it_is_made_until_nothing_holds_it() -> None:
    before = torch.ones(1000)
    with Allocations() as allocations:
        made = torch.zeros(250)
        view = made[10:20]
        before.add_(1)
        assert allocations.held_bytes == 250 * FLOAT
        assert allocations.holds(view) == 250 * FLOAT
        assert allocations.holds(before) == allocations.holds(None) == 0
        del made
        assert allocations.held_bytes == 250 * FLOAT, "the view holds it"
        del view
        gc.collect()
        assert allocations.held_bytes == 0
        assert allocations.peak_bytes() == 250 * FLOAT
        assert allocations.peak_bytes() == 0


def watched(model: nn.Module, inputs: torch.Tensor, *, kept: bool = False) -> PassMemory | None:
    watch = PassMemoryWatch(kept=kept)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: watch.gradient_done(name, p))
    watch.begin((inputs,))
    loss = model(inputs).sum()
    watch.forward_done()
    loss.backward()
    watch.update_begins()
    return watch.end()


def test_activations_go_as_gradients_come() -> None:
    """Three dense layers: each saves its input, the first one's was there before and counts all the same."""
    batch, width = 64, 128
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    found = watched(model, torch.ones(batch, width))
    assert found is not None
    activation, gradient = batch * width * FLOAT, width * width * FLOAT
    assert found.forward_bytes == pytest.approx(
        4 * activation, abs=64
    )  # the input, and what each layer puts out
    assert [name for name, _ in found.backward] == ["2.weight", "1.weight", "0.weight"]
    last, middle, first = (size for _, size in found.backward)
    # The inputs that are left, the gradients of a layer's output and input, and that of its weight. What sum() makes
    # is one number, and nobody wants the gradient of the first input.
    assert last == pytest.approx(3 * activation + activation + gradient, abs=64)
    assert middle == pytest.approx(2 * activation + 2 * activation + gradient, abs=64)
    assert first == pytest.approx(activation + activation + gradient, abs=64)
    assert found.after_bytes <= first


def test_gradients_that_are_added_to_others_are_not_understood() -> None:
    model = nn.Linear(8, 8)
    model(torch.ones(4, 8)).sum().backward()
    assert watched(model, torch.ones(4, 8)) is None


def test_sparse_gradients_are_trained_as_ever_and_not_understood() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    assert watched(model, torch.tensor([1, 2])) is None
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse


def test_nothing_changes_for_what_is_watched() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = torch.randn(2, 3, 9, 9)
    assert watched(models[0], inputs) is not None
    models[1](inputs).sum().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_what_is_inside_another_mode_ends_with_it() -> None:
    outer = Allocations()
    inner = Allocations()
    with outer:
        inner.__enter__()  # type: ignore[no-untyped-call]
        inner.stop()
        torch.zeros(10)
    assert inner.held_bytes == 0
    inner.stop()  # again, with nothing left to leave
