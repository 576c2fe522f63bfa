"""Private names of tensors, autograd, dispatch and parameters."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._utils import _get_device_index
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import unserializable_hook


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Inside a backward: call ``callback`` when its graph is done, before callbacks queued later."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def inside_backward() -> bool:
    """Whether this thread is computing a node of a backward pass.

    In an end-of-backward callback this is true exactly if that backward was nested in another one, as with reentrant
    activation checkpointing.
    """
    return torch._C._current_autograd_node() is not None


def inside_transform() -> bool:
    """Whether a torch.func transform is active. Its wrapped tensors cannot be told from ordinary ones."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def node_type_of(function: type[torch.autograd.Function]) -> type[Any]:
    """The type of the autograd nodes that ``function`` creates."""
    node_type: type[Any] = cast(Any, function)._backward_cls
    return node_type


def put_gradient_hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Register a hook on the gradient of ``tensor`` that runs before all others. Pickles omit it."""
    marked: Any = unserializable_hook(functools.partial(hook))  # a bound method cannot be
    handle = tensor.register_hook(marked)
    hooks: Any = tensor._backward_hooks
    first = hooks.pop(handle.id)
    later = list(hooks.items())
    hooks.clear()  # autograd runs them in insertion order
    hooks[handle.id] = first
    hooks.update(later)


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """A context in which in-place writes to ``tensors`` do not invalidate graphs that saved them."""
    autograd = cast(Any, torch.autograd)
    return cast("AbstractContextManager[Any]", autograd._unsafe_preserve_version_counter(tuple(tensors)))


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Autograd's counter of in-place writes to a tensor; raises RuntimeError for inference tensors."""


def version_or_zero(tensor: torch.Tensor) -> int:
    """Autograd's counter of in-place writes to ``tensor``; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else version_of(tensor)


DispatchMode = TorchDispatchMode
"""The base class of modes that intercept every operator call in ``__torch_dispatch__``."""


class KernelOverlay:
    """Replaces kernels of an operator library by Python kernels, which get the original as their first argument."""

    def __init__(self, namespace: str, dispatch_key: str) -> None:
        self._namespace = namespace
        self._key = dispatch_key
        self._library = torch.library.Library(namespace, "IMPL")

    def put(self, operation: str, kernel: Callable[..., Any]) -> None:
        """Make ``operation`` call ``kernel(original, *args)``."""
        original = torch.library.get_kernel(f"{self._namespace}::{operation}", self._key)

        def overlaid(keyset: Any, *args: Any) -> Any:
            return kernel(lambda *passed: original.call_boxed(keyset, *passed), *args)

        with _override_unwarned():
            self._library.impl(operation, overlaid, self._key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Restore the original kernels."""
        self._library._destroy()


@contextmanager
def _override_unwarned() -> Iterator[None]:
    """Suppress the warning of torch about overriding a kernel, which is intended and reversible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def without_subclass_dispatch() -> AbstractContextManager[Any]:
    """A context that disables ``__torch_function__`` of tensor subclasses."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


@contextmanager
def without_user_modes() -> Iterator[None]:
    """A context for Headway's own operations: without function modes, dispatch modes, transforms and autocast.

    Inference mode and gradient recording are off too.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if _is_plain():  # nearly always; disabling inactive modes would take as long as an update
            yield
            return
        with (
            torch._C._DisableFuncTorch(),
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.no_grad(),  # again, as leaving inference mode enables gradients
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield


def _is_plain() -> bool:
    """Whether no dispatch mode, transform, autocast or inference mode is active on this thread."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which new tensors have shapes, devices and lifetimes, but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was created inside ``fake_tensors``, without data."""
    return isinstance(tensor, FakeTensor)


def operator_name(operator: Any) -> str:
    """The qualified name of an operator in a dispatch mode, such as "aten::detach"."""
    return str(operator._schema.name)


def operator_packet(operator: Any) -> Any:
    """The operator packet (all overloads) of an operator in a dispatch mode."""
    return operator._overloadpacket


def returns_input_memory(operator: Any) -> bool:
    """Whether an operator's schema declares that it returns memory of its inputs: a view, or what it wrote to."""
    return any(return_.alias_info for return_ in operator._schema.returns)


def returns_view(operator: Any) -> bool:
    """Whether an operator's schema declares that it returns a view of an input without writing to it."""
    return any(return_.alias_info and not return_.alias_info.is_write for return_ in operator._schema.returns)


def pop_dispatch_mode() -> None:
    """Remove the innermost dispatch mode: one that was exited within a backward, after which autograd restored it."""
    _pop_mode()


def dispatch_modes() -> list[Any]:
    """The active dispatch modes, innermost last."""
    return _get_current_dispatch_mode_stack()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers (a pytree)."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers in ``state_dict()``, each once, without running its hooks."""
    seen: set[int] = set()
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule._buffers.items():
            if (
                buffer is not None
                and name not in submodule._non_persistent_buffers_set
                and id(buffer) not in seen
            ):
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors share the storage of ``tensor``, plus a constant for the call itself."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A key for a live storage, equal for all tensors that share it."""
    key: int = storage._cdata
    return key


def device_index(device: Any) -> int:
    """The index of a CUDA device, in any form that DDP's ``device_ids`` accepts."""
    return int(_get_device_index(device, True))


class StandsInForParameter(torch.nn.Parameter):
    """The base of classes to which a parameter's class is changed in place for a while. Never constructed.

    torch constructs an ``nn.Parameter`` from a tensor of another class only if ``detach()`` keeps that class. So once
    such a class exists, ``nn.Parameter.__new__`` is patched: whatever is constructed from or as one is ordinary.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _foreach_supported_types.append(cls)  # optimizers update it as they would the parameter
        if torch.nn.Parameter.__new__ is not _new_ordinary:
            torch.nn.Parameter.__new__ = _new_ordinary  # type: ignore[method-assign]


_new_parameter: Any = torch.nn.Parameter.__new__


def _new_ordinary(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    if issubclass(type(data), StandsInForParameter):
        data = data.detach()
    kind = torch.nn.Parameter if issubclass(cls, StandsInForParameter) else cls
    return _new_parameter(kind, data, requires_grad)


own_parameters: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = operator.attrgetter(
    "_parameters"
)
"""A module's direct parameters by name; None for a registered but absent one. Shared ones appear under each name."""


own_modules: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = operator.attrgetter("_modules")
"""A module's direct children by name."""


foreach_copy: Callable[..., None] = torch._foreach_copy_
"""Copy a list of tensors into another list, in one call."""


def compute_device() -> torch.device:
    """The device to compute on: the accelerator if one is usable, else the CPU.

    A CUDA build of torch names an accelerator even on machines without one, so availability is checked.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")
