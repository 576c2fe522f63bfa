"""Modules whose forward is computed again in backward, live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed

from headway.errors import UnsupportedError
from headway.passes.other_forward import give_forward, module_at
from headway.torch_private import version_of


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
    return nullcontext(), _as_before(module, _found(module))


class _Found(NamedTuple):
    """A buffer as a forward found it. ``copy`` is None where forward is known to leave it as it is."""

    owner: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    training: bool
    copy: torch.Tensor | None

    def is_steady(self) -> bool:
        """Whether forward has left it as it was."""
        now = getattr(self.owner, self.name)
        same = now is self.buffer and version_of(now) == self.version
        return same and (self.copy is None or torch.equal(now, self.copy))


_steady: WeakKeyDictionary[nn.Module, dict[bool, frozenset[str]]] = WeakKeyDictionary()
"""The buffers of each module that its forward leaves as they are, as its first one showed: in training, and not."""


def _found(module: nn.Module) -> list[_Found]:
    """The buffers that ``module`` has now, with copies of those that its forward may change."""
    found = []
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            copy = None if name in _steady.get(each, {}).get(each.training, ()) else buffer.clone()
            found.append(_Found(each, name, buffer, version_of(buffer), each.training, copy))
    return found


@contextmanager
def _as_before(module: nn.Module, found: list[_Found]) -> Iterator[None]:
    """Compute again with the buffers that forward found, and leave those that it left.

    Forward may use what it changes, as spectral norms and codebooks do, and running means are to be changed once.
    """
    for each in found:
        if each.copy is None and not each.is_steady():
            raise UnsupportedError(
                "a buffer that forward did not change at first has changed, so it cannot be computed again",
                got=f"{each.name} of a {type(each.owner).__name__}", fix="Leave its module out of recompute.",
            )  # fmt: skip
    for owner, training in {(each.owner, each.training) for each in found}:
        known = _steady.setdefault(owner, {})
        if training not in known:
            known[training] = frozenset(
                each.name for each in found if each.owner is owner and each.is_steady()
            )
    left = [(each, getattr(each.owner, each.name)) for each in found if each.copy is not None]
    for each, _ in left:
        setattr(each.owner, each.name, each.copy)
    try:
        yield
    finally:
        for each, buffer in left:
            setattr(each.owner, each.name, buffer)
