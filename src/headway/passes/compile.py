"""Operator fusion: modules run as code that ``torch.compile`` has made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from headway import torch_private
from headway.errors import UnsupportedError
from headway.graph.computation import Item, Part, Point, Timeline
from headway.passes.base import in_few_words, region_of
from headway.passes.measured import MeasuredModules
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


def as_single_graphs(timeline: Timeline, regions: Sequence[str]) -> Timeline:
    """``timeline`` where each of ``regions`` is one graph in forward, and one in backward.

    The gradients of a region are ready with its last one. The first region of a forward needs whatever is needed from
    there on: compiled code reads parameters without asking, so that all have to be up to date.
    """
    return replace(timeline, items=tuple(_needed_at_once(_ready_at_once(timeline.items, regions), regions)))


def _ready_at_once(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    """Within each backward alone: a step may have several, and each of them reduces."""
    found: list[Item] = []
    backward: list[Item] = []
    for item in items:
        backward.append(item)
        if item.kind in (Point.BACKWARD_END, Point.STEP):
            found += _together(backward, regions)
            backward = []
    return found + _together(backward, regions)


def _together(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    owners = {
        index: owner
        for index, item in enumerate(items)
        if item.kind == Point.READY and (owner := region_of(item.name.rpartition(".")[0], regions))
    }
    last = {owner: index for index, owner in owners.items()}
    held: dict[str, list[Item]] = {owner: [] for owner in last}
    found: list[Item] = []
    for index, item in enumerate(items):
        region = owners.get(index)
        if region is None:
            found.append(item)
            continue
        held[region].append(item)
        if index == last[region]:
            found += held[region]
    return found


def _needed_at_once(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    found: list[Item] = []
    at: int | None = None  # where uses go, once a region was needed in this forward
    for item in items:
        if item.kind == Point.USE:
            if at is not None:
                found.insert(at, item)
                at += 1
                continue
            if region_of(item.name, regions):
                at = len(found) + 1
        elif item.kind in (Part.BACKWARD, Point.STEP):
            at = None
        found.append(item)
    return found


class Compile(MeasuredModules):
    """The forward of each of ``modules`` is compiled while gradients are recorded, and so is its backward.

    Results change in their last bits, and dropout draws other random numbers.
    """

    name: ClassVar[str] = "compile"
    stands_first: ClassVar[bool] = True
    measured_by: ClassVar[str] = "python -m headway.measuring.compiling TRACE [MODULE ...]"

    modules: tuple[str, ...] = Field(min_length=1, max_length=4096)
    """Paths of modules within the wrapped model, as ``named_modules`` has them. None lies within another.

    The gradients of each are there when its whole backward is done.
    """

    def rearranged(self, timeline: Timeline) -> Timeline:
        """Each module's gradients are ready together, and the first needs all parameters that are needed after it."""
        return as_single_graphs(timeline, self.modules)

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself, of which the modules run compiled. Code is made when they first run.

        Raises UnsupportedError for a path that it does not have, and a module that is compiled or changed already.
        """
        del optimizer

        compile_modules(module, self.modules)
        return module

    def describe(self) -> str:
        """Say how many modules are compiled, or which one."""
        return f"compile {in_few_words(self.modules)}"
