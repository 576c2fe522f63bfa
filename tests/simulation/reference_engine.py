"""The engine's rules a second time, in the plainest Python: what the fast one is compared with."""

from __future__ import annotations

import heapq
import math
from collections import deque

import numpy as np

from headway.simulation.building import ROUTE, WAITS, OperationGraph
from headway.simulation.engine import PlayedTimes

_CHANGED, _LEFT, _INSTANT, _READY = -1, 0, 1, 2  # of events at one time, those that free something come first
_Event = tuple[int, int, int, int]  # time (ns), kind, operation, which estimate of its end this is


def play(graph: OperationGraph) -> PlayedTimes:
    """Start every operation as soon as what it waits for is done.

    See ``engine.play`` for what that means for those that need resources.
    """
    count = len(graph)
    waits_for = graph.narrow[:, WAITS].tolist()
    duration_ns, latency_ns = graph.duration_ns.tolist(), graph.latency_ns.tolist()
    start_ns, end_ns, ready_ns = [0] * count, [0] * count, [0] * count
    events: list[_Event] = [(0, _READY, number, 0) for number in range(count) if waits_for[number] == 0]
    sharing = _Sharing(graph, events)
    for place, (time_ns, *_) in enumerate(graph.resources.changes.tolist()):
        heapq.heappush(events, (time_ns, _CHANGED, place, 0))

    def kind_of(number: int) -> int:
        takes = duration_ns[number] or latency_ns[number] or sharing.is_needed(number)
        return _READY if takes else _INSTANT

    played = 0
    while events:
        now_ns, kind, number, estimate = heapq.heappop(events)
        if kind == _CHANGED:
            sharing.change(number, now_ns)
            continue
        if kind != _LEFT and sharing.is_needed(number):
            if sharing.enqueue(number):
                start_ns[number] = now_ns
                sharing.begin(number, now_ns)
            continue
        if kind != _LEFT:
            start_ns[number] = now_ns
            done_ns = now_ns + duration_ns[number] + latency_ns[number]
        elif sharing.estimates[number] == estimate:
            following = sharing.end(number, now_ns)
            if following >= 0:
                start_ns[following] = now_ns
                sharing.begin(following, now_ns)
            done_ns = now_ns + latency_ns[number]
        else:
            continue
        played += 1
        end_ns[number] = done_ns
        for successor in graph.successors(number):
            ready_ns[successor] = max(ready_ns[successor], done_ns)
            waits_for[successor] -= 1
            if waits_for[successor] == 0:
                heapq.heappush(events, (ready_ns[successor], kind_of(successor), successor, 0))
    if played < count:
        raise ValueError(f"the graph has a cycle: {count - played} operations wait for each other")
    return PlayedTimes(np.array(start_ns, dtype=np.int64), np.array(end_ns, dtype=np.int64))


class _Sharing:
    """Which operations are on which resources, and how far they have come. Tells ``events`` when they will leave.

    An estimate of that holds until something else begins or ends on one of the resources.
    """

    def __init__(self, graph: OperationGraph, events: list[_Event]) -> None:
        self._events = events
        self._duration_ns = graph.duration_ns.tolist()
        sides = zip(graph.sender.tolist(), graph.receiver.tolist(), strict=True)
        self._resources = [tuple(side for side in pair if side >= 0) for pair in sides]
        self._key = graph.queue.tolist()
        self._queues: dict[int, deque[int]] = {}  # the first of each is in flight
        self._asked = graph.routes.demand[graph.narrow[:, ROUTE]].tolist()
        self._changes = graph.resources.changes.tolist()
        self._burst_ns = graph.resources.burst_ns.tolist()
        self._saved_ns = graph.resources.burst_ns.tolist()
        self._window_ns = graph.resources.window_ns.tolist()
        self._held_ns = [0] * len(graph.resources)  # of others who have a part
        self._so_since_ns = [0] * len(graph.resources)  # idle, or not
        self._spare = graph.resources.room.tolist()
        self._room = graph.resources.room.tolist()
        self._usual = graph.resources.room.tolist()
        self._in_flight: list[list[int]] = [[] for _ in range(len(graph.resources))]
        self._left_ns: dict[int, float] = {}  # of work, at full rate
        self._rate: dict[int, float] = {}
        self._since_ns: dict[int, int] = {}  # when ``_left_ns`` was right
        self.estimates = [0] * len(graph)

    def is_needed(self, number: int) -> bool:
        """Whether an operation uses any resource."""
        return bool(self._resources[number])

    def enqueue(self, number: int) -> bool:
        """Put an operation into its queue; whether nothing is in front of it."""
        queue = self._queues.setdefault(self._key[number], deque())
        queue.append(number)
        return len(queue) == 1

    def begin(self, number: int, now_ns: int) -> None:
        """Let an operation onto its resources."""
        self._left_ns[number] = float(self._duration_ns[number])
        own = self._resources[number]
        for resource in own:
            if not self._in_flight[resource] and (self._burst_ns[resource] or self._window_ns[resource]):
                self._save(resource, now_ns)
        if all(self._burst_ns[r] and not self._in_flight[r] for r in own) and len(set(own)) == len(own):
            self._spend(number)
        self._overtake(number)
        self._rate[number] = 0.0
        self._since_ns[number] = now_ns
        for resource in self._resources[number]:
            self._in_flight[resource].append(number)
        self._share_anew(now_ns)

    def _save(self, resource: int, now_ns: int) -> None:
        idle_ns = now_ns - self._so_since_ns[resource]
        unused_ns = int(idle_ns * (self._spare[resource] / self._usual[resource]))
        caught_up_ns = min(self._held_ns[resource], unused_ns)  # others have it first
        self._held_ns[resource] -= caught_up_ns
        self._saved_ns[resource] = min(
            self._burst_ns[resource], self._saved_ns[resource] + unused_ns - caught_up_ns
        )
        self._so_since_ns[resource] = now_ns

    def _hold(self, resource: int, now_ns: int) -> None:
        missing = (self._room[resource] - self._spare[resource]) / self._usual[resource]
        self._held_ns[resource] += int((now_ns - self._so_since_ns[resource]) * missing)
        self._so_since_ns[resource] = now_ns

    def _overtake(self, number: int) -> None:
        """Be ahead by what others will hold back at the scarcest resource that nobody used."""
        asked = self._asked[number]
        own = [
            r
            for r in dict.fromkeys(self._resources[number])
            if self._window_ns[r] and not self._in_flight[r] and self._room[r] < asked
        ]
        if not own:
            return
        resource = min(own, key=self._room.__getitem__)
        window_ns, share = self._window_ns[resource], self._room[resource] / self._usual[resource]
        size_ns = self._left_ns[number] * (asked / self._usual[resource])
        most_ns = window_ns * (1 / share - 1) - self._held_ns[resource]
        ahead_ns = max(0.0, most_ns) * (1 - math.exp(-size_ns * share / window_ns))
        self._held_ns[resource] += int(ahead_ns)
        self._left_ns[number] -= ahead_ns * (self._usual[resource] / asked)

    def _spend(self, number: int) -> None:
        """Be ahead by what the resources saved while nobody used them."""
        own, asked = self._resources[number], self._asked[number]
        credit_ns = min(self._saved_ns[resource] * (self._usual[resource] / asked) for resource in own)
        spent_ns = min(self._left_ns[number], credit_ns)
        self._left_ns[number] -= spent_ns
        for resource in own:
            self._saved_ns[resource] -= math.ceil(spent_ns * (asked / self._usual[resource]))

    def change(self, place: int, now_ns: int) -> None:
        """There is more or less of a resource from now on."""
        _, resource, room, spare = self._changes[place]
        if self._in_flight[resource]:
            self._hold(resource, now_ns)
        else:
            self._save(resource, now_ns)
        self._room[resource], self._spare[resource] = room, spare
        if room >= self._usual[resource]:
            self._held_ns[resource] = 0
        self._share_anew(now_ns)

    def end(self, number: int, now_ns: int) -> int:
        """Take an operation off its resources; returns the next one of its queue, or -1."""
        for resource in self._resources[number]:
            self._in_flight[resource].remove(number)
        for resource in self._resources[number]:
            if not self._in_flight[resource]:
                self._hold(resource, now_ns)
        del self._left_ns[number], self._rate[number], self._since_ns[number]
        self._share_anew(now_ns)
        queue = self._queues[self._key[number]]
        queue.popleft()
        return queue[0] if queue else -1

    def _share_anew(self, now_ns: int) -> None:
        """Estimate again when everything that is on any resource leaves."""
        for number, granted in self._max_min_fair().items():
            rate = granted / self._asked[number]
            if rate != self._rate[number]:
                self._left_ns[number] -= self._rate[number] * (now_ns - self._since_ns[number])
                self._rate[number], self._since_ns[number] = rate, now_ns
                self.estimates[number] += 1
                leaves_ns = now_ns + math.ceil(max(0.0, self._left_ns[number]) / rate - 1e-6)
                heapq.heappush(self._events, (leaves_ns, _LEFT, number, self.estimates[number]))

    def _max_min_fair(self) -> dict[int, int]:
        """What everything in flight gets: all rise together until a resource is full; those on it stay there."""
        rising = {number for own in self._in_flight for number in own}
        granted: dict[int, int] = {}
        while rising:
            fair = {}
            for resource, own in enumerate(self._in_flight):
                if count := sum(number in rising for number in own):
                    taken = sum(granted[number] for number in own if number in granted)
                    fair[resource] = max(1, (self._room[resource] - taken) // count)
            level = min([*fair.values(), *(self._asked[number] for number in rising)])
            stays = {
                number
                for number in rising
                if self._asked[number] <= level or any(fair[r] <= level for r in self._resources[number])
            }
            granted |= dict.fromkeys(stays, level)
            rising -= stays
        return granted
