"""Which modules hand on to each other: seen in one forward of models that are chains, and of those that are not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from headway.model import Chain
from headway.recording.chains import ChainWatch


def seen(model: nn.Module, *given: torch.Tensor) -> Chain:
    """What one forward shows."""
    watch = ChainWatch()
    watch.arm(model)
    model(*given)
    assert watch.found is not None
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert not any(hooks), "it leaves no hook"
    return watch.found


class Blocks(nn.Module):
    """A language model's shape: an embedding, blocks with residuals inside, a head that shares its weight."""

    def __init__(self, *, skips: bool = False, masked: bool = False, changed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.skips, self.masked, self.changed = skips, masked, changed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(tokens) + 1
        for block in self.inner:
            x = block(x, mask=tokens) if self.masked else block(x)
            if self.changed:
                x.mul_(2)
        out: torch.Tensor = self.head(x + first if self.skips else x)
        return out


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        del mask
        out: torch.Tensor = x + self.linear(x)
        return out


def test_a_sequential_is_a_chain_of_its_children() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(8, 6), nn.Tanh()),
        nn.Linear(6, 2),
    )  # fmt: skip
    found = seen(model, torch.ones(5, 4))
    assert [link.name for link in found.links] == ["0", "1", "2", "3", "4"]
    assert found.links[3].parameters == ("3.0.weight", "3.0.bias")
    # Behind the norm comes what works in place, which a stage is not to begin with.
    assert [link.output_bytes for link in found.links] == [5 * 8 * 4, 0, 5 * 8 * 4, 5 * 6 * 4, 0]
    assert [link.kept_bytes for link in found.links] == [160, 160, 160, 240, 40]
    assert (found.samples, found.batch_norms, found.why_not, found.aliases) == (5, True, "", {})


def test_the_largest_chain_inside_of_a_module_and_what_lies_around_it() -> None:
    found = seen(Blocks(), torch.ones(5, 3, dtype=torch.int64))
    assert [link.name for link in found.links] == ["inner.0", "inner.1", "inner.2"]
    assert found.links[0].parameters == ("embedding.weight", "inner.0.linear.weight", "inner.0.linear.bias")
    assert found.links[2].parameters == ("embedding.weight", "inner.2.linear.weight", "inner.2.linear.bias")
    assert found.links[1].output_bytes == 5 * 3 * 8 * 4


def test_weights_of_several_links_have_their_names_there() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[2].weight = model[0].weight
    found = seen(model, torch.ones(2, 4))
    assert found.links[2].parameters == ("2.weight", "2.bias")
    assert found.aliases == {"2.weight": "0.weight"}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x + y)
        return out


def repeated() -> nn.Sequential:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)


@pytest.mark.parametrize(
    ("model", "given", "why"),
    [
        (Blocks(skips=True), (torch.ones(5, 3, dtype=torch.int64),), "a tensor bypasses a module"),
        (Blocks(masked=True), (torch.ones(5, 3, dtype=torch.int64),), "does not call modules in sequence"),
        (Blocks(changed=True), (torch.ones(5, 3, dtype=torch.int64),), "does not call modules in sequence"),
        (TwoInputs(), (torch.ones(5, 4), torch.ones(5, 4)), "is not a single tensor"),
        (nn.Linear(4, 4), (torch.ones(5, 4),), "does not call modules in sequence"),
        (repeated(), (torch.ones(5, 4),), "does not call modules in sequence"),
    ],
)  # fmt: skip
def test_what_is_no_chain_says_why(model: nn.Module, given: tuple[torch.Tensor, ...], why: str) -> None:
    found = seen(model, *given)
    assert not found.links
    assert why in found.why_not


def test_a_dimension_that_is_not_that_of_samples_is_not_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Unflatten(0, (5, 4)), nn.Linear(4, 4))
    assert [link.output_bytes > 0 for link in seen(model, torch.ones(5, 4)).links] == [
        True,
        True,
        True,
        False,
    ]
    turned = nn.Sequential(nn.Linear(4, 4), Turned(), nn.Linear(5, 4))
    assert [link.output_bytes > 0 for link in seen(turned, torch.ones(5, 4)).links] == [True, False, False]


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()


def test_an_evaluation_is_passed_over_and_no_tensor_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    watch = ChainWatch()
    watch.arm(model)
    with torch.no_grad():
        model(torch.ones(9, 4))
    assert not watch.found
    kept: list[weakref.ref[torch.Tensor]] = []
    model[0].register_forward_hook(lambda _module, _inputs, output: kept.append(weakref.ref(output)))
    out = model(torch.ones(3, 4))
    assert watch.found is not None
    assert watch.found.samples == 3
    del out
    gc.collect()
    assert kept[0]() is None
