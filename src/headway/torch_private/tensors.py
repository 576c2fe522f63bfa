"""Tensors, their memory, and parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._utils import _get_device_index
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._pytree import tree_leaves


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, as torch takes them apart."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that ``state_dict()`` has, each once, without calling what hooks it."""
    seen: set[int] = set()
    for prefix, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set and id(buffer) not in seen:
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


def device_here() -> torch.device:
    """The device that computes here: the accelerator that can be used, else the CPU.

    A build of torch for CUDA names its accelerator on machines without one, too.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")
