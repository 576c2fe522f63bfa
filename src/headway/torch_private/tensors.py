"""Tensors, their memory, and parameters."""

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
    """From inside a backward: call ``callback`` when its graph is done, before later-queued callbacks."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def inside_backward() -> bool:
    """Whether this thread is computing a node of a backward pass.

    In an end-of-backward callback this is true exactly where that backward was nested in another one, as
    reentrant activation checkpointing nests them.
    """
    return torch._C._current_autograd_node() is not None


def inside_transform() -> bool:
    """Whether a transform of torch.func is in progress, whose wrapped tensors nobody can tell from ordinary ones."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def node_type_of(function: type[torch.autograd.Function]) -> type[Any]:
    """The type of the nodes that ``function`` leaves in graphs."""
    node_type: type[Any] = cast(Any, function)._backward_cls
    return node_type


def put_gradient_hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have ``hook`` change the gradient of ``tensor`` before any other hook sees it. Pickles do without it."""
    marked: Any = unserializable_hook(functools.partial(hook))  # a bound method cannot be
    handle = tensor.register_hook(marked)
    hooks: Any = tensor._backward_hooks
    first = hooks.pop(handle.id)
    later = list(hooks.items())
    hooks.clear()  # autograd goes through them as they were put in
    hooks[handle.id] = first
    hooks.update(later)


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """A context in which writing to ``tensors`` does not invalidate graphs that saved them."""
    autograd = cast(Any, torch.autograd)
    return cast("AbstractContextManager[Any]", autograd._unsafe_preserve_version_counter(tuple(tensors)))


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor has been written in place, as autograd counts it; raises RuntimeError for inference tensors."""


def version_or_zero(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to; 0 for one of inference mode, of which torch does not count it."""
    return 0 if tensor.is_inference() else version_of(tensor)


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


def returns_input_memory(operator: Any) -> bool:
    """Whether an operator says that it returns memory it was given: a view, or what it wrote to."""
    return any(return_.alias_info for return_ in operator._schema.returns)


def returns_view(operator: Any) -> bool:
    """Whether an operator says that it returns memory it was given and did not write to."""
    return any(return_.alias_info and not return_.alias_info.is_write for return_ in operator._schema.returns)


def pop_dispatch_mode() -> None:
    """Take the innermost dispatch mode off, which was left within a backward: autograd brought it back afterwards."""
    _pop_mode()


def dispatch_modes() -> list[Any]:
    """The dispatch modes in force, the innermost last."""
    return _get_current_dispatch_mode_stack()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, as torch takes them apart."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that ``state_dict()`` has, each once, without calling what hooks it."""
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
    """How many tensors share the storage of ``tensor``, plus a constant for the asking."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others that there are: the same for all tensors that share it."""
    key: int = storage._cdata
    return key


def device_index(device: Any) -> int:
    """The index of a CUDA device given in any of the forms that DDP's ``device_ids`` takes."""
    return int(_get_device_index(device, True))


class StandsInForParameter(torch.nn.Parameter):
    """What a parameter's class is changed to, in place, for a while. Never constructed: ``type(p)(...)`` is ordinary.

    torch makes an ``nn.Parameter`` of a tensor of another class only where ``detach()`` keeps that class. So from the
    first such class on whatever is constructed of one of these, or as one, is ordinary.
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
"""The parameters that a module has itself, by name: None where one is not there, and one twice that has two names."""


own_modules: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = operator.attrgetter("_modules")
"""The modules that a module has itself, by name."""


foreach_copy: Callable[..., None] = torch._foreach_copy_
"""Copy a list of tensors into another, all at once."""


def compute_device() -> torch.device:
    """The device that computes here: the accelerator that can be used, else the CPU.

    A build of torch for CUDA names its accelerator on machines without one, too.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")
