"""Forward gone through without computing: fake tensors, and what becomes visible of calls on the way."""

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
"""What is raised where Python asks for the value of a tensor, or for a shape that depends on one."""


@contextlib.contextmanager
def without_computing() -> Iterator[None]:
    """Within it, operations give tensors of shapes, types and devices alone; parameters may be real."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # autocast would keep what it makes of parameters
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is such a tensor."""
    return isinstance(tensor, FakeTensor)


def memory_of(tensor: torch.Tensor) -> int:
    """Tells memories apart: a tensor, its views and what was detached from it have one."""
    memory: int = tensor.untyped_storage()._cdata
    return memory


class Draws(TorchDispatchMode):
    """Counts the operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry one operation out."""
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def is_pipe_split(function: object) -> bool:
    """Whether it is what ``torch.distributed.pipelining.pipe_split()`` calls."""
    return str(function) in ("pippy._pipe_split", "pippy._pipe_split.default")


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called with every forward or backward of the module."""
    return any(getattr(module, hooks, None) for hooks in _HOOKS)


def leaves(value: Any) -> list[Any]:
    """What nested containers hold, as torch takes them apart."""
    flat: list[Any] = tree_leaves(value)
    return flat


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same containers of what ``function`` makes of each leaf; a ``slice`` is a container too."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(mapped(function, bound) for bound in (leaf.start, leaf.stop, leaf.step)))
        return function(leaf)

    return tree_map(of_leaf, value)


def in_checkpoint() -> bool:
    """Whether something else than autograd keeps what is kept for backward: non-reentrant checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def calls_intercepted(
    of_module: Callable[[nn.Module, Call, tuple[Any, ...], dict[str, Any]], Any],
    of_function: Callable[[Call, Call, tuple[Any, ...], dict[str, Any]], Any],
    modules: tuple[nn.Module, ...],
) -> Iterator[None]:
    """Have every call of a module go to ``of_module`` with what would carry it out.

    Calls of ``torch.utils.checkpoint.checkpoint``, as the files of ``modules`` name it, and ``apply`` of functions with
    a backward of their own go to ``of_function``: what is called, what carries it out, and its arguments.
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
