"""The engine's inner loops, over flat arrays: plain functions, which ``compiled`` makes fast.

They keep to what compiles: numbers, arrays, and each other. They are in one file because what was compiled is kept by
the time of the file, and nobody asks whether what a loop calls has changed. Times are nanoseconds.

Only the head of each queue is in flight. ``flows`` (int64) has a row a queue, of the columns named below, ``work``
(float64) how much is left of its head and the rate at which it goes on. ``resources`` (int64) has a row a resource:
the first queue whose head has it as its sender's side and as its receiver's, how much of it is asked for in all, how
much there is now and usually (in WHOLE), how much more it lets through at once, since when it is used or not, what
sharing needs, how much others hold back who have a part of it, and how much would be left if they got all they want.
``heap`` holds the queues whose heads are in flight, the first that leaves on top. Resources and the flows that they
couple, directly or through others, are a ``component``: the rates in it are found together.
"""

from __future__ import annotations

from math import ceil, exp
from typing import Any, NamedTuple

import numpy as np

from headway.simulation.building import (
    DECIDED,
    DURATION,
    END,
    FOLLOWING,
    FREE,
    LATEST_NS,
    LEFT,
    ROUTE,
    SLOTS,
    SPILL,
    START,
    SUCCESSORS,
    WAITS,
)  # fmt: skip

Array = Any  # of numbers; what a compiler makes of it is its own
NEVER = 2**62
_FIRST_ROOM = 1024

# What ``simulate`` returned for, and columns of ``PlayState.counts``: how many flows are in flight, operations are to
# be done at a known time and are to begin now; the time; how many operations were done, changes took place, and rows
# of the graph are known; what it returned for; how many decisions are asked for.
FINISHED, PAUSED, OUT_OF_RANGE = 0, 1, 2
IN_FLIGHT, TO_BE_DONE, TO_BEGIN, NOW, PLAYED, CHANGED, KNOWN, STATUS, DECISIONS, COUNTS = range(10)

# Columns of ``flows``: the head and the last of the queue; the resources of the head, and the queues after and before
# this one on them, at the sender's end and at the receiver's; how much of them it asks for and gets; its place in the
# heap; since when its work is right, and when it leaves; which sharing it was part of last.
HEAD, LAST, SIDE, AFTER, BEFORE, DEMAND, GRANTED, PLACE, SINCE, LEAVES, MARK, COLUMNS = (
    0,
    1,
    2,
    4,
    6,
    8,
    9,
    10,
    11,
    12,
    13,
    14,
)
REST, RATE = 0, 1  # of ``work``
LOAD, ROOM, USUAL, SAVED, SO_SINCE, STAMP, TAKEN, RISING, FAIR, HELD, SPARE, RESOURCE_COLUMNS = (
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    12,
    13,
)  # of ``resources``
MANY = 512  # that hold each other up and get max-min fair rates


def push(times: Array, numbers: Array, size: int, time: int, number: int) -> None:
    """Add an entry to a heap of ``size`` entries, ordered by time and then by number; there must be room."""
    place = size
    while place > 0:
        above = (place - 1) >> 1
        if times[above] < time or (times[above] == time and numbers[above] < number):
            break
        times[place], numbers[place] = times[above], numbers[above]
        place = above
    times[place], numbers[place] = time, number


def drop_first(times: Array, numbers: Array, size: int) -> None:
    """Take the first of ``size`` entries off a heap."""
    last = size - 1
    time, number = times[last], numbers[last]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= last:
            break
        if below + 1 < last and (
            times[below + 1] < times[below]
            or (times[below + 1] == times[below] and numbers[below + 1] < numbers[below])
        ):
            below += 1
        if time < times[below] or (time == times[below] and number < numbers[below]):
            break
        times[place], numbers[place] = times[below], numbers[below]
        place = below
    times[place], numbers[place] = time, number


def grow(array: Array) -> Array:
    """A copy with twice the room."""
    grown = np.empty(2 * len(array), dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def precedes(flows: Array, queue: int, rival: int) -> bool:
    """Whether the head of one queue leaves before that of another; their numbers decide between equals."""
    if flows[queue, LEAVES] != flows[rival, LEAVES]:
        return bool(flows[queue, LEAVES] < flows[rival, LEAVES])
    return bool(flows[queue, HEAD] < flows[rival, HEAD])


def settle(flows: Array, heap: Array, size: int, place: int) -> None:
    """Move the queue at ``place`` of the heap to where it belongs."""
    queue = heap[place]
    while place > 0 and precedes(flows, queue, heap[(place - 1) >> 1]):
        above = (place - 1) >> 1
        heap[place] = heap[above]
        flows[heap[place], PLACE] = place
        place = above
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and precedes(flows, heap[below + 1], heap[below]):
            below += 1
        if not precedes(flows, heap[below], queue):
            break
        heap[place] = heap[below]
        flows[heap[place], PLACE] = place
        place = below
    heap[place] = queue
    flows[queue, PLACE] = place


def leave_time_ns(now: int, rest: float, rate: float) -> int:
    """When what has so much left, and goes on at this rate, is through."""
    wait = rest / rate - 1e-6
    return NEVER if wait > LATEST_NS else now + ceil(wait)


def proportional(queue: int, flows: Array, resources: Array) -> float:
    """The share of its full rate that the scarcer of a queue's resources leaves to all who ask for it."""
    share = 1.0
    for end in range(2):
        side = flows[queue, SIDE + end]
        if side >= 0 and resources[side, LOAD] > resources[side, ROOM]:
            share = min(share, resources[side, ROOM] / resources[side, LOAD])
    return share


def reach(resource: int, flows: Array, resources: Array, reached: Array, component: Array) -> tuple[int, int]:
    """Collect the queues that hold each other up, from those on ``resource`` on, and the resources that they are on.

    Returns how many there are of both. Stops at MANY queues.
    """
    stamp = reached[-1] + 1
    reached[-1] = stamp
    flow_count, resource_count, done = 0, 1, 0
    component[0] = resource
    resources[resource, STAMP] = stamp
    while done < resource_count:
        for end in range(2):
            queue = resources[component[done], end]
            while queue >= 0:
                if flows[queue, MARK] != stamp:
                    if flow_count == MANY:
                        return flow_count + 1, resource_count
                    flows[queue, MARK], flows[queue, GRANTED] = stamp, -1
                    reached[flow_count] = queue
                    flow_count += 1
                    for other_end in range(2):
                        side = flows[queue, SIDE + other_end]
                        if side >= 0 and resources[side, STAMP] != stamp:
                            resources[side, STAMP] = stamp
                            component[resource_count] = side
                            resource_count += 1
                queue = flows[queue, AFTER + end]
        done += 1
    return flow_count, resource_count


def grant(
    flow_count: int, resource_count: int, flows: Array, resources: Array, reached: Array, component: Array
) -> None:
    """Give what was reached max-min fair rates: all rise together until a resource is full, then those on it stay."""
    for number in range(resource_count):
        resources[component[number], TAKEN] = resources[component[number], RISING] = 0
    for number in range(flow_count):
        for end in range(2):
            if flows[reached[number], SIDE + end] >= 0:
                resources[flows[reached[number], SIDE + end], RISING] += 1
    left = flow_count
    while left:
        level = NEVER
        for number in range(resource_count):
            side = component[number]
            if resources[side, RISING]:
                resources[side, FAIR] = max(
                    1, (resources[side, ROOM] - resources[side, TAKEN]) // resources[side, RISING]
                )
                level = min(level, resources[side, FAIR])
        for number in range(flow_count):
            if flows[reached[number], GRANTED] < 0:
                level = min(level, flows[reached[number], DEMAND])
        for number in range(flow_count):
            queue = reached[number]
            if flows[queue, GRANTED] >= 0:
                continue
            stays = flows[queue, DEMAND] <= level
            for end in range(2):
                side = flows[queue, SIDE + end]
                stays = stays or (side >= 0 and resources[side, FAIR] <= level)
            if stays:
                flows[queue, GRANTED] = level
                left -= 1
        for number in range(flow_count):
            queue = reached[number]
            if flows[queue, GRANTED] == level and flows[queue, MARK] >= 0:
                flows[queue, MARK] = -1
                for end in range(2):
                    side = flows[queue, SIDE + end]
                    if side >= 0:
                        resources[side, TAKEN] += level
                        resources[side, RISING] -= 1


def set_rate(
    queue: int, share: float, now: int, in_flight: int, flows: Array, work: Array, heap: Array
) -> int:
    """Have the head of a queue go on at this share of its full rate; returns how many are in flight."""
    if share != work[queue, RATE]:
        work[queue, REST] -= work[queue, RATE] * (now - flows[queue, SINCE])
        work[queue, RATE] = share
        flows[queue, SINCE] = now
        flows[queue, LEAVES] = leave_time_ns(now, max(work[queue, REST], 0.0), share)
        if flows[queue, PLACE] < 0:
            flows[queue, PLACE] = in_flight
            heap[in_flight] = queue
            in_flight += 1
        settle(flows, heap, in_flight, flows[queue, PLACE])
    return in_flight


def reallocate(
    resource: int,
    now: int,
    in_flight: int,
    flows: Array,
    work: Array,
    resources: Array,
    heap: Array,
    reached: Array,
    component: Array,
) -> int:
    """Estimate again when the heads of queues leave that are on ``resource``, or held up by those that are.

    An estimate holds until something else begins or ends, or there is more or less of a resource. Returns how many are
    in flight.
    """
    flow_count, resource_count = reach(resource, flows, resources, reached, component)
    component[-1] = flow_count
    if flow_count > MANY:
        for end in range(2):
            queue = resources[resource, end]
            while queue >= 0:
                share = proportional(queue, flows, resources)
                in_flight = set_rate(queue, share, now, in_flight, flows, work, heap)
                queue = flows[queue, AFTER + end]
        return in_flight
    grant(flow_count, resource_count, flows, resources, reached, component)
    for number in range(flow_count):
        queue = reached[number]
        share = flows[queue, GRANTED] / flows[queue, DEMAND]
        in_flight = set_rate(queue, share, now, in_flight, flows, work, heap)
    return in_flight


def save(side: int, now: int, resources: Array, burst: Array) -> None:
    """Put by what a resource that nobody used has let pass since then: as much of the time as others left.

    With the first of it others caught up on what they held back: nothing is saved while they have something queued.
    """
    idle = now - resources[side, SO_SINCE]
    unused = int(idle * (resources[side, SPARE] / resources[side, USUAL]))
    caught_up = min(resources[side, HELD], unused)
    resources[side, HELD] -= caught_up
    resources[side, SAVED] = min(burst[side], resources[side, SAVED] + unused - caught_up)
    resources[side, SO_SINCE] = now


def hold(side: int, now: int, resources: Array) -> None:
    """Others hold back, on a resource that was used since then, what they want and their share is too small for."""
    missing = (resources[side, ROOM] - resources[side, SPARE]) / resources[side, USUAL]
    resources[side, HELD] += int((now - resources[side, SO_SINCE]) * missing)
    resources[side, SO_SINCE] = now


def spend(queue: int, flows: Array, resources: Array) -> float:
    """Take what the resources of a queue saved while nobody used them; returns how much work that is."""
    credit = float(NEVER)
    for end in range(2):
        side = flows[queue, SIDE + end]
        if side >= 0:
            credit = min(credit, resources[side, SAVED] * (resources[side, USUAL] / flows[queue, DEMAND]))
    return credit


def overtake(queue: int, side: int, flows: Array, work: Array, resources: Array, window: Array) -> float:
    """How much work a flow gets done ahead of its share of ``side``, which others have a part of and we did not use.

    First come, first served: a flow that keeps ``window`` queued where others have queued b gets window / (window + b)
    of the rate, and b grows to window * (USUAL / ROOM - 1), where it has no more than ROOM. Integrated over its work.
    """
    share = resources[side, ROOM] / resources[side, USUAL]
    size = work[queue, REST] * (flows[queue, DEMAND] / resources[side, USUAL])
    most = window[side] * (1.0 / share - 1.0) - resources[side, HELD]
    ahead = max(0.0, most) * (1.0 - exp(-size * share / window[side]))
    resources[side, HELD] += int(ahead)
    return float(ahead * (resources[side, USUAL] / flows[queue, DEMAND]))


def start_flow(
    queue: int,
    now: int,
    in_flight: int,
    flows: Array,
    work: Array,
    resources: Array,
    burst: Array,
    window: Array,
    heap: Array,
    reached: Array,
    component: Array,
) -> int:
    """Let the head of a queue onto its resources, which ``flows`` names; returns how many are in flight."""
    alone, saves, scarce = True, True, -1
    for end in range(2):
        side = flows[queue, SIDE + end]
        if side >= 0:
            idle = resources[side, LOAD] == 0
            if idle and (burst[side] > 0 or window[side] > 0):
                save(side, now, resources, burst)
            saves = saves and burst[side] > 0 and idle
            contended = window[side] > 0 and idle and resources[side, ROOM] < flows[queue, DEMAND]
            if contended and (scarce < 0 or resources[side, ROOM] < resources[scarce, ROOM]):
                scarce = side
            resources[side, LOAD] += flows[queue, DEMAND]
            alone = alone and resources[side, LOAD] == flows[queue, DEMAND] <= resources[side, ROOM]
            after = resources[side, end]
            flows[queue, BEFORE + end], flows[queue, AFTER + end] = -1, after
            if after >= 0:
                flows[after, BEFORE + end] = queue
            resources[side, end] = queue
    if saves:
        spent = min(work[queue, REST], spend(queue, flows, resources))
        work[queue, REST] -= spent
        for end in range(2):
            side = flows[queue, SIDE + end]
            if side >= 0:
                resources[side, SAVED] -= ceil(spent * (flows[queue, DEMAND] / resources[side, USUAL]))
    if scarce >= 0:
        work[queue, REST] -= overtake(queue, scarce, flows, work, resources, window)
    flows[queue, SINCE] = now
    if alone:  # what reallocate would come to
        work[queue, RATE] = 1.0
        flows[queue, LEAVES] = leave_time_ns(now, work[queue, REST], 1.0)
        heap[in_flight] = queue
        settle(flows, heap, in_flight + 1, in_flight)
        return in_flight + 1
    work[queue, RATE] = 0.0
    side = flows[queue, SIDE] if flows[queue, SIDE] >= 0 else flows[queue, SIDE + 1]
    in_flight = reallocate(side, now, in_flight, flows, work, resources, heap, reached, component)
    if component[-1] > MANY and flows[queue, SIDE + 1] >= 0:
        side = flows[queue, SIDE + 1]
        in_flight = reallocate(side, now, in_flight, flows, work, resources, heap, reached, component)
    return in_flight


def end_first_flow(
    now: int,
    in_flight: int,
    flows: Array,
    work: Array,
    resources: Array,
    heap: Array,
    reached: Array,
    component: Array,
) -> int:
    """Take the first of the heap off its resources; returns how many are in flight."""
    queue = heap[0]
    flows[queue, PLACE] = -1
    in_flight -= 1
    if in_flight:
        heap[0] = heap[in_flight]
        settle(flows, heap, in_flight, 0)
    for end in range(2):
        side = flows[queue, SIDE + end]
        if side >= 0:
            resources[side, LOAD] -= flows[queue, DEMAND]
            if resources[side, LOAD] == 0:
                hold(side, now, resources)
            before, after = flows[queue, BEFORE + end], flows[queue, AFTER + end]
            if before >= 0:
                flows[before, AFTER + end] = after
            else:
                resources[side, end] = after
            if after >= 0:
                flows[after, BEFORE + end] = before
    before = reached[-1]
    for end in range(2):
        side = flows[queue, SIDE + end]
        if side >= 0 and resources[side, LOAD]:
            if resources[side, STAMP] > before and component[-1] <= MANY:
                continue  # those on it were among those on the other
            in_flight = reallocate(side, now, in_flight, flows, work, resources, heap, reached, component)
    return in_flight


class PlayState(NamedTuple):
    """All that the engine knows between two moments, so that it can be asked in the middle and then go on.

    What will be done at a known time is in the heap ``done_at``, ``done``; what is ready to begin in the heap
    ``ready_at``, ``ready``, whose times are 0, and 1 of decisions, which come after everything else of a moment and are
    all that it holds in a pause. ``instant`` are operations that take no time and are done as soon as they are ready,
    before anything that takes some.
    """

    flows: Array
    work: Array
    resources: Array
    heap: Array
    reached: Array
    component: Array
    done_at: Array
    done: Array
    ready_at: Array
    ready: Array
    instant: Array
    counts: Array


def first_state(room: Array, burst: Array, queues: int) -> PlayState:
    """Nothing is played yet, on resources of so much ``room`` and ``burst``."""
    resources = np.full((len(burst), RESOURCE_COLUMNS), -1, np.int64)
    resources[:, LOAD], resources[:, SAVED], resources[:, SO_SINCE], resources[:, HELD] = 0, burst, 0, 0
    resources[:, ROOM], resources[:, USUAL], resources[:, SPARE] = room, room, room
    return PlayState(
        flows=np.full((queues, COLUMNS), -1, np.int64), work=np.zeros((queues, 2), np.float64),
        resources=resources, heap=np.zeros(queues, np.int64), reached=np.zeros(MANY + 1, np.int64),
        component=np.zeros(len(burst) + 1, np.int64), done_at=np.zeros(_FIRST_ROOM, np.int64),
        done=np.zeros(_FIRST_ROOM, np.int64), ready_at=np.zeros(_FIRST_ROOM, np.int64),
        ready=np.zeros(_FIRST_ROOM, np.int64), instant=np.zeros(_FIRST_ROOM, np.int64),
        counts=np.zeros(COUNTS, np.int64),
    )  # fmt: skip


def run(
    wide: Array,
    narrow: Array,
    spilled: Array,
    sender: Array,
    receiver: Array,
    demand: Array,
    queue_of: Array,
    latency: Array,
    burst: Array,
    window: Array,
    changes: Array,
    state: PlayState,
) -> PlayState:
    """Play a graph on from ``state`` until it ends or a decision is its turn, which ``instant`` then begins with."""
    flows, work, resources, heap, reached, component, done_at, done, ready_at, ready, instant, counts = state
    in_flight, to_be_done, to_begin = int(counts[IN_FLIGHT]), int(counts[TO_BE_DONE]), int(counts[TO_BEGIN])
    now, played, changed = int(counts[NOW]), int(counts[PLAYED]), int(counts[CHANGED])
    saves = len(burst) > 0 and (burst.max() > 0 or window.max() > 0)
    status = FINISHED
    for number in range(counts[KNOWN], len(wide)):
        narrow[number, LEFT], narrow[number, FOLLOWING] = narrow[number, WAITS], -1
        if narrow[number, WAITS] == 0:
            if to_begin == len(ready):
                ready_at, ready = grow(ready_at), grow(ready)
            push(ready_at, ready, to_begin, 0, number)
            to_begin += 1
    while True:
        leaving = flows[heap[0], LEAVES] if in_flight else NEVER
        finishing = done_at[0] if to_be_done else NEVER
        finished = beginning = -1  # an operation that is done at a known time, a queue whose head begins now
        changing = changes[changed, 0] if changed < len(changes) else NEVER
        if changing <= now or (
            changing < min(leaving, finishing, NEVER - 1) + 1 and not to_begin and (in_flight or to_be_done)
        ):
            now = max(now, changing)
            side = changes[changed, 1]
            if resources[side, LOAD] == 0:
                save(side, now, resources, burst)
            else:
                hold(side, now, resources)
            resources[side, ROOM], resources[side, SPARE] = changes[changed, 2], changes[changed, 3]
            if resources[side, ROOM] >= resources[side, USUAL]:
                resources[side, HELD] = 0
            in_flight = reallocate(side, now, in_flight, flows, work, resources, heap, reached, component)
            changed += 1
            continue
        if to_begin and now < leaving and now < finishing:
            number = ready[0]
            drop_first(ready_at, ready, to_begin)
            to_begin -= 1
            wide[number, START] = now
            queue = queue_of[narrow[number, ROUTE]]
            if queue < 0:
                if queue == DECIDED:
                    instant[0], status = number, PAUSED
                    break
                finished = number
                wide[number, END] = now + wide[number, DURATION] + latency[narrow[number, ROUTE]]
            else:
                if flows[queue, HEAD] < 0:
                    flows[queue, HEAD] = number
                    beginning = queue
                else:
                    narrow[flows[queue, LAST], FOLLOWING] = number
                flows[queue, LAST] = number
        elif leaving <= finishing:
            if leaving == NEVER:
                status = OUT_OF_RANGE if in_flight else FINISHED
                break
            now = leaving
            queue = heap[0]
            finished = flows[queue, HEAD]
            route = narrow[finished, ROUTE]
            wide[finished, END] = now + latency[route]
            following = narrow[finished, FOLLOWING]
            flows[queue, HEAD] = following
            if following >= 0:
                wide[following, START] = now
            if following >= 0 and narrow[following, ROUTE] == route and not saves:
                # It takes the place of the one before: nobody else is held up more or less.
                work[queue, REST] = wide[following, DURATION]
                flows[queue, SINCE] = now
                flows[queue, LEAVES] = leave_time_ns(now, work[queue, REST], work[queue, RATE])
                settle(flows, heap, in_flight, 0)
            else:
                in_flight = end_first_flow(now, in_flight, flows, work, resources, heap, reached, component)
                if following >= 0:
                    beginning = queue
        else:
            now = finishing
            finished = done[0]
            drop_first(done_at, done, to_be_done)
            to_be_done -= 1
        if now > LATEST_NS:
            status = OUT_OF_RANGE
            break
        if beginning >= 0:
            number = flows[beginning, HEAD]
            work[beginning, REST] = wide[number, DURATION]
            route = narrow[number, ROUTE]
            flows[beginning, SIDE], flows[beginning, SIDE + 1] = sender[route], receiver[route]
            flows[beginning, DEMAND] = demand[route]
            in_flight = start_flow(
                beginning, now, in_flight, flows, work, resources, burst, window, heap, reached, component
            )
        if finished < 0:
            continue
        if wide[finished, END] > now:
            if to_be_done == len(done):
                done_at, done = grow(done_at), grow(done)
            push(done_at, done, to_be_done, wide[finished, END], finished)
            to_be_done += 1
            continue
        instant[0] = finished
        at_once = 1
        while at_once:
            at_once -= 1
            finished = instant[at_once]
            played += 1
            spill = narrow[finished, SPILL]
            for place in range(SLOTS + (spilled[spill] if spill >= 0 else 0)):
                if place < SLOTS:
                    successor = narrow[finished, SUCCESSORS + place]
                    if successor < 0:
                        break
                else:
                    successor = spilled[spill + 1 + place - SLOTS]
                narrow[successor, LEFT] -= 1
                if narrow[successor, LEFT]:
                    continue
                if narrow[successor, ROUTE] == FREE and wide[successor, DURATION] == 0:
                    wide[successor, START] = wide[successor, END] = now
                    if at_once == len(instant):
                        instant = grow(instant)
                    instant[at_once] = successor
                    at_once += 1
                else:
                    if to_begin == len(ready):
                        ready_at, ready = grow(ready_at), grow(ready)
                    push(ready_at, ready, to_begin, 0, successor)
                    to_begin += 1
    counts[IN_FLIGHT], counts[TO_BE_DONE], counts[TO_BEGIN] = in_flight, to_be_done, to_begin
    counts[NOW], counts[PLAYED], counts[CHANGED] = now, played, changed
    counts[KNOWN], counts[STATUS] = len(wide), status
    return PlayState(
        flows, work, resources, heap, reached, component, done_at, done, ready_at, ready, instant, counts
    )


def are_asked(narrow: Array, state: PlayState) -> bool:
    """Whether decisions are asked for, now that one is its turn: everything else of this moment comes before them.

    Then they are the first DECISIONS of ``ready``.
    """
    counts, number = state.counts, state.instant[0]
    push(state.ready_at, state.ready, counts[TO_BEGIN], 1, number)
    counts[TO_BEGIN] += 1
    if narrow[number, LEFT] == 0:
        narrow[number, LEFT] = -1  # it has had its turn
        return False
    counts[DECISIONS], counts[TO_BEGIN] = counts[TO_BEGIN], 0
    return True


def simulate(
    wide: Array,
    narrow: Array,
    spilled: Array,
    sender: Array,
    receiver: Array,
    demand: Array,
    queue_of: Array,
    latency: Array,
    burst: Array,
    window: Array,
    changes: Array,
    state: PlayState,
) -> PlayState:
    """Play a graph on from ``state`` (see ``engine.play`` and ``operations``), to its end or the next decisions.

    Fills the columns START and END of ``wide``, and uses those of ``narrow`` that are the engine's. Rows from KNOWN on
    are new: they wait for as many operations as WAITS says. ``burst`` and ``window`` have an entry a resource,
    ``changes`` rows of a time, a resource and how much there is of it from then on, in order of time. Returns the
    state, STATUS in it: after FINISHED and OUT_OF_RANGE nothing goes on; when PAUSED everything that happens until NOW
    has happened.
    """
    state = run(
        wide, narrow, spilled, sender, receiver, demand, queue_of, latency, burst, window, changes, state
    )
    while state.counts[STATUS] == PAUSED and not are_asked(narrow, state):
        state = run(
            wide, narrow, spilled, sender, receiver, demand, queue_of, latency, burst, window, changes, state
        )
    return state
