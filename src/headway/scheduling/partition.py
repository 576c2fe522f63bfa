"""Cutting large parameters into parts, and runs of parts into groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

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

    A group closes before the part that would take it past the cap. It holds parts of one cut parameter at most:
    buckets that share a parameter are settled together, and others must not be drawn in. Dtypes are grouped apart,
    and groups come in the order of their last parts.
    """
    cap_at: CapAt = cap if callable(cap) else lambda _: cap
    open_groups: dict[str, _Open] = {}
    groups: Groups = []
    begun = 0
    for part in parts:
        parameter = model.by_name[part.parameter]
        size = part.numel * DTYPE_BYTES[parameter.dtype]
        cut_name = part.parameter if part.numel < parameter.numel else ""
        current = open_groups.get(parameter.dtype)
        if current is None or not current.takes(size, cut_name):
            current = open_groups[parameter.dtype] = _Open(cap_at(begun))
            groups.append(current.parts)
        current.parts.append(part)
        current.filled += size
        current.cut_name = cut_name or current.cut_name
        begun += size
    return [coalesced(group) for group in by_last_part(groups, parts)]


def coalesced(parts: Iterable[Part]) -> list[Part]:
    """The same elements, with neighbouring parts of one parameter made one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and last.parameter == part.parameter and last.end == part.start:
            found[-1] = Part(part.parameter, last.start, part.end)
        else:
            found.append(part)
    return found


@dataclass(slots=True)
class _Open:
    """A group that is being filled."""

    cap: float
    parts: list[Part] = field(default_factory=list)
    filled: int = 0
    cut_name: str = ""  # the parameter of which it holds a part only

    def takes(self, size: int, cut_name: str) -> bool:
        return self.filled + size <= self.cap and (not cut_name or self.cut_name in ("", cut_name))


def by_last_part(groups: Groups, parts: Sequence[Part]) -> Groups:
    """The groups in the order in which ``parts`` completes them."""
    if len(groups) < 2:
        return groups
    position = {part: index for index, part in enumerate(parts)}
    return sorted(groups, key=lambda group: position[group[-1]])
