"""MG-WFBP (arXiv 1811.11141): merge neighbouring gradients where waiting costs less than another start-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AlphaBeta:
    """What an all-reduce takes: ``alpha_s`` to start, ``beta_s`` a byte."""

    alpha_s: float
    beta_s: float


def merge(ready_s: Sequence[float], sizes_bytes: Sequence[int], cost: AlphaBeta) -> list[int]:
    """Sizes of merged groups of tensors that become ready in this order, at these times.

    A group is closed unless the next tensor will be ready less than one start-up after the group could be sent.
    """
    groups: list[int] = []
    free_s = 0.0
    size = sizes_bytes[0]
    for index in range(1, len(sizes_bytes)):
        start_s = max(ready_s[index - 1], free_s)
        if ready_s[index] < start_s + cost.alpha_s:
            size += sizes_bytes[index]
            continue
        groups.append(size)
        free_s = start_s + cost.alpha_s + cost.beta_s * size
        size = sizes_bytes[index]
    return [*groups, size]
