"""The parameters that a module trains, looked at so quickly that it can be done before every forward."""

from __future__ import annotations

from typing import Any

from torch import nn

from headway import torch_private


class TrainedSet:
    """The modules and parameters in ``module`` now, which parameters require a gradient, and what is compiled."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._seen = self._now()

    def changed(self, module: nn.Module) -> bool:
        """Whether ``module`` is another, or any parameter or module in it has come, gone, been frozen or unfrozen, or
        compiled in place since.
        """
        return module is not self._modules[0] or self._now() != self._seen

    def _now(self) -> tuple[list[int], list[bool], list[int], list[tuple[Any, ...]]]:
        own = [torch_private.own_parameters(each).values() for each in self._modules]
        parameters = [p for those in own for p in those if p is not None]
        parts = [id(part) for each in self._modules for part in torch_private.own_modules(each).values()]
        marks = [torch_private.compilation_marks(each) for each in self._modules]
        with torch_private.without_subclass_dispatch():
            return [id(p) for p in parameters], [p.requires_grad for p in parameters], parts, marks
