"""Modules that compute under autocast, live."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from headway.errors import UnsupportedError
from headway.passes.each_tensor import each_tensor
from headway.passes.loss_scale import LossScale
from headway.passes.other_forward import give_call, module_at

_LEAVE_OUT = "Leave the pass precision out of the plan."


def compute_under_autocast(root: nn.Module, paths: Sequence[str], dtype: str) -> None:
    """Have the modules at ``paths`` in ``root``, or ``root`` where there are none, compute under autocast to ``dtype``.

    In float16 gradients are scaled, and there are no ``paths``. Raises UnsupportedError for a path that it does not
    have, parameters that are not float32 or not on one kind of device, and a module that another pass has changed.
    """
    parameters = list(root.parameters())
    others = sorted({str(each.dtype) for each in parameters if each.dtype is not torch.float32})
    if others:
        raise UnsupportedError(
            "this model has parameters that autocast is not for", got=", ".join(others),
            expected="torch.float32", fix=_LEAVE_OUT,
        )  # fmt: skip
    devices = {each.device.type for each in parameters}
    if len(devices) != 1 or not torch.amp.is_autocast_available(*devices):
        raise UnsupportedError(
            "autocast needs parameters on one kind of device that has it",
            got=", ".join(sorted(devices)) or "no parameters", fix=_LEAVE_OUT,
        )  # fmt: skip
    (device,) = devices
    assert dtype != "float16" or not paths, "of a part of a model gradients are not told apart"
    scale = LossScale(root) if dtype == "float16" else None
    for path in paths or ("",):
        give_call(
            module_at(root, path, "compute under autocast"),
            repr(path) if path else type(root).__name__,
            _UnderAutocast(device, dtype, scale),
        )


class _UnderAutocast:
    def __init__(self, device: str, dtype: str, scale: LossScale | None) -> None:
        self._device = device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._scale = scale
        self._inside = threading.local()

    def __call__(self, forward: Callable[..., Any], _module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._inside, "forward", False):  # the module calls itself, as a step of Lightning's does
            return forward(*args, **kwargs)
        if torch.is_autocast_enabled(self._device):
            raise UnsupportedError(
                "the script calls its model under autocast already",
                got=f"autocast to {torch.get_autocast_dtype(self._device)}",
                expected="a script that computes in float32", fix=_LEAVE_OUT,
            )  # fmt: skip
        if self._scale is not None:
            args, kwargs = self._scale.entering((args, kwargs))
        self._inside.forward = True
        try:
            with torch.autocast(self._device, dtype=self._dtype):
                out = forward(*args, **kwargs)
        finally:
            self._inside.forward = False
        if self._scale is not None:
            out = self._scale.leaving(out)
        return each_tensor(out, self._widened)

    def _widened(self, value: torch.Tensor) -> torch.Tensor:
        """Float32 is what the script, and the modules behind, expect."""
        return value.float() if value.dtype is self._dtype else value
