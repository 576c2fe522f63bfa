"""Steps in which some modules run as single graphs: what is seen of them is seen at a graph's beginning or its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headway.graph.timeline import Item, Part, Point, Timeline
from headway.passes.regions import region_of


def as_single_graphs(timeline: Timeline, regions: Sequence[str]) -> Timeline:
    """``timeline`` where each of ``regions`` is one graph in forward, and one in backward.

    The gradients of a region are ready with its last one. The first region of a forward needs whatever is needed from
    there on: compiled code reads parameters without asking, so that all have to be up to date.
    """
    return replace(timeline, items=tuple(_needed_at_once(_ready_at_once(timeline.items, regions), regions)))


def _ready_at_once(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    """Within each backward alone: a step may have several, and each of them reduces."""
    found: list[Item] = []
    backward: list[Item] = []
    for item in items:
        backward.append(item)
        if item.kind in (Point.BACKWARD_END, Point.STEP):
            found += _together(backward, regions)
            backward = []
    return found + _together(backward, regions)


def _together(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    owners = {
        index: owner
        for index, item in enumerate(items)
        if item.kind == Point.READY and (owner := region_of(item.name.rpartition(".")[0], regions))
    }
    last = {owner: index for index, owner in owners.items()}
    held: dict[str, list[Item]] = {owner: [] for owner in last}
    found: list[Item] = []
    for index, item in enumerate(items):
        region = owners.get(index)
        if region is None:
            found.append(item)
            continue
        held[region].append(item)
        if index == last[region]:
            found += held[region]
    return found


def _needed_at_once(items: Sequence[Item], regions: Sequence[str]) -> list[Item]:
    found: list[Item] = []
    at: int | None = None  # where uses go, once a region was needed in this forward
    for item in items:
        if item.kind == Point.USE:
            if at is not None:
                found.insert(at, item)
                at += 1
                continue
            if region_of(item.name, regions):
                at = len(found) + 1
        elif item.kind in (Part.BACKWARD, Point.STEP):
            at = None
        found.append(item)
    return found
