"""The hook that brings a module's own parameters up to date before its forward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.decoupled import deferred
from headway.strategies.decoupled.settlement import Settlement


class MaterialiseHook:
    """A forward pre-hook for one module. Copies and pickles of the module get one that does nothing.

    It serves code that would not be noticed by ``DeferredParameter``, such as C++ extensions. Where gradients are not
    recorded it brings up to date everything, since there is nothing to overlap with and fused inference kernels look at
    several modules' parameters at once. So does a compiled module, whose code reads parameters without asking and is
    made for ordinary ones.
    """

    def __init__(self, settlement: Settlement | None, module: nn.Module | None) -> None:
        self._settlement = None if settlement is None else weakref.ref(settlement)
        self._module = None if module is None else weakref.ref(module)

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        """Bring ``module``'s own parameters up to date."""
        settlement = None if self._settlement is None else self._settlement()
        if settlement is None or self._module is None or self._module() is not module:
            return
        settlement.join_settling()
        compiled = torch_private.has_compiled_forward(module)
        if torch.is_grad_enabled() and not compiled and not torch_private.inside_transform():
            for parameter in torch_private.own_parameters(module).values():
                if (
                    type(parameter) is deferred.DeferredParameter
                    and (guard := deferred.entry_of(parameter)) is not None
                ):
                    guard.before_value()
        elif not settlement.idle:
            self._settle(settlement, module, compiled=compiled)

    @staticmethod
    def _settle(settlement: Settlement, module: nn.Module, *, compiled: bool) -> None:
        """Bring everything up to date."""
        if not compiled:
            settlement.settle_values()
            return
        if settlement.condition.filling and not settlement.condition.is_elsewhere:
            raise UnsupportedError(
                "a compiled module runs inside backward", got=type(module).__name__,
                expected="checkpoints inside of what is compiled", fix="Use stock DDP.",
            )  # fmt: skip
        settlement.settle_all()

    def __deepcopy__(self, _memo: Any) -> MaterialiseHook:
        """A hook for the copy: nothing is in flight there."""
        return MaterialiseHook(None, None)

    def __reduce__(self) -> Any:
        """As for a copy."""
        return MaterialiseHook, (None, None)
