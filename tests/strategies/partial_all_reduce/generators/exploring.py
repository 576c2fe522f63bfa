"""Every history of a few workers, and every outcome of chance: the states that a generator can come into."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.strategies.partial_all_reduce.generators.watched import Watched, watched

from headway.strategies.chance import Chance
from headway.strategies.partial_all_reduce.generators.queues import Mixing

NO_MIXING = 1000  # a window that no history fills
MOST_AGE_NS = 2_000_000  # of who waits: longer makes no difference


class Scripted(Chance):
    """Chance that takes what a script says, and then the first of what there is."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        super().__init__(0)
        self._left = list(script)
        self.taken: list[tuple[int, int]] = []  # what, of how many

    def below(self, limit: int) -> int:
        drawn = self._left.pop(0) if self._left else 0
        self.taken.append((drawn, limit))
        return drawn


class Event(NamedTuple):
    kind: str
    about: int = 0


def events_of(world: Watched, coming: Sequence[int]) -> Iterator[Event]:
    """What can happen next, where workers ``coming`` leave and join at any time."""
    for worker in coming:
        yield Event("leave" if worker in world.present else "join", worker)
    for worker in world.free:
        yield Event("ask", worker)
    for number in world.running:
        yield Event("ended", number)
    if world.generator.wake_ns is not None:
        yield Event("wake")


def happen(world: Watched, event: Event) -> None:
    if event.kind == "wake":
        world.wake()
    else:
        getattr(world, event.kind)(event.about)


def copied(world: Watched) -> Watched:
    """A world of its own; what containers hold is never changed."""
    after = copy.copy(world)
    after.generator = copy.copy(world.generator)
    for each in (after, after.generator):
        for name, value in vars(each).items():
            if isinstance(value, Mixing):
                setattr(each, name, copy.copy(value))
                getattr(each, name).recent = dict(value.recent)
            elif isinstance(value, (set, dict, list, deque)):
                setattr(each, name, copy.copy(value))
    return after


def outcomes(world: Watched, event: Event) -> Iterator[Watched]:
    """The worlds that an event leads to, one for each outcome of chance."""
    script: list[int] = []
    while True:
        after = copied(world)
        chance = Scripted(script)
        after.generator.chance = chance  # type: ignore[attr-defined]
        happen(after, event)
        yield after
        taken = chance.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        script = [drawn for drawn, _ in taken[:-1]] + [taken[-1][0] + 1]


def key_of(world: Watched) -> Any:
    """What of a world decides about its future: numbers of grants and times are left out."""
    state: dict[str, Any] = world.generator._snapshot()  # type: ignore[attr-defined]
    waiting = [(each, min(world.now_ns - since, MOST_AGE_NS)) for each, since in state["waiting"]]
    if "queue" in state:
        waiting.sort()
    running = sorted((each.members, each.gone) for each in state["running"])
    asks = state.get("asks", {})
    threshold = world.generator.options.model_dump().get("slowdown_threshold", 0)  # type: ignore[attr-defined]
    behind = [max(asks.values()) - asked for asked in asks.values()] if threshold else []
    recent = sorted(state.get("recent", {}).items())
    if world.generator.options.model_dump().get("mixing_window") == NO_MIXING:  # type: ignore[attr-defined]
        recent = []
    return (*map(tuple, (waiting, running, behind, recent)), state["present"], state.get("queue"))


def explore(
    name: str,
    options: Mapping[str, Any],
    workers: int,
    coming: Sequence[int],
    most: int,
    check: Callable[[Watched], None],
) -> tuple[int, bool]:
    """Check the states that are reached, breadth first, at most ``most``; returns how many, and whether all."""
    first = watched(name, options, workers=workers)
    seen = {key_of(first)}
    waits = deque([first])
    while waits:
        world = waits.popleft()
        check(world)
        for event in events_of(world, coming):
            for after in outcomes(world, event):
                key = key_of(after)
                if key not in seen:
                    if len(seen) == most:
                        return len(seen), False
                    seen.add(key)
                    waits.append(after)
    return len(seen), True
