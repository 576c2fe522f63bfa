"""Private names for tracing a forward without computing it: fake tensors, and interception of calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException as _ByValue
from torch._subclasses.fake_tensor import DynamicOutputShapeException as _ShapeByValue
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Call = Callable[..., Any]

BY_VALUE: tuple[type[Exception], ...] = (_ByValue, _ShapeByValue)
"""Raised where Python needs the value of a fake tensor, or a shape that depends on one."""


@contextlib.contextmanager
def without_computing() -> Iterator[None]:
    """A context in which operations return fake tensors (shape, dtype and device only); parameters may be real."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # autocast would cache fake casts of parameters
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a fake tensor."""
    return isinstance(tensor, FakeTensor)


def memory_of(tensor: torch.Tensor) -> int:
    """A key for a tensor's memory, shared with its views and detached copies."""
    memory: int = tensor.untyped_storage()._cdata
    return memory


class Draws(TorchDispatchMode):
    """Counts the operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it if it draws random numbers."""
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def is_pipe_split(function: object) -> bool:
    """Whether ``function`` is the operator that ``torch.distributed.pipelining.pipe_split()`` calls."""
    return str(function) in ("pippy._pipe_split", "pippy._pipe_split.default")


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward or backward hooks."""
    return any(getattr(module, hooks, None) for hooks in _HOOKS)


def leaves(value: Any) -> list[Any]:
    """The leaves of nested containers (a pytree)."""
    flat: list[Any] = tree_leaves(value)
    return flat


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to each leaf of nested containers; a ``slice`` is a container too."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(mapped(function, bound) for bound in (leaf.start, leaf.stop, leaf.step)))
        return function(leaf)

    return tree_map(of_leaf, value)


def in_checkpoint() -> bool:
    """Whether saved-tensor hooks are active, as inside non-reentrant checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def calls_intercepted(
    of_module: Callable[[nn.Module, Call, tuple[Any, ...], dict[str, Any]], Any],
    of_function: Callable[[Call, Call, tuple[Any, ...], dict[str, Any]], Any],
    modules: tuple[nn.Module, ...],
) -> Iterator[None]:
    """A context that intercepts calls of modules, checkpoints and autograd functions.

    Module calls go to ``of_module(module, call, args, kwargs)``. Calls of ``torch.utils.checkpoint.checkpoint``, also
    as imported by the files of ``modules``, and of ``torch.autograd.Function.apply`` go to
    ``of_function(function, call, args, kwargs)``. ``call`` runs the original.
    """
    call, apply, checkpoint = (
        nn.Module.__call__, torch.autograd.Function.__dict__["apply"], torch.utils.checkpoint.checkpoint,
    )  # fmt: skip

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return of_module(self, functools.partial(call, self), args, kwargs)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return of_function(functools.partial(_apply, cls), apply.__get__(None, cls), args, kwargs)

    @functools.wraps(checkpoint)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return of_function(checkpoint, checkpoint, args, kwargs)

    spaces = [vars(torch.utils.checkpoint)]
    spaces += [getattr(type(module).forward, "__globals__", {}) for module in modules]
    places = [(space, name) for space in spaces for name, value in list(space.items()) if value is checkpoint]
    nn.Module.__call__ = called  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment]
    for space, name in places:
        space[name] = checkpointed
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for space, name in places:
            space[name] = checkpoint


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.apply(*args, **kwargs)
