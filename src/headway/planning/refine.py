"""Local search: better groups near given ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headway.model import ModelSpec
from headway.planning.draft import Group, Groups, ScheduleDrafter, ScheduleOptions
from headway.scheduling.buckets import Part
from headway.scheduling.fusion import size_bytes
from headway.time_limit import time_is_up

_LEAST_GAIN = 1e-5
_SHARES = (0.5, 0.25, 0.75)
Change = tuple[Group, ...]  # what one or two neighbours become


def refine(
    drafter: ScheduleDrafter, groups: Groups, options: ScheduleOptions, effort: int
) -> tuple[float, Groups]:
    """Merge, split and shift neighbouring groups while the step's cost gets less; returns it and the groups.

    Groups on the critical path are changed first, its ends before its middle: where computation leads into it and where
    training waits for it. At most ``effort`` predictions, and none when time is up (``time_limit``).
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
    """The neighbours of ``groups`` that differ at group ``index`` and the one behind it."""
    if index >= len(groups):
        return
    model = drafter.predictor.model
    own = groups[index].parts

    def replaced(count: int, *parts: Sequence[Part]) -> Groups:
        return groups[:index] + drafter.groups(parts) + groups[index + count :]

    for share in _SHARES:
        if (halves := split(own, model, share)) is not None:
            yield replaced(1, *halves)
    if index + 1 < len(groups):
        other = groups[index + 1].parts
        if _dtype(own, model) != _dtype(other, model):
            return
        yield replaced(2, own + other)
        for share in _SHARES:
            if (halves := split(own, model, share)) is not None:
                yield replaced(2, halves[0], halves[1] + other)
            if (halves := split(other, model, share)) is not None:
                yield replaced(2, own + halves[0], halves[1])


def _dtype(parts: Sequence[Part], model: ModelSpec) -> str:
    return model.by_name[parts[0].parameter].dtype


def split(
    parts: tuple[Part, ...], model: ModelSpec, share: float
) -> tuple[tuple[Part, ...], tuple[Part, ...]] | None:
    """Cut a group in two, the first with about ``share`` of its bytes. None if there is nothing to cut.

    A part is cut itself where it is more than an eighth of the group.
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
