"""Batches as ``train_step`` is given them: taken apart, and compared with the example of which a model was cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.errors import UserError
from headway.torch_private.tracing import leaves, mapped


def split_up(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments: a dict has the latter, a tuple or a list the former."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def micro_batch_of(example: tuple[Any, Any], micro_batches: int) -> tuple[Any, Any]:
    """The first micro-batch. Raises UserError where all are not of one size."""
    tensors = [each for each in leaves(example) if isinstance(each, torch.Tensor)]
    rows = {each.shape[0] if each.dim() else 0 for each in tensors}
    if len(rows) != 1 or 0 in rows or next(iter(rows)) % micro_batches:
        raise UserError(
            "example_batch does not split into micro-batches of one size", got=said_of(tensors) or "no tensor",
            expected=f"tensors of one number of samples, a multiple of {micro_batches}, in their first dimension",
            fix="Expand what holds for all samples to each of them.",
        )  # fmt: skip
    size = next(iter(rows)) // micro_batches
    found: tuple[Any, Any] = mapped(
        lambda each: each[:size] if isinstance(each, torch.Tensor) else each, example
    )
    return found


def form_of(example: Any) -> Any:
    """All of a batch but its tensors."""
    return repr(mapped(lambda each: "tensor" if isinstance(each, torch.Tensor) else each, example))


def said_of(tensors: Sequence[torch.Tensor]) -> str:
    """Their types and shapes."""
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in tensors)
