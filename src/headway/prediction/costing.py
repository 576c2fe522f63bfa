"""Counts the work (FLOPs, bytes, kernels) of every layer of a torch module in one forward.

The meta device computes and allocates nothing, so a model of any size takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from headway import torch_private
from headway.models.table import Work
from headway.prediction.function import Built


class LayerWork:
    """The work of each module that owns parameters, in the order of their first use in forward."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.work: dict[str, Work] = {}
        with _layers_entered(built, self._enter), _Counter(self._add):
            built.forward()

    def _enter(self, name: str) -> None:
        self._name = name
        self.work.setdefault(name, Work())

    def _add(self, work: Work) -> None:
        if self.work:  # work before the first layer belongs to no layer
            self.work[self._name] += work


@contextmanager
def _layers_entered(built: Built, enter: Callable[[str], None]) -> Iterator[None]:
    handles = [
        built.module.get_submodule(name).register_forward_pre_hook(
            lambda _module, _args, name=name: enter(name)
        )
        for name in built.layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Counter(torch_private.DispatchMode):
    """Reports the work of every operation except views: FLOPs, bytes read and written, one kernel."""

    def __init__(self, add: Callable[[Work], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch_private.operator_name(func) in _FREE or torch_private.returns_view(func):
            return out
        count = flop_registry.get(torch_private.operator_packet(func))
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        moved = sum(_size_bytes(value) for value in (args, tuple(kwargs.values()), out))
        self._add(Work(flops, float(moved), 1))
        return out


_FREE = ("aten::detach", "aten::empty", "aten::empty_like", "aten::lift_fresh")


def _size_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(_size_bytes(part) for part in value)
    return 0
