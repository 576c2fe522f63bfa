"""What is compiled is told by looks that can be had before every forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headway import torch_private


def test_what_torch_compile_makes_is_compiled_and_what_it_is_made_of_is_not() -> None:
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    assert not torch_private.has_compiled_forward(module)
    made: Any = torch.compile(module, backend="eager")
    assert torch_private.has_compiled_forward(made)
    assert torch_private.is_compiled(made)
    assert not torch_private.is_compiled(module)
    assert torch_private.compiled_from(made) is module


def test_what_is_compiled_in_place_is_marked() -> None:
    module = nn.Linear(2, 2)
    before = torch_private.compilation_marks(module)
    assert torch_private.compilation_marks(module) == before
    module.compile(backend="eager")
    assert torch_private.is_compiled(module)
    assert not torch_private.has_compiled_forward(module)
    assert torch_private.compilation_marks(module) != before


def test_so_is_a_class_that_runs_compiled_inside() -> None:
    class Compiled(nn.Linear, torch_private.CompiledForward):
        pass

    module = nn.Linear(2, 2)
    before = torch_private.compilation_marks(module)
    module.__class__ = Compiled
    assert torch_private.has_compiled_forward(module)
    assert torch_private.compilation_marks(module) != before
