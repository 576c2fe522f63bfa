"""What one device did, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from headway.arrays import Ints
from headway.ext import Events, texts
from headway.intervals import Spans
from headway_readers.xplane.assemble import LONGEST_NAME, Collectives, Work, assemble
from headway_readers.xplane.devices import Device
from headway_readers.xplane.instructions import (
    COMMUNICATES,
    COMPUTES,
    ENDS,
    NOTHING,
    ExecutedInstructions,
    executed,
    phases,
)
from headway_readers.xplane.launch_steps import LaunchSteps
from headway_readers.xplane.profile import Profile
from headway_readers.xplane.programs import group_name, whole_bytes
from headway_readers.xplane.steps import Steps, following

NO_SIZES = "The profile does not say how much collectives carry, nor which devices take part in each of them."


def device_events(
    profile: Profile, device: Device, asked: LaunchSteps, rank: int | None, world: int | None, reading: Spans
) -> tuple[Events, dict[str, tuple[int, ...]], list[str]]:
    """One device's events, the groups that it communicates in, and what has to be said of both.

    ``reading`` is when its process waited for input.
    """
    did = executed(profile, device.events)
    did = did.where(~did.role(NOTHING))
    place = asked.of(did.event) if device.steps is None else device.steps.of(profile.start_ns[did.event])
    said = asked.steps if device.steps is None else device.steps
    steps, place = _stretches(profile, did, said, place)
    computing = did.role(COMPUTES)
    work = did.where(computing)
    groups = _groups(did, rank, world)
    collectives = _collectives(profile, did, place, groups)
    outside = int((collectives.step < 0).sum())
    events = assemble(
        steps,
        Work(
            kind=phases(profile, work, place[computing]),
            name=work.names(),
            step=place[computing],
            start_ns=profile.start_ns[work.event],
            end_ns=profile.end_ns[work.event],
        ),
        collectives,
        reading,
    )
    notes = [] if not outside else [f"{outside} collectives outside of the steps were left out."]
    if said is None:
        notes.append("Steps are not marked, and no call repeats: everything is taken for one step.")
    if len(collectives) and (collectives.size_bytes < 0).all():
        notes.append(NO_SIZES)
    if len(work.event) and not any(what.phase for what in work.kinds):
        notes.append(
            "The profile does not distinguish forward, backward and update: all of it counts as forward."
        )
    return events, {name: members for name, members in groups if name}, notes


def _stretches(
    profile: Profile, did: ExecutedInstructions, said: Steps | None, place: Ints
) -> tuple[Steps, Ints]:
    """When the device was at each step, from its first event to the next one's; and the events' places in these."""
    inside = place >= 0
    if not inside.any():
        return Steps(*(np.zeros(0, dtype=np.int64) for _ in range(3))), np.full(len(place), -1)
    present, renumbered = np.unique(place[inside], return_inverse=True)
    first = np.full(len(present), np.iinfo(np.int64).max)
    last = np.full(len(present), np.iinfo(np.int64).min)
    np.minimum.at(first, renumbered, profile.start_ns[did.event][inside])
    np.maximum.at(last, renumbered, profile.end_ns[did.event][inside])
    number = said.number[present] if said is not None else present
    order = np.argsort(first, kind="stable")
    steps = following(number[order], first[order], last[order])
    back = np.empty(len(order), dtype=np.int64)
    back[order] = np.arange(len(order))
    places = np.full(len(place), -1)
    places[inside] = back[renumbered]
    return steps, places


def _groups(
    did: ExecutedInstructions, rank: int | None, world: int | None
) -> list[tuple[str, tuple[int, ...]]]:
    """The group that each kind of event communicates in: its name and members, where they are known."""
    everybody = tuple(range(world or 0))
    found: dict[int, tuple[str, tuple[int, ...]]] = {}  # by the list of groups, of which there are few
    for what in did.kinds:
        if what.known is not None and what.role == COMMUNICATES and id(what.known.groups) not in found:
            members = _members(what.known.groups, rank) if what.known.groups else everybody
            name = group_name(members, len(everybody)) if members else ""
            found[id(what.known.groups)] = name, members
    return [found.get(id(what.known.groups), ("", ())) if what.known else ("", ()) for what in did.kinds]


def _collectives(
    profile: Profile, did: ExecutedInstructions, place: Ints, groups: Sequence[tuple[str, tuple[int, ...]]]
) -> Collectives:
    rows = np.flatnonzero(did.role(COMMUNICATES))
    start, end = profile.start_ns[did.event], profile.end_ns[did.event].copy()
    _end_with_their_ends(did, rows, end)
    sizes = [
        whole_bytes(what.name, what.known.operand_bytes, len(members)) if what.known else -1
        for what, (_, members) in zip(did.kinds, groups, strict=True)
    ]
    which = did.what[rows]
    return Collectives(
        name=texts([what.name for what in did.kinds])[which],
        group=texts([name for name, _ in groups])[which],
        sequence=np.full(len(rows), -1),
        size_bytes=np.array(sizes, dtype=np.int64)[which],
        step=place[rows],
        enqueue_ns=start[rows],
        start_ns=start[rows],
        end_ns=end[rows],
        algorithm=texts([what.instruction[:LONGEST_NAME] for what in did.kinds])[which],
    )


def _members(groups: Sequence[tuple[int, ...]], rank: int | None) -> tuple[int, ...]:
    """The group that a device is a member of; the only one there is, where the device's number is not known."""
    if len(groups) == 1:
        return groups[0]
    return next((group for group in groups if rank in group), ())


def _end_with_their_ends(did: ExecutedInstructions, rows: Ints, end: Ints) -> None:
    """Collectives that one instruction begins last until another one ends: the first with the first."""
    waiting: dict[str, deque[int]] = {}
    ends = did.role(ENDS)
    if not ends.any():
        return
    began = np.zeros(len(did.event), dtype=bool)
    began[rows] = [did.kinds[what].begins for what in did.what[rows].tolist()]
    for row in np.flatnonzero(began | ends).tolist():
        name = did.kinds[int(did.what[row])].name
        if began[row]:
            waiting.setdefault(name, deque()).append(row)
        elif waiting.get(name):
            first = waiting[name].popleft()
            end[first] = max(int(end[first]), int(end[row]))
