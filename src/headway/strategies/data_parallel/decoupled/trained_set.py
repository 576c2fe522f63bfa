"""The parameters that a module trains, looked at so quickly that it can be done before every forward."""

from __future__ import annotations

from typing import Any

from torch import nn

from headway import torch_private


class TrainedSet:
    """The modules and parameters in ``module`` now, which parameters require a gradient, and what is compiled."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._own = [torch_private.own_parameters(each) for each in self._modules]
        self._parts = [torch_private.own_modules(each) for each in self._modules]
        self._seen = self._now()

    def changed(self) -> bool:
        """Whether any parameter or module has come, gone, been frozen or unfrozen, or compiled in place since."""
        return self._now() != self._seen

    def _now(self) -> tuple[list[int], list[bool], list[int], list[tuple[Any, ...]]]:
        parameters = [p for own in self._own for p in own.values() if p is not None]
        parts = [id(part) for own in self._parts for part in own.values()]
        marks = [torch_private.compilation_marks(each) for each in self._modules]
        with torch_private.without_subclass_dispatch():
            return [id(p) for p in parameters], [p.requires_grad for p in parameters], parts, marks
