"""A model that is traced stays as it was: its attributes, its buffers, and Python's random numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.errors import UnsupportedError
from headway.torch_private import tracing as private

_RESTORED = ("_parameters", "_buffers", "_modules")
HOW_TO_MEND = (
    "Put that part into a module of its own, which is then called as it is, choose split_points elsewhere, or build "
    "stages with torch.distributed.pipelining and start the script with headway run."
)


@dataclass(frozen=True)
class Drawn:
    """Where Python's and numpy's generators of random numbers are."""

    python: Any
    numpy: Any

    @staticmethod
    def now() -> Drawn:
        """Where they are now."""
        arrays = sys.modules.get("numpy")
        if arrays is None:
            return Drawn(random.getstate(), None)
        name, keys, *rest = arrays.random.get_state()
        return Drawn(random.getstate(), (name, tuple(keys), *rest))

    def put_back(self) -> None:
        """Have them draw the same again."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module, inside: set[str]) -> Iterator[None]:
    """Put back what a forward changes of its modules.

    Raises UnsupportedError for hooks and assignments of the modules ``inside``: recorded calls would not repeat them.
    """
    for name in inside:
        if private.has_hooks(model.get_submodule(name)):
            raise UnsupportedError(
                "a module that is divided among stages has hooks, which no rank could call", got=name or "the model",
                fix="Register hooks of the modules that stages are made of.",
            )  # fmt: skip
    buffers = [(each, each.clone()) for each in model.buffers()]
    before = [(name, module, _attributes(module)) for name, module in model.named_modules()]
    changed = None
    try:
        yield
    finally:
        for name, module, own in before:
            now = _attributes(module)
            if name in inside and changed is None:
                changed = next((f"{name or 'model'}.{each}" for each in _differing(own, now)), None)
            vars(module).update({each: value for each, value in own.items() if each not in _RESTORED})
            for each in vars(module).keys() - own.keys():
                del vars(module)[each]
            for each in _RESTORED:
                kept = vars(module)[each]
                if kept != own[each] if each == "_modules" else _differing(own[each], kept):
                    kept.clear()
                    kept.update(own[each])
        with torch.no_grad():
            for each, value in buffers:
                each.copy_(value)
    if changed is not None:
        raise UnsupportedError(
            "forward of a module that is divided among stages assigns attributes, which recorded calls would not",
            got=changed, fix=HOW_TO_MEND,
        )  # fmt: skip


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: dict(own) if name in _RESTORED else own for name, own in vars(module).items()}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    found = []
    for name in one.keys() | other.keys():
        mine, its = one.get(name), other.get(name)
        if name in _RESTORED:
            found += _differing(mine or {}, its or {})
        elif mine is not its or (name in one) != (name in other):
            found.append(name)
    return sorted(found)
