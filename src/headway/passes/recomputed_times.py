"""Steps in which backward computes some modules' forwards again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headway.graph.computation import Computation
from headway.graph.timeline import Item, Part, Point, Timeline
from headway.passes.regions import region_of


def recomputing(regions: Sequence[str]) -> Callable[[Timeline], Timeline]:
    """How a step changes where the forward of each of ``regions`` is computed again before its first gradient."""

    def change(timeline: Timeline) -> Timeline:
        walk = _Walk(regions)
        for item in timeline.items:
            walk.goes_on(item)
        return Timeline(timeline.rank, timeline.step, tuple(walk.all_items()), timeline.background_ns)

    return change


def forward_times_ns(computation: Computation, regions: Sequence[str]) -> dict[str, int]:
    """What the forward of each region takes in the first step of the first rank that is known."""
    timeline = next(iter(computation.timelines.values()))[0]
    walk = _Walk(regions)
    for item in timeline.items:
        walk.goes_on(item)
    return {region: walk.longest_ns.get(region, 0) for region in regions}


class _Walk:
    """Goes through a step: notes what regions take in a forward, and inserts that into the backward behind it."""

    def __init__(self, regions: Sequence[str]) -> None:
        self.longest_ns: dict[str, int] = {}
        self._regions = regions
        self._items: list[Item] = []
        self._pending: dict[str, int] = {}
        self._current = ""  # the region that computes
        self._in_backward = False
        self._at = 0  # where a recomputation begins if it precedes the next gradient

    def goes_on(self, item: Item) -> None:
        match item.kind:
            case Point.USE if not self._in_backward:
                self._current = region_of(item.name, self._regions)
            case Part.FORWARD if item.duration_ns:
                self._leave_backward()
                if self._current:
                    known_ns = self._pending.get(self._current, 0)
                    self._pending[self._current] = known_ns + item.duration_ns
                    self.longest_ns[self._current] = self._pending[self._current]
            case Part.BACKWARD if not self._in_backward:
                self._in_backward, self._current = True, ""
                self._at = len(self._items)
            case Point.READY:
                self._insert(region_of(item.name.rpartition(".")[0], self._regions))
            case Point.BACKWARD_END | Point.STEP:
                self._leave_backward()
        self._items.append(item)
        if item.kind == Point.READY:
            self._at = len(self._items)

    def all_items(self) -> Iterable[Item]:
        """The step as it became."""
        self._leave_backward()
        return self._items

    def _leave_backward(self) -> None:
        """Recompute at its end whatever has shown no gradient, as where it adds to gradients that are there."""
        if self._in_backward:
            for region in list(self._pending):
                self._at = len(self._items)
                self._insert(region)
            self._in_backward = False

    def _insert(self, region: str) -> None:
        if (duration_ns := self._pending.pop(region, 0)) > 0:
            self._items.insert(self._at, Item(Part.BACKWARD, "", duration_ns))
