"""The engine's inner loops, over flat arrays: plain functions, which ``compiled`` makes quick.

They keep to what compiles: numbers, arrays, and each other. They are in one file because what was compiled is kept by
the time of the file, and nobody asks whether what a loop calls has changed. Times are nanoseconds.

What is under way is the front of a queue. ``lines`` (int64) has a row a queue, of the columns named below, ``work``
(float64) how much is left of its front and the rate at which it goes on. ``sides`` (int64) has a row a resource: the
first queue whose front has it as its sender's side and as its receiver's, how much of it is asked for in all, how
much there is now and usually (in WHOLE), how much more it lets through at once, since when nobody uses it, and what
sharing needs. ``heap`` holds the queues whose fronts are under way, the first that leaves on top.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from headway.simulation.operations import (
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
OUT_OF_RANGE = -1
_FIRST_ROOM = 1024

# Columns of ``lines``: the front and the last of the queue; the resources of the front, and the queues after and before
# this one on them, at the sender's end and at the receiver's; how much of them it asks for and gets; its place in the
# heap; since when its work is right, and when it leaves; which sharing it was part of last.
FRONT, LAST, SIDE, AFTER, BEFORE, ASKED, GRANTED, PLACE, SINCE, LEAVES, MARK, COLUMNS = (
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
LOAD, ROOM, USUAL, SAVED, IDLE_SINCE, STAMP, TAKEN, RISING, FAIR, SIDE_COLUMNS = (
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
)  # of ``sides``
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


def roomier(array: Array) -> Array:
    """A copy with twice the room."""
    grown = np.empty(2 * len(array), dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def precedes(lines: Array, one: int, other: int) -> bool:
    """Whether the front of one queue leaves before that of another; their numbers decide between equals."""
    if lines[one, LEAVES] != lines[other, LEAVES]:
        return bool(lines[one, LEAVES] < lines[other, LEAVES])
    return bool(lines[one, FRONT] < lines[other, FRONT])


def settle(lines: Array, heap: Array, size: int, place: int) -> None:
    """Move the queue at ``place`` of the heap to where it belongs."""
    queue = heap[place]
    while place > 0 and precedes(lines, queue, heap[(place - 1) >> 1]):
        above = (place - 1) >> 1
        heap[place] = heap[above]
        lines[heap[place], PLACE] = place
        place = above
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and precedes(lines, heap[below + 1], heap[below]):
            below += 1
        if not precedes(lines, heap[below], queue):
            break
        heap[place] = heap[below]
        lines[heap[place], PLACE] = place
        place = below
    heap[place] = queue
    lines[queue, PLACE] = place


def leaves_at(now: int, rest: float, rate: float) -> int:
    """When what has so much left, and goes on at this rate, is through."""
    wait = rest / rate - 1e-6
    return NEVER if wait > LATEST_NS else now + ceil(wait)


def proportional(queue: int, lines: Array, sides: Array) -> float:
    """The share of its full rate that the scarcer of a queue's resources leaves to all who ask for it."""
    share = 1.0
    for own in range(2):
        side = lines[queue, SIDE + own]
        if side >= 0 and sides[side, LOAD] > sides[side, ROOM]:
            share = min(share, sides[side, ROOM] / sides[side, LOAD])
    return share


def reach(resource: int, lines: Array, sides: Array, reached: Array, crossed: Array) -> tuple[int, int]:
    """Collect the queues that hold each other up, from those on ``resource`` on, and the resources that they are on.

    Returns how many there are of both. Stops at MANY queues.
    """
    stamp = reached[-1] + 1
    reached[-1] = stamp
    queues, resources, done = 0, 1, 0
    crossed[0] = resource
    sides[resource, STAMP] = stamp
    while done < resources:
        for end in range(2):
            queue = sides[crossed[done], end]
            while queue >= 0:
                if lines[queue, MARK] != stamp:
                    if queues == MANY:
                        return queues + 1, resources
                    lines[queue, MARK], lines[queue, GRANTED] = stamp, -1
                    reached[queues] = queue
                    queues += 1
                    for own in range(2):
                        side = lines[queue, SIDE + own]
                        if side >= 0 and sides[side, STAMP] != stamp:
                            sides[side, STAMP] = stamp
                            crossed[resources] = side
                            resources += 1
                queue = lines[queue, AFTER + end]
        done += 1
    return queues, resources


def grant(queues: int, resources: int, lines: Array, sides: Array, reached: Array, crossed: Array) -> None:
    """Give what was reached max-min fair rates: all rise together until a resource is full, then those on it stay."""
    for number in range(resources):
        sides[crossed[number], TAKEN] = sides[crossed[number], RISING] = 0
    for number in range(queues):
        for own in range(2):
            if lines[reached[number], SIDE + own] >= 0:
                sides[lines[reached[number], SIDE + own], RISING] += 1
    left = queues
    while left:
        level = NEVER
        for number in range(resources):
            side = crossed[number]
            if sides[side, RISING]:
                sides[side, FAIR] = max(1, (sides[side, ROOM] - sides[side, TAKEN]) // sides[side, RISING])
                level = min(level, sides[side, FAIR])
        for number in range(queues):
            if lines[reached[number], GRANTED] < 0:
                level = min(level, lines[reached[number], ASKED])
        for number in range(queues):
            queue = reached[number]
            if lines[queue, GRANTED] >= 0:
                continue
            stays = lines[queue, ASKED] <= level
            for own in range(2):
                side = lines[queue, SIDE + own]
                stays = stays or (side >= 0 and sides[side, FAIR] <= level)
            if stays:
                lines[queue, GRANTED] = level
                left -= 1
        for number in range(queues):
            queue = reached[number]
            if lines[queue, GRANTED] == level and lines[queue, MARK] >= 0:
                lines[queue, MARK] = -1
                for own in range(2):
                    side = lines[queue, SIDE + own]
                    if side >= 0:
                        sides[side, TAKEN] += level
                        sides[side, RISING] -= 1


def go_on_at(
    queue: int, share: float, now: int, under_way: int, lines: Array, work: Array, heap: Array
) -> int:
    """Have the front of a queue go on at this share of its full rate; returns how many are under way."""
    if share != work[queue, RATE]:
        work[queue, REST] -= work[queue, RATE] * (now - lines[queue, SINCE])
        work[queue, RATE] = share
        lines[queue, SINCE] = now
        lines[queue, LEAVES] = leaves_at(now, max(work[queue, REST], 0.0), share)
        if lines[queue, PLACE] < 0:
            lines[queue, PLACE] = under_way
            heap[under_way] = queue
            under_way += 1
        settle(lines, heap, under_way, lines[queue, PLACE])
    return under_way


def share_anew(
    resource: int,
    now: int,
    under_way: int,
    lines: Array,
    work: Array,
    sides: Array,
    heap: Array,
    reached: Array,
    crossed: Array,
) -> int:
    """Estimate anew when the fronts of queues leave that are on ``resource``, or held up by those that are.

    An estimate holds until something else begins or ends, or there is more or less of a resource. Returns how many are
    under way.
    """
    queues, resources = reach(resource, lines, sides, reached, crossed)
    crossed[-1] = queues
    if queues > MANY:
        for end in range(2):
            queue = sides[resource, end]
            while queue >= 0:
                share = proportional(queue, lines, sides)
                under_way = go_on_at(queue, share, now, under_way, lines, work, heap)
                queue = lines[queue, AFTER + end]
        return under_way
    grant(queues, resources, lines, sides, reached, crossed)
    for number in range(queues):
        queue = reached[number]
        share = lines[queue, GRANTED] / lines[queue, ASKED]
        under_way = go_on_at(queue, share, now, under_way, lines, work, heap)
    return under_way


def save(side: int, now: int, sides: Array, burst: Array) -> None:
    """Put by what a resource that nobody used has let pass since then: as much of the time as there was room."""
    idle = now - sides[side, IDLE_SINCE]
    unused = int(idle * (sides[side, ROOM] / sides[side, USUAL]))
    sides[side, SAVED] = min(burst[side], sides[side, SAVED] + unused)
    sides[side, IDLE_SINCE] = now


def spend(queue: int, now: int, lines: Array, sides: Array, burst: Array) -> float:
    """Take what the resources of a queue saved while nobody used them; returns how much work that is."""
    credit = float(NEVER)
    for end in range(2):
        side = lines[queue, SIDE + end]
        if side >= 0:
            save(side, now, sides, burst)
            credit = min(credit, sides[side, SAVED] * (sides[side, USUAL] / lines[queue, ASKED]))
    return credit


def let_on(
    queue: int,
    now: int,
    under_way: int,
    lines: Array,
    work: Array,
    sides: Array,
    burst: Array,
    heap: Array,
    reached: Array,
    crossed: Array,
) -> int:
    """Let the front of a queue onto its resources, which ``lines`` names; returns how many are under way."""
    alone, saves = True, True
    for end in range(2):
        side = lines[queue, SIDE + end]
        if side >= 0:
            saves = saves and burst[side] > 0 and sides[side, LOAD] == 0
            sides[side, LOAD] += lines[queue, ASKED]
            alone = alone and sides[side, LOAD] == lines[queue, ASKED] <= sides[side, ROOM]
            after = sides[side, end]
            lines[queue, BEFORE + end], lines[queue, AFTER + end] = -1, after
            if after >= 0:
                lines[after, BEFORE + end] = queue
            sides[side, end] = queue
    if saves:
        spent = min(work[queue, REST], spend(queue, now, lines, sides, burst))
        work[queue, REST] -= spent
        for end in range(2):
            side = lines[queue, SIDE + end]
            if side >= 0:
                sides[side, SAVED] -= ceil(spent * (lines[queue, ASKED] / sides[side, USUAL]))
    lines[queue, SINCE] = now
    if alone:  # what share_anew would come to
        work[queue, RATE] = 1.0
        lines[queue, LEAVES] = leaves_at(now, work[queue, REST], 1.0)
        heap[under_way] = queue
        settle(lines, heap, under_way + 1, under_way)
        return under_way + 1
    work[queue, RATE] = 0.0
    side = lines[queue, SIDE] if lines[queue, SIDE] >= 0 else lines[queue, SIDE + 1]
    under_way = share_anew(side, now, under_way, lines, work, sides, heap, reached, crossed)
    if crossed[-1] > MANY and lines[queue, SIDE + 1] >= 0:
        side = lines[queue, SIDE + 1]
        under_way = share_anew(side, now, under_way, lines, work, sides, heap, reached, crossed)
    return under_way


def take_off_first(
    now: int,
    under_way: int,
    lines: Array,
    work: Array,
    sides: Array,
    heap: Array,
    reached: Array,
    crossed: Array,
) -> int:
    """Take the first of the heap off its resources; returns how many are under way."""
    queue = heap[0]
    lines[queue, PLACE] = -1
    under_way -= 1
    if under_way:
        heap[0] = heap[under_way]
        settle(lines, heap, under_way, 0)
    for end in range(2):
        side = lines[queue, SIDE + end]
        if side >= 0:
            sides[side, LOAD] -= lines[queue, ASKED]
            if sides[side, LOAD] == 0:
                sides[side, IDLE_SINCE] = now
            before, after = lines[queue, BEFORE + end], lines[queue, AFTER + end]
            if before >= 0:
                lines[before, AFTER + end] = after
            else:
                sides[side, end] = after
            if after >= 0:
                lines[after, BEFORE + end] = before
    before = reached[-1]
    for end in range(2):
        side = lines[queue, SIDE + end]
        if side >= 0 and sides[side, LOAD]:
            if sides[side, STAMP] > before and crossed[-1] <= MANY:
                continue  # those on it were among those on the other
            under_way = share_anew(side, now, under_way, lines, work, sides, heap, reached, crossed)
    return under_way


def simulate(
    wide: Array,
    narrow: Array,
    spilled: Array,
    sender: Array,
    receiver: Array,
    asked: Array,
    queue_of: Array,
    latency: Array,
    room: Array,
    burst: Array,
    changes: Array,
    queues: int,
) -> int:
    """Play a graph (see ``engine.play`` and ``operations``); returns how many operations were, or OUT_OF_RANGE.

    Fills the columns START and END of ``wide``, and uses those of ``narrow`` that are the engine's. ``room`` and
    ``burst`` have an entry a resource, ``changes`` rows of a time, a resource and how much there is of it from then on,
    in order of time.
    """
    lines, work = np.full((queues, COLUMNS), -1, np.int64), np.zeros((queues, 2), np.float64)
    sides, heap = np.full((len(burst), SIDE_COLUMNS), -1, np.int64), np.zeros(queues, np.int64)
    saves = len(burst) > 0 and burst.max() > 0
    sides[:, LOAD], sides[:, ROOM], sides[:, USUAL], sides[:, SAVED], sides[:, IDLE_SINCE] = (
        0,
        room,
        room,
        burst,
        0,
    )
    reached, crossed = np.zeros(MANY + 1, np.int64), np.zeros(len(burst) + 1, np.int64)
    # What will be done at a known time, and what is ready now (its times are all the same).
    # Whatever takes no time and nothing else is done as soon as it is ready, before anything that takes something.
    done_at, done = np.zeros(_FIRST_ROOM, np.int64), np.zeros(_FIRST_ROOM, np.int64)
    instant = np.zeros(_FIRST_ROOM, np.int64)
    ready_at, ready = np.zeros(_FIRST_ROOM, np.int64), np.zeros(_FIRST_ROOM, np.int64)
    under_way = to_be_done = to_begin = now = played = changed = 0
    for number in range(len(wide)):
        narrow[number, LEFT], narrow[number, FOLLOWING] = narrow[number, WAITS], -1
        if narrow[number, WAITS] == 0:
            if to_begin == len(ready):
                ready_at, ready = roomier(ready_at), roomier(ready)
            push(ready_at, ready, to_begin, 0, number)
            to_begin += 1
    while True:
        leaving = lines[heap[0], LEAVES] if under_way else NEVER
        finishing = done_at[0] if to_be_done else NEVER
        finished = beginning = -1  # an operation that is done at a known time, a queue whose front begins now
        changing = changes[changed, 0] if changed < len(changes) else NEVER
        if changing <= now or (
            changing < min(leaving, finishing, NEVER - 1) + 1 and not to_begin and (under_way or to_be_done)
        ):
            now = max(now, changing)
            if sides[changes[changed, 1], LOAD] == 0:
                save(changes[changed, 1], now, sides, burst)
            sides[changes[changed, 1], ROOM] = changes[changed, 2]
            under_way = share_anew(
                changes[changed, 1], now, under_way, lines, work, sides, heap, reached, crossed
            )
            changed += 1
            continue
        if to_begin and now < leaving and now < finishing:
            number = ready[0]
            drop_first(ready_at, ready, to_begin)
            to_begin -= 1
            wide[number, START] = now
            queue = queue_of[narrow[number, ROUTE]]
            if queue < 0:
                finished = number
                wide[number, END] = now + wide[number, DURATION] + latency[narrow[number, ROUTE]]
            else:
                if lines[queue, FRONT] < 0:
                    lines[queue, FRONT] = number
                    beginning = queue
                else:
                    narrow[lines[queue, LAST], FOLLOWING] = number
                lines[queue, LAST] = number
        elif leaving <= finishing:
            if leaving == NEVER:
                return OUT_OF_RANGE if under_way else played
            now = leaving
            queue = heap[0]
            finished = lines[queue, FRONT]
            route = narrow[finished, ROUTE]
            wide[finished, END] = now + latency[route]
            following = narrow[finished, FOLLOWING]
            lines[queue, FRONT] = following
            if following >= 0:
                wide[following, START] = now
            if following >= 0 and narrow[following, ROUTE] == route and not saves:
                # It takes the place of the one before: nobody else is held up more or less.
                work[queue, REST] = wide[following, DURATION]
                lines[queue, SINCE] = now
                lines[queue, LEAVES] = leaves_at(now, work[queue, REST], work[queue, RATE])
                settle(lines, heap, under_way, 0)
            else:
                under_way = take_off_first(now, under_way, lines, work, sides, heap, reached, crossed)
                if following >= 0:
                    beginning = queue
        else:
            now = finishing
            finished = done[0]
            drop_first(done_at, done, to_be_done)
            to_be_done -= 1
        if now > LATEST_NS:
            return OUT_OF_RANGE
        if beginning >= 0:
            number = lines[beginning, FRONT]
            work[beginning, REST] = wide[number, DURATION]
            route = narrow[number, ROUTE]
            lines[beginning, SIDE], lines[beginning, SIDE + 1] = sender[route], receiver[route]
            lines[beginning, ASKED] = asked[route]
            under_way = let_on(beginning, now, under_way, lines, work, sides, burst, heap, reached, crossed)
        if finished < 0:
            continue
        if wide[finished, END] > now:
            if to_be_done == len(done):
                done_at, done = roomier(done_at), roomier(done)
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
                        instant = roomier(instant)
                    instant[at_once] = successor
                    at_once += 1
                else:
                    if to_begin == len(ready):
                        ready_at, ready = roomier(ready_at), roomier(ready)
                    push(ready_at, ready, to_begin, 0, successor)
                    to_begin += 1
