"""Improves groups by local search: merges, splits and shifts neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headway.model import ModelSpec
from headway.planning.draft import Group, Groups, ScheduleDrafter, ScheduleOptions
from headway.scheduling.buckets import Part
from headway.scheduling.fusion import size_bytes
from headway.time_limit import time_is_up

_LEAST_GAIN = 1e-5
_SHARES = (0.5, 0.25, 0.75)
Change = tuple[Group, ...]  # replacement for one or two neighbours


def refine(
    drafter: ScheduleDrafter, groups: Groups, options: ScheduleOptions, effort: int
) -> tuple[float, Groups]:
    """Merge, split and shift neighbouring groups while that lowers the cost; returns the cost and the groups.

    Changes groups on the critical path first, its ends before its middle. Makes at most ``effort`` predictions, and stops
    when time is up (``time_limit``).
    """
    best_ns = drafter.cost_ns(groups, options)
    tried = 0
    improved = True
    while improved and tried < effort and not time_is_up():
        improved = False
        for index in _most_promising(drafter, groups, options):
            for changed in _changes(drafter, groups, index):
                cost_ns = drafter.cost_ns(changed, options)
                tried += 1
                if cost_ns < best_ns * (1 - _LEAST_GAIN):
                    best_ns, groups, improved = cost_ns, changed, True
                    break
                if tried >= effort or time_is_up():
                    return best_ns, groups
    return best_ns, groups


def _most_promising(drafter: ScheduleDrafter, groups: Groups, options: ScheduleOptions) -> Iterable[int]:
    """All groups, those on the critical path first."""
    critical = _from_both_ends(drafter.critical(groups, options))
    return dict.fromkeys([*critical, *_from_both_ends(range(len(groups) - 1, -1, -1))])


def _from_both_ends(items: Sequence[int]) -> Iterator[int]:
    """The first, the last, the second, the last but one, and so on."""
    for index in range((len(items) + 1) // 2):
        yield items[index]
        if index != len(items) - 1 - index:
            yield items[-1 - index]


def _changes(drafter: ScheduleDrafter, groups: Groups, index: int) -> Iterator[Groups]:
    """Variants of ``groups`` that change group ``index`` and the next one."""
    if index >= len(groups):
        return
    model = drafter.predictor.model
    group_parts = groups[index].parts

    def replaced(count: int, *parts: Sequence[Part]) -> Groups:
        return groups[:index] + drafter.groups(parts) + groups[index + count :]

    for share in _SHARES:
        if (halves := split(group_parts, model, share)) is not None:
            yield replaced(1, *halves)
    if index + 1 < len(groups):
        next_parts = groups[index + 1].parts
        if _dtype(group_parts, model) != _dtype(next_parts, model):
            return
        yield replaced(2, group_parts + next_parts)
        for share in _SHARES:
            if (halves := split(group_parts, model, share)) is not None:
                yield replaced(2, halves[0], halves[1] + next_parts)
            if (halves := split(next_parts, model, share)) is not None:
                yield replaced(2, group_parts + halves[0], halves[1])


def _dtype(parts: Sequence[Part], model: ModelSpec) -> str:
    return model.by_name[parts[0].parameter].dtype


def split(
    parts: tuple[Part, ...], model: ModelSpec, share: float
) -> tuple[tuple[Part, ...], tuple[Part, ...]] | None:
    """Split a group in two, the first with about ``share`` of its bytes; None if it cannot be split.

    Splits within a part only if the part is more than an eighth of the group.
    """
    total = sum(size_bytes(part, model) for part in parts)
    wanted, begun = share * total, 0
    for index, part in enumerate(parts):
        size = size_bytes(part, model)
        if begun + size < wanted:
            begun += size
            continue
        if size > total / 8 and part.numel > 1:
            middle = part.start + max(1, min(part.numel - 1, round((wanted - begun) / size * part.numel)))
            first = (*parts[:index], Part(part.parameter, part.start, middle))
            return first, (Part(part.parameter, middle, part.end), *parts[index + 1 :])
        border = index + 1 if index + 1 < len(parts) else index
        return (parts[:border], parts[border:]) if border else None
    return None
