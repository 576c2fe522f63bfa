"""Operators, modes that see them, and fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

DispatchMode = TorchDispatchMode
"""The base of modes that see every operator's call, through ``__torch_dispatch__``."""


class KernelOverlay:
    """Python kernels laid over an operator library's own, each called with the original first."""

    def __init__(self, namespace: str, dispatch_key: str) -> None:
        self._namespace = namespace
        self._key = dispatch_key
        self._library = torch.library.Library(namespace, "IMPL")

    def put(self, operation: str, kernel: Callable[..., Any]) -> None:
        """Have ``operation`` call ``kernel(original, *args)``."""
        original = torch.library.get_kernel(f"{self._namespace}::{operation}", self._key)

        def overlaid(keyset: Any, *args: Any) -> Any:
            return kernel(lambda *passed: original.call_boxed(keyset, *passed), *args)

        with _override_unwarned():
            self._library.impl(operation, overlaid, self._key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Put the original kernels back in force."""
        self._library._destroy()


@contextmanager
def _override_unwarned() -> Iterator[None]:
    """Overriding a kernel warns once from C++; the override is meant and is taken back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def without_subclass_dispatch() -> AbstractContextManager[Any]:
    """A context in which tensor subclasses' ``__torch_function__`` is not called."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


@contextmanager
def without_user_modes() -> Iterator[None]:
    """A context in which work of our own is invisible to function modes, dispatch modes and autocast.

    Inference mode and recording of gradients are off in it too.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if _is_plain():  # as nearly always; to leave what is not in force takes as long as an update
            yield
            return
        with (
            torch._C._DisableFuncTorch(),
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),  # which the end of an inference mode would have undone
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield


def _is_plain() -> bool:
    """Whether this thread has no dispatch mode, transform, autocast or inference mode in force."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside it tensors have shapes, devices and lives as ever, and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one of ``fake_tensors``, without data."""
    return isinstance(tensor, FakeTensor)


def operator_name(operator: Any) -> str:
    """The qualified name of the operator that a dispatch mode is told of, such as "aten::detach"."""
    return str(operator._schema.name)


def operator_packet(operator: Any) -> Any:
    """The operator that a dispatch mode is told of, whichever overload it is."""
    return operator._overloadpacket


def returns_given_memory(operator: Any) -> bool:
    """Whether an operator says that it returns memory it was given: a view, or what it wrote to."""
    return any(each.alias_info for each in operator._schema.returns)


def returns_view(operator: Any) -> bool:
    """Whether an operator says that it returns memory it was given and did not write to."""
    return any(each.alias_info and not each.alias_info.is_write for each in operator._schema.returns)


def pop_dispatch_mode() -> None:
    """Take the innermost dispatch mode off, which was left within a backward: autograd brought it back afterwards."""
    _pop_mode()


def dispatch_modes() -> list[Any]:
    """The dispatch modes in force, the innermost last."""
    return _get_current_dispatch_mode_stack()
