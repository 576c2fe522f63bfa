"""Modules that compute under autocast, live."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from headway.errors import UnsupportedError
from headway.passes.other_forward import give_forward, module_at

_LEAVE_OUT = "Leave the pass precision out of the plan."


def compute_under_autocast(root: nn.Module, paths: Sequence[str], dtype: str) -> None:
    """Have the modules at ``paths`` in ``root``, or ``root`` where there are none, compute under autocast to ``dtype``.

    Raises UnsupportedError for a path that it does not have, parameters that are not float32 or not on one kind of
    device, and a module that another pass has changed.
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
    for path in paths or ("",):
        give_forward(
            module_at(root, path, "compute under autocast"),
            repr(path) if path else type(root).__name__,
            _UnderAutocast(device, dtype),
            may_be_wrapped=True,
        )


class _UnderAutocast:
    def __init__(self, device: str, dtype: str) -> None:
        self._device = device
        self._dtype: torch.dtype = getattr(torch, dtype)

    def __call__(self, forward: Callable[..., Any], _module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(self._device):
            raise UnsupportedError(
                "the script calls its model under autocast already",
                got=f"autocast to {torch.get_autocast_dtype(self._device)}",
                expected="a script that computes in float32", fix=_LEAVE_OUT,
            )  # fmt: skip
        with torch.autocast(self._device, dtype=self._dtype):
            out = forward(*args, **kwargs)
        return _widened(out, self._dtype)


def _widened(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with tensors of ``dtype`` as float32, which is what the script and the modules behind it expect.

    What is no tensor, tuple, list, dict or data class stays as it is, caches of attention among it.
    """
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype is dtype else value
    if isinstance(value, tuple):
        items = [_widened(each, dtype) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_widened(each, dtype) for each in value]
    if isinstance(value, dict):  # copied, for those of transformers are more than that
        changed = copy.copy(value)
        for key, each in value.items():
            changed[key] = _widened(each, dtype)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        like: Any = copy.copy(value)
        for each in dataclasses.fields(value):
            if hasattr(value, each.name):
                object.__setattr__(like, each.name, _widened(getattr(value, each.name), dtype))
        return like
    return value
