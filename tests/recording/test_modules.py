"""Watching a model's passes in one process: which module's backward is marked, and when hooks go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.recording.modules import ModuleWatch
from headway.recording.patching import Now
from headway.trace.events import Kind

# What works in place puts out what it was given, and counts with what comes before it.
MARKED = ["(loss)", "2", "0"]


class _NobodyLooks:
    def backward_ended(self) -> None:
        """Nothing to do."""

    def script_reads_end(self) -> None:
        """Nothing to do."""


class _Wrapper(nn.Module):
    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.backward_inside = False
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.root(x)
        if self.fails:
            raise ArithmeticError("not this batch")
        if self.backward_inside:
            out.sum().backward()
        return out


@pytest.fixture
def watched() -> tuple[ModuleWatch, _Wrapper]:
    now = Now()
    now.recording = True
    root = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    model = _Wrapper(root)
    watch = ModuleWatch(now, _NobodyLooks())
    watch.watch_model(model, root)
    return watch, model


def _backwards(watch: ModuleWatch) -> list[str]:
    watch.detach()
    return [row.name for row in watch.add_rows([]) if row.kind == Kind.BACKWARD]


def test_every_module_s_backward_is_marked_in_order(watched: tuple[ModuleWatch, _Wrapper]) -> None:
    watch, model = watched
    model(torch.ones(3, 4)).sum().backward()
    assert _backwards(watch) == MARKED


def test_a_backward_inside_a_forward_is_marked(watched: tuple[ModuleWatch, _Wrapper]) -> None:
    watch, model = watched
    model.backward_inside = True
    model(torch.ones(3, 4))
    assert _backwards(watch) == MARKED


def test_a_module_that_is_called_outside_of_the_wrapper_is_marked(
    watched: tuple[ModuleWatch, _Wrapper],
) -> None:
    watch, model = watched
    model.root(torch.ones(3, 4)).sum().backward()
    assert _backwards(watch) == MARKED


def test_a_forward_that_fails_leaves_nothing_for_the_next_one(watched: tuple[ModuleWatch, _Wrapper]) -> None:
    watch, model = watched
    model.fails = True
    with pytest.raises(ArithmeticError):
        model(torch.ones(3, 4))
    model.fails = False
    model(torch.ones(3, 4)).sum().backward()
    assert _backwards(watch) == MARKED


def test_an_export_is_no_forward(watched: tuple[ModuleWatch, _Wrapper]) -> None:
    watch, model = watched
    torch.export.export(model.root, (torch.ones(3, 4),), strict=False)
    watch.detach()
    assert not watch.add_rows([])
