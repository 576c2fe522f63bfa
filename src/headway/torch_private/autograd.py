"""Where autograd is, and what it counts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
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
    made: type[Any] = cast(Any, function)._backward_cls
    return made


def put_gradient_hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have ``hook`` change the gradient of ``tensor`` before any other hook sees it. Pickles do without it."""
    marked: Any = unserializable_hook(functools.partial(hook))  # a bound method cannot be
    handle = tensor.register_hook(marked)
    hooks: Any = tensor._backward_hooks
    own = hooks.pop(handle.id)
    others = list(hooks.items())
    hooks.clear()  # autograd goes through them as they were put in
    hooks[handle.id] = own
    hooks.update(others)


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """A context in which writing to ``tensors`` does not invalidate graphs that saved them."""
    autograd = cast(Any, torch.autograd)
    return cast("AbstractContextManager[Any]", autograd._unsafe_preserve_version_counter(tuple(tensors)))


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often a tensor has been written in place, as autograd counts it; raises RuntimeError for inference tensors."""


def version_or_zero(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to; 0 for one of inference mode, of which torch does not count it."""
    return 0 if tensor.is_inference() else version_of(tensor)
