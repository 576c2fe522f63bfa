"""A checksum of tensors' bits: whether ranks hold the same values."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """The sum of ``tensors``, of dtypes of two bytes or more, read as integers: no device rounds it otherwise.

    Non-negative, and below 2**62.
    """
    total = 0
    for number, each in enumerate(tensors, 1):
        words = each.detach().contiguous().view(-1).view(torch.int16)
        total += number * int(words.sum(dtype=torch.int64))
    return total % 2**62
