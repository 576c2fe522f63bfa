"""Cutting large parameters into parts, and runs of parts into groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from headway.model import DTYPE_BYTES, ModelSpec, ParameterSpec
from headway.scheduling.buckets import Part

Groups = list[list[Part]]
CapAt = Callable[[int], float]
"""The size (bytes) of the group that begins after so many bytes."""


def cut(parameters: Iterable[ParameterSpec], limit_bytes: float) -> list[Part]:
    """The parameters in their order, those larger than ``limit_bytes`` as equal parts, give or take one element.

    Splitting tensors lets a large one begin early and be overtaken (ByteScheduler, Peng et al., SOSP 2019).
    """
    parts = []
    for parameter in parameters:
        limit = max(1, int(limit_bytes // DTYPE_BYTES[parameter.dtype]))
        count = max(1, -(-parameter.numel // limit))
        bounds = [index * parameter.numel // count for index in range(count + 1)]
        parts += [Part(parameter.name, start, end) for start, end in itertools.pairwise(bounds)]
    return parts


def size_bytes(part: Part, model: ModelSpec) -> int:
    """The size of a part."""
    return part.numel * DTYPE_BYTES[model.by_name[part.parameter].dtype]


def fill(parts: Sequence[Part], model: ModelSpec, cap: float | CapAt) -> Groups:
    """Cut ``parts``, in their order, into groups of about ``cap`` bytes, which may depend on where a group begins.

    A group closes before the part that would take it past the cap. Dtypes are grouped apart, and groups come in
    the order of their last parts.
    """
    cap_at: CapAt = cap if callable(cap) else lambda _: cap
    open_groups: dict[str, tuple[list[Part], int, float]] = {}
    groups: Groups = []
    begun = 0
    for part in parts:
        dtype = model.by_name[part.parameter].dtype
        size = part.numel * DTYPE_BYTES[dtype]
        group, filled, limit = open_groups.get(dtype, ([], 0, 0.0))
        if not group or filled + size > limit:
            group, filled, limit = [], 0, cap_at(begun)
            groups.append(group)
        group.append(part)
        begun += size
        open_groups[dtype] = group, filled + size, limit
    return by_last_part(groups, parts)


def by_last_part(groups: Groups, parts: Sequence[Part]) -> Groups:
    """The groups in the order in which ``parts`` completes them."""
    if len(groups) < 2:
        return groups
    position = {part: index for index, part in enumerate(parts)}
    return sorted(groups, key=lambda group: position[group[-1]])
