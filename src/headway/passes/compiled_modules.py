"""Modules whose forward runs compiled, live."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from headway import torch_private
from headway.errors import UnsupportedError
from headway.passes.other_forward import Changed, give_class, module_at, with_forward

BACKEND = "inductor"
_numbers = itertools.count()


class Compiled(Changed, torch_private.CompiledForward):
    """What the class of a module that runs compiled is besides its own."""


def compile_modules(root: nn.Module, paths: Sequence[str]) -> None:
    """Have the modules at ``paths`` in ``root`` run compiled while gradients are recorded; elsewhere as they are.

    Modules of one class share their code, as far as torch shares it: they are of one class again. Raises
    UnsupportedError for a path that ``root`` does not have, a module that is compiled already or has such within, and
    one that another pass has changed.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for path in paths:
        module = module_at(root, path, "be compiled")
        if any(map(torch_private.is_compiled, module.modules())):
            raise UnsupportedError(
                "a module that is to be compiled is compiled already, or has one within that is", got=repr(path),
                fix="Leave the pass compile out of the plan.",
            )  # fmt: skip
        own = type(module)
        if own not in classes:
            classes[own] = with_forward(own, _Compiled(own.forward), besides=Compiled)
        give_class(module, repr(path), classes[own])


class _Compiled:
    """Around the forward of a class of modules."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        # A frame of its own, as torch compiles none of its own modules', and code of its own: torch keeps a few
        # compiled forms of each piece of code, and runs what needs more of them as it is.
        def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return forward(module, *args, **kwargs)

        called.__code__ = called.__code__.replace(co_name=f"compiled_{next(_numbers)}")
        self._compiled = torch.compile(called, backend=BACKEND)

    def __call__(self, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # Evaluation comes in other shapes, and would be compiled again for each.
        if not torch.is_grad_enabled() or _has_stand_ins(module):
            return forward(*args, **kwargs)
        if torch_private.inside_backward():
            raise UnsupportedError(
                "a module that runs compiled is computed again in backward, where it would draw other random numbers",
                got=type(module).__name__, expected="checkpoints inside of what is compiled",
                fix="Leave the pass compile, or this module, out of the plan.",
            )  # fmt: skip
        return self._compiled(module, *args, **kwargs)


def _has_stand_ins(module: nn.Module) -> bool:
    """Whether parameters are not up to date: ``forward`` was called by name, without the hooks that see to it.

    Compiled code would read them without asking.
    """
    return any(
        isinstance(parameter, torch_private.StandsInForParameter)
        for each in module.modules()
        for parameter in torch_private.own_parameters(each).values()
    )
