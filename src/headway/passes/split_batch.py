"""A model that computes its batches in parts, live."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from headway.errors import UnsupportedError
from headway.passes.checkpointed import recomputed
from headway.passes.other_forward import give_forward, refuse_forwards_put_there

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
MIXED = 1e-3  # by how much outputs of samples alone may differ from those of samples together
FEW_DIGITS = 0.03  # the same of half precision
LEAVE_OUT = "Leave the pass accumulate out of the plan."


def split(module: nn.Module, parts: int) -> None:
    """Have ``module`` compute its batches in ``parts``. Raises UnsupportedError for batch norm."""
    for name, each in module.named_modules():
        if isinstance(each, BATCH_NORMS):
            raise UnsupportedError(
                "a batch with batch norm cannot be split: each part would have other statistics", got=name,
                fix=LEAVE_OUT,
            )  # fmt: skip
    give_forward(module, type(module).__name__, _InParts(parts))
    refuse_forwards_put_there(module, "a batch in parts", LEAVE_OUT)


class _InParts:
    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._checked = False

    def __call__(self, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        given = (args, kwargs)
        samples = _samples(given)
        parts = min(self._parts, samples)  # the last batch of an epoch may have few samples
        if parts < 2:
            return forward(*args, **kwargs)
        first = not self._checked
        if first:
            _check_apart(forward, module, given)
            self._checked = True
        buffers = {name: each.clone() for name, each in module.named_buffers()} if first else {}
        bounds = list(pairwise(samples * part // parts for part in range(parts + 1)))
        outputs = []
        for begin, end in bounds:
            own_args, own_kwargs = _part(given, begin, end)
            outputs.append(recomputed(forward, module, *own_args, **own_kwargs))
        changed = [
            name
            for name, each in module.named_buffers()
            if name in buffers and not torch.equal(each, buffers[name])
        ]
        if changed:
            raise UnsupportedError(
                "forward changes buffers, which parts of a batch would change several times",
                got=", ".join(changed), fix=LEAVE_OUT,
            )  # fmt: skip
        return _joined(outputs, [end - begin for begin, end in bounds])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _samples(given: Any) -> int:
    sizes = {each.shape[0] if each.dim() else 1 for each in _tensors(given)}
    if len(sizes) != 1:
        raise UnsupportedError(
            "a batch cannot be split whose tensors do not all have as many samples",
            got=f"first dimensions of {', '.join(map(str, sorted(sizes))) or 'no tensor'}", fix=LEAVE_OUT,
        )  # fmt: skip
    return int(sizes.pop())


def _part(value: Any, begin: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[begin:end]
    if type(value) in (tuple, list):
        return type(value)(_part(each, begin, end) for each in value)
    if type(value) is dict:
        return {key: _part(each, begin, end) for key, each in value.items()}
    if any(True for _ in _tensors(value)):
        raise UnsupportedError(
            "a batch of this type cannot be split", got=type(value).__name__, fix=LEAVE_OUT
        )
    return value


def _joined(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if any(not each.dim() or each.shape[0] != own for each, own in zip(outputs, samples, strict=True)):
            raise UnsupportedError(
                "a model puts out what is not of its samples, such as a loss, so that its batch cannot be split",
                got=f"a tensor of shape {tuple(first.shape)} for {samples[0]} samples", fix=LEAVE_OUT,
            )  # fmt: skip
        return torch.cat(list(outputs))
    if type(first) in (tuple, list):
        return type(first)(_joined(each, samples) for each in zip(*outputs, strict=True))
    if type(first) is dict:
        return {key: _joined([each[key] for each in outputs], samples) for key in first}
    raise UnsupportedError(
        "outputs of this type cannot be put together again", got=type(first).__name__,
        expected="tensors, and tuples, lists and dicts of them", fix=LEAVE_OUT,
    )  # fmt: skip


def _check_apart(forward: Callable[..., Any], module: nn.Module, given: Any) -> None:
    """Raise UnsupportedError where two samples give something else together than each by itself."""
    modes = [(each, each.training) for each in module.modules()]
    outputs = []
    with torch.no_grad(), torch.random.fork_rng():
        module.eval()
        try:
            for begin, end in ((0, 2), (0, 1), (1, 2)):
                args, kwargs = _part(given, begin, end)
                outputs.append(forward(*args, **kwargs))
        finally:
            for each, mode in modes:
                each.training = mode
    together, *alone = outputs
    _joined([together], [2])
    for one, other in zip(_tensors(together), _tensors(_joined(alone, [1, 1])), strict=True):
        if not _are_alike(one, other):
            raise UnsupportedError(
                "this model mixes the samples of a batch, so that parts of it are trained otherwise",
                got="other outputs of two samples together than of each alone, in eval mode", fix=LEAVE_OUT,
            )  # fmt: skip


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    few = MIXED if torch.finfo(one.dtype).eps < MIXED / 10 else FEW_DIGITS
    largest = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(one, other, rtol=few, atol=few * largest, equal_nan=True)
