"""Classes that parameters are given in place while somebody wants to know who looks at their gradients or values.

As in the decoupled runtime (``deferred``): what makes that bring a parameter up to date counts as a look here. None of
them is ever constructed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway import torch_private
from headway.strategies.decoupled.deferred import (
    ABOUT_NEITHER,
    GRADIENT_ACCESS,
    gradient_of,
    ordinary_copy,
    set_gradient,
    tensors_in,
)

Note = Callable[[nn.Parameter, str], None]
"""Told of a look: the parameter, and the name of the function that looked, where that is known."""


def noticing_gradients(note: Note) -> type[nn.Parameter]:
    """The class of parameters that tell ``note`` who reads their gradient; values are used at torch's own speed."""

    class NoticedGradient(torch_private.StandsInForParameter):
        """An ``nn.Parameter`` while looks at its gradient are noted."""

        @property
        def grad(self) -> torch.Tensor | None:
            """The gradient."""
            note(self, sys._getframe(1).f_code.co_name)
            return gradient_of(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            set_gradient(self, value)

        @grad.deleter
        def grad(self) -> None:
            set_gradient(self, None)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            """Copy the value into an ordinary parameter."""
            return ordinary_copy(self, memo)

    return NoticedGradient


def noticing_values(note: Note) -> type[nn.Parameter]:
    """The class of parameters that tell ``note`` of every use of their value from Python."""

    class NoticedValue(torch_private.StandsInForParameter):
        """An ``nn.Parameter`` while looks at its value are noted."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func not in GRADIENT_ACCESS and func not in ABOUT_NEITHER:
                for parameter in tensors_in((args, kwargs), cls):
                    note(parameter, "")
            with torch_private.without_subclass_dispatch():
                return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            """Copy the value into an ordinary parameter."""
            note(self, "")
            with torch_private.without_subclass_dispatch():
                return ordinary_copy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickle an ordinary parameter."""
            note(self, "")
            with torch_private.without_subclass_dispatch():
                return nn.Parameter.__reduce_ex__(self, protocol)

        def __repr__(self) -> Any:  # type: ignore[override]
            """Show an ordinary parameter."""
            note(self, "")
            with torch_private.without_subclass_dispatch():
                return repr(nn.Parameter(self, self.requires_grad))

    return NoticedValue
