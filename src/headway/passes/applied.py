"""The passes of a plan on a live model, which may be wrapped more than once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from headway.passes.base import Pass
from headway.plugins import asking

_applied: WeakKeyDictionary[Any, tuple[Pass, ...]] = WeakKeyDictionary()


def apply_all(passes: Sequence[Pass], module: nn.Module, optimizer: Any) -> nn.Module:
    """``module`` under ``passes``, in their order; ``optimizer`` may be None. Raises as ``Pass.apply``
    does, and PluginFaultError where one of another package fails.

    A module that is wrapped again, as by a second ``fit``, has those already that change it.
    """
    known = applied_to(module)
    for each in passes:
        if not (each.changes_module and each in known):
            with asking("pass", each):
                changed: object = each.apply(module, optimizer)
                if not isinstance(changed, nn.Module):
                    raise TypeError(f"apply() returned {type(changed).__name__}, expected a module")
                module = changed
    if passes:
        _applied[module] = tuple(passes)
    return module


def applied_to(module: nn.Module) -> tuple[Pass, ...]:
    """The passes that were applied to ``module``."""
    return _applied.get(module, ())
