"""Reads: the functions through which scripts read gradients between backward and step.

``clip_grad_norm_`` and its relatives of ``torch.nn.utils``, and what ``GradScaler`` unscales by, are replaced once, by
functions that ask whoever may know better and tell whoever watches, and else do what they always did. A script that has
imported one of the former by name before calls the stock one, which nobody then sees; ``headway record`` and ``headway
run`` come first. A script's own look at ``.grad`` passes no function at all: ``recording/looks.py`` notes those.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.strategies.live import accelerate
from headway.trace.events import Read

Clipping = Callable[[Sequence[torch.Tensor], float, float, bool], torch.Tensor | None]
"""Clips by a finite norm (parameters, max_norm, norm_type, error_if_nonfinite), or returns None and torch does."""

Watcher = Callable[[str, Sequence[torch.Tensor], int, int, bool], None]
"""Told of a read: what for, the parameters or gradients, start and end (ns), whether each rank read its share only."""


class _Seams:
    """Who is asked and who is told."""

    installed = False
    clipping: tuple[Clipping, ...] = ()  # first those of whole gradients
    whole: tuple[Clipping, ...] = ()
    unscaling: torch_private.Unscaling | None = None
    watcher: Watcher | None = None
    depth = 0  # of the replaced functions that are running


class _Done(NamedTuple):
    result: Any
    sharded: bool = False


def watch_reads(watcher: Watcher | None) -> None:
    """Tell ``watcher`` of every read from now on; None stops it."""
    install()
    _Seams.watcher = watcher


def answer_clipping(clipping: Clipping, *, whole: bool = False) -> None:
    """Have ``clipping`` asked before torch whenever gradients are clipped by norm, from now on.

    One that needs ``whole`` gradients, and not each rank's share of them, is asked before the others.
    """
    install()
    if clipping not in _Seams.clipping:
        _Seams.clipping = (clipping, *_Seams.clipping) if whole else (*_Seams.clipping, clipping)
        _Seams.whole += (clipping,) * whole


def answer_unscaling(unscaling: torch_private.Unscaling) -> None:
    """Have ``unscaling`` asked first whenever a ``GradScaler`` unscales, from now on."""
    install()
    _Seams.unscaling = unscaling


def inside_a_read() -> bool:
    """Whether one of the replaced functions is running, which looks at gradients itself."""
    return _Seams.depth > 0


def install() -> None:
    """Replace the functions, once, and Accelerate's way to them as soon as it is there."""
    accelerate.install()
    if _Seams.installed:
        return
    _Seams.installed = True
    utils = nn.utils
    _replace("clip_grad_norm_", _clip_grad_norm(utils.clip_grad_norm_))
    _replace("clip_grad_value_", _reading(Read.CLIP_VALUE, utils.clip_grad_value_))
    _replace("get_total_norm", _reading(Read.LOOK, utils.get_total_norm))
    _replace("clip_grads_with_norm_", _reading(Read.SCALE, utils.clip_grads_with_norm_))
    torch_private.around_unscaling(_unscale)


def _replace(name: str, replacement: Callable[..., Any]) -> None:
    setattr(nn.utils, name, replacement)
    if hasattr(nn.utils.clip_grad, name):
        setattr(nn.utils.clip_grad, name, replacement)


def _clip_grad_norm(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = _listed(parameters)

        def clip() -> _Done:
            for clipping in _Seams.clipping if math.isfinite(max_norm) else ():
                norm = clipping(given, float(max_norm), float(norm_type), error_if_nonfinite)
                if norm is not None:
                    return _Done(norm, sharded=clipping not in _Seams.whole)
            return _Done(stock(given, max_norm, norm_type, error_if_nonfinite, foreach))

        # Clipping by an infinite norm is how scripts ask for the norm, perhaps on one rank.
        norm: torch.Tensor = _timed(Read.CLIP if math.isfinite(max_norm) else Read.LOOK, given, clip)
        return norm

    return clip_grad_norm_


def _reading(what_for: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def read(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = _listed(tensors)
        return _timed(what_for, given, lambda: _Done(stock(given, *args, **kwargs)))

    return read


def _unscale(
    stock: torch_private.Unscaling,
    optimizer: Optimizer,
    inverse_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> Any:
    def unscale() -> _Done:
        arguments = (optimizer, inverse_scale, found_inf, allow_fp16)
        found = None if _Seams.unscaling is None else _Seams.unscaling(*arguments)
        return _Done(stock(*arguments)) if found is None else _Done(found, sharded=True)

    return _timed(Read.UNSCALE, [p for group in optimizer.param_groups for p in group["params"]], unscale)


def _listed(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _timed(what_for: str, tensors: Sequence[torch.Tensor], act: Callable[[], _Done]) -> Any:
    start_ns = time.monotonic_ns()
    _Seams.depth += 1
    try:
        done = act()
    finally:
        _Seams.depth -= 1
    if _Seams.watcher is not None:
        _Seams.watcher(what_for, tensors, start_ns, time.monotonic_ns(), done.sharded)
    return done.result
