"""Modules whose forward is computed again in backward, live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed

from headway.passes.other_forward import give_forward, module_at


def checkpoint(root: nn.Module, path: str) -> None:
    """Have the module at ``path`` in ``root`` recompute.

    Raises UnsupportedError where there is none, or where another pass has changed it.
    """
    give_forward(module_at(root, path, "recompute"), repr(path), recomputed)


def recomputed(forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What ``forward`` of ``module`` gives, kept for backward as no more than what it is given."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpointed(forward, *args, use_reentrant=False, context_fn=partial(_contexts, module), **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _buffers_left_alone(module)


@contextmanager
def _buffers_left_alone(module: nn.Module) -> Iterator[None]:
    """Computing again changes no buffers, such as running means: it is done on copies of them."""
    own = [
        (each, name, buffer)
        for each in module.modules()
        for name, buffer in each.named_buffers(recurse=False)
    ]
    for each, name, buffer in own:
        setattr(each, name, buffer.clone())
    try:
        yield
    finally:
        for each, name, buffer in own:
            setattr(each, name, buffer)
