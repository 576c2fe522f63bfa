"""Operator fusion: runs modules compiled by ``torch.compile``."""

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
from headway.passes.other_forward import ReplacedForward, give_class, module_at, with_forward

BACKEND = "inductor"
_numbers = itertools.count()


class CompiledModule(ReplacedForward, torch_private.CompiledForward):
    """Mix-in class of compiled modules."""


def compile_modules(root: nn.Module, paths: Sequence[str]) -> None:
    """Compile the modules at ``paths`` in ``root``; they run compiled only while gradients are recorded.

    Modules of one class get the same new class, so that torch can share their code. Raises UnsupportedError for a
    path that ``root`` lacks, and for a module that is or contains a compiled one, or was changed by another pass.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for path in paths:
        module = module_at(root, path, "compile")
        if any(map(torch_private.is_compiled, module.modules())):
            raise UnsupportedError(
                "the module is already compiled, or contains a compiled module", got=repr(path),
                fix="Leave the pass compile out of the plan.",
            )  # fmt: skip
        original = type(module)
        if original not in classes:
            classes[original] = with_forward(original, _Compiled(original.forward), mixin=CompiledModule)
        give_class(module, repr(path), classes[original])


class _Compiled:
    """Compiles the forward of a class of modules."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        # A separate frame, because torch does not compile its own modules' frames, and separate code, because torch
        # keeps only a few compiled variants of a code object and then runs it uncompiled.
        def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return forward(module, *args, **kwargs)

        called.__code__ = called.__code__.replace(co_name=f"compiled_{next(_numbers)}")
        self._compiled = torch.compile(called, backend=BACKEND)

    def __call__(self, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # Evaluation has other shapes, each of which would be compiled again.
        if not torch.is_grad_enabled() or _has_stand_ins(module):
            return forward(*args, **kwargs)
        if torch_private.inside_backward():
            raise UnsupportedError(
                "a compiled module is recomputed in backward, where it would draw different random numbers",
                got=type(module).__name__, expected="checkpoints inside compiled modules",
                fix="Leave the pass compile, or this module, out of the plan.",
            )  # fmt: skip
        return self._compiled(module, *args, **kwargs)


def _has_stand_ins(module: nn.Module) -> bool:
    """Whether some parameters are outdated, because ``forward`` was called directly, without hooks.

    Compiled code would read them as they are.
    """
    return any(
        isinstance(parameter, torch_private.StandsInForParameter)
        for submodule in module.modules()
        for parameter in torch_private.own_parameters(submodule).values()
    )


def as_single_graphs(timeline: Timeline, regions: Sequence[str]) -> Timeline:
    """``timeline`` with each of ``regions`` as one graph in forward and one in backward.

    The gradients of a region become ready together. The first region of a forward needs all parameters used from there
    on: compiled code does not wait for parameters, so all of them have to be gathered before.
    """
    return replace(timeline, items=tuple(_needed_at_once(_ready_at_once(timeline.items, regions), regions)))


def _ready_at_once(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    """Delay gradients to the last one of their region, within each backward of the step."""
    reordered: list[Item] = []
    backward: list[Item] = []
    for item in items:
        backward.append(item)
        if item.kind in (Point.BACKWARD_END, Point.STEP):
            reordered += _together(backward, regions)
            backward = []
    return reordered + _together(backward, regions)


def _together(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    owners = {
        index: owner
        for index, item in enumerate(items)
        if item.kind == Point.READY and (owner := region_of(item.name.rpartition(".")[0], regions))
    }
    last = {owner: index for index, owner in owners.items()}
    held: dict[str, list[Item]] = {owner: [] for owner in last}
    reordered: list[Item] = []
    for index, item in enumerate(items):
        region = owners.get(index)
        if region is None:
            reordered.append(item)
            continue
        held[region].append(item)
        if index == last[region]:
            reordered += held[region]
    return reordered


def _needed_at_once(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    reordered: list[Item] = []
    at: int | None = None  # where later uses move, once a region was used in this forward
    for item in items:
        if item.kind == Point.USE:
            if at is not None:
                reordered.insert(at, item)
                at += 1
                continue
            if region_of(item.name, regions):
                at = len(reordered) + 1
        elif item.kind in (Part.BACKWARD, Point.STEP):
            at = None
        reordered.append(item)
    return reordered


class Compile(MeasuredModules):
    """Compiles the forward and backward of each of ``modules``, for training only.

    Results change in their last bits, and dropout draws different random numbers.
    """

    name: ClassVar[str] = "compile"
    stands_first: ClassVar[bool] = True
    measured_by: ClassVar[str] = "headway measure compile TRACE [MODULE ...]"

    modules: tuple[str, ...] = Field(min_length=1, max_length=4096)
    """Paths of modules in the wrapped model, as in ``named_modules``; none may lie within another.

    The gradients of each become ready together, at the end of its backward.
    """

    def rearranged(self, timeline: Timeline) -> Timeline:
        """Make each module's gradients ready together, and the first module need all parameters used after it."""
        return as_single_graphs(timeline, self.modules)

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """Compile the modules, on their first run; returns ``module``.

        Raises UnsupportedError for unknown paths, and for modules that are already compiled or changed.
        """
        del optimizer

        compile_modules(module, self.modules)
        return module

    def describe(self) -> str:
        """The module to compile, or the number of modules."""
        return f"compile {in_few_words(self.modules)}"
