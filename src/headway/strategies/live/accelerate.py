"""Hugging Face Accelerate's clipping, which the Trainer uses, without the looks at ``.grad`` that it begins with.

It looks at every gradient, for one that is a ``DTensor``, before it calls ``torch.nn.utils.clip_grad_norm_``. Where
gradients are sharded such a look brings all of them whole. A plain parameter's gradient is plain, so that the
parameters tell as much.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import wrapt
from torch import nn

_MODULE, _CLASS, _METHOD = "accelerate.accelerator", "Accelerator", "_clip_grad_norm_dtensor_aware"


def install() -> None:
    """Replace the method, once, or as soon as Accelerate is imported; older versions lack it and need nothing.

    May be called again, and has to be where Accelerate was being imported before.
    """
    _await_import()
    if _MODULE in sys.modules:
        _replace(sys.modules[_MODULE])


@functools.cache
def _await_import() -> None:
    wrapt.register_post_import_hook(_replace, _MODULE)


def _replace(module: Any) -> None:
    owner = getattr(module, _CLASS, None)  # not there yet where Accelerate is what imports torch
    stock = getattr(owner, _METHOD, None)
    if owner is not None and stock is not None and not hasattr(stock, "__wrapped__"):
        setattr(owner, _METHOD, _clipping(stock))


def _clipping(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def clip(accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        from torch.distributed.tensor import DTensor  # takes long, and not every job has Accelerate

        given = list(parameters)
        if any(isinstance(parameter, DTensor) for parameter in given):
            return stock(accelerator, given, max_norm, norm_type=norm_type)
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type=norm_type)

    return clip
