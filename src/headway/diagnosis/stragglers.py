"""Stragglers: the ranks that arrive last are blamed, never those with the longest phases.

A rank that is slow in its backward makes the backward of every other rank look just as long, because the others
wait there. What tells them apart is the arrival: while the others wait for a collective that lacks one member,
that member is to blame.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Ints
from headway.diagnosis.breakdown import NS_A_MS, REST, RankTime
from headway.diagnosis.communication import Communications
from headway.trace.events import Kind

FLOOR_SHARE = 0.02  # of the step
FLOOR_MS = 0.5
LEAST_EXPLAINED = 0.1  # of the blame: a part of the work that explains less is not its cause
MAX_EXPLAINED = 200  # late arrivals, the costliest first, that are looked at to find the cause

CAUSES = ("forward", "backward", "input", "optimizer", REST)
UNKNOWN = "unknown"
MOST_HIDDEN = 0.6  # of all hidden delays: the share of a rank that is to blame for them
BREAK_NS = 50_000  # of the network: collectives that follow each other faster wait for it, not for a rank


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that others wait for.

    ``blame_ms`` is the time that the other ranks wait for it in each step, averaged over all of them; ``hidden_ms`` is
    by how much it delays communication that all wait for later, while the others still compute. ``cause`` is the part
    of its work that is longer before its late arrivals and in its mean step, compared with the median of the other
    ranks, or ``unknown``; ``late_ms`` is by how much before its late arrivals. ``own_ms`` and ``others_ms`` are that
    part in a mean step, on it and (median) on the others.
    """

    rank: int
    blame_ms: float
    cause: str
    late_ms: float
    own_ms: float
    others_ms: float
    hidden_ms: float = 0.0

    @property
    def cost_ms(self) -> float:
        """By how much it makes steps longer."""
        return self.blame_ms + self.hidden_ms


class Blame(NamedTuple):
    """A stretch in which ``waiting`` waited for ``blamed`` to join an instance."""

    waiting: int
    blamed: int
    instance: int
    start_ns: int
    end_ns: int


def blames(times: dict[int, RankTime], communications: Communications) -> list[Blame]:
    """Say which rank every stretch of waiting for a straggler was for.

    A stretch belongs to the last rank to arrive at the collective in flight that is completed first. Where that rank
    was itself waiting for another at that time, the blame passes on.
    """
    direct = {rank: list(_direct(time, communications.of_rank(rank))) for rank, time in times.items()}
    starts = {
        rank: np.array([piece.start_ns for piece in pieces], dtype=np.int64)
        for rank, pieces in direct.items()
    }
    found: list[Blame] = []
    for pieces in direct.values():
        for piece in pieces:
            found.extend(_passed_on(piece, direct, starts, depth=len(times)))
    return found


def _direct(time: RankTime, own: Communications) -> Iterator[Blame]:
    """Cut this rank's waiting where collectives are requested or completed; the first to complete is awaited."""
    pending = own.where(own.arrival_ns > own.enqueue_ns)
    windows = intervals.union(time.step_start_ns, time.step_end_ns)
    waiting = intervals.intersect(time.straggling, windows)
    cuts = np.unique(np.concatenate([waiting.ravel(), pending.enqueue_ns, pending.arrival_ns]))
    lefts, rights = cuts[:-1], cuts[1:]
    picked = intervals.inside(waiting, lefts)
    order = np.argsort(pending.enqueue_ns, kind="stable").tolist()
    enqueues, arrivals = pending.enqueue_ns.tolist(), pending.arrival_ns.tolist()
    heap: list[tuple[int, int]] = []
    coming = 0
    for left, right in zip(lefts[picked].tolist(), rights[picked].tolist(), strict=True):
        while coming < len(order) and enqueues[order[coming]] <= left:
            heapq.heappush(heap, (arrivals[order[coming]], order[coming]))
            coming += 1
        while heap and heap[0][0] <= left:
            heapq.heappop(heap)
        if heap:
            row = heap[0][1]
            yield Blame(time.rank, int(pending.last_rank[row]), int(pending.instance[row]), left, right)


def _passed_on(
    piece: Blame, direct: dict[int, list[Blame]], starts: dict[int, Ints], depth: int
) -> Iterator[Blame]:
    """Hand on the stretches in which the blamed rank was itself waiting for another."""
    its = direct.get(piece.blamed, [])
    cursor = piece.start_ns
    index = max(int(np.searchsorted(starts[piece.blamed], piece.start_ns, side="right")) - 1, 0) if its else 0
    while depth > 0 and index < len(its) and its[index].start_ns < piece.end_ns:
        other = its[index]
        start, end = max(other.start_ns, piece.start_ns), min(other.end_ns, piece.end_ns)
        if end > start and other.blamed != piece.waiting:
            if start > cursor:
                yield piece._replace(start_ns=cursor, end_ns=start)
            nearer = Blame(piece.waiting, other.blamed, other.instance, start, end)
            yield from _passed_on(nearer, direct, starts, depth - 1)
            cursor = end
        index += 1
    if cursor < piece.end_ns:
        yield piece._replace(start_ns=cursor)


def find_stragglers(
    times: dict[int, RankTime],
    communications: Communications,
    found: list[Blame],
    *,
    step_ms: float,
    uncertainty_ms: float = 0.0,
) -> tuple[Straggler, ...]:
    """Name the ranks whose blame exceeds the noise, worst first.

    The floor is the largest of 2 % of the step, 0.5 ms and the clocks' uncertainty.
    """
    steps = len(next(iter(times.values())).step_start_ns)
    others = max(len(times) - 1, 1)
    floor_ms = max(FLOOR_SHARE * step_ms, FLOOR_MS, uncertainty_ms)
    waited: dict[int, dict[int, int]] = {rank: {} for rank in times}
    for blame in found:
        costs = waited[blame.blamed]
        costs[blame.instance] = costs.get(blame.instance, 0) + blame.end_ns - blame.start_ns
    hidden = _of_one_rank(hidden_delays(times, communications, waited))
    passed_on_ns = _passed_to_causes(times, found, floor_ms * steps * others * NS_A_MS)
    result = []
    for rank in times:
        costs, delays = waited[rank], hidden.get(rank, {})
        blame_ms = (sum(costs.values()) + passed_on_ns[rank]) / steps / others / NS_A_MS
        hidden_ms = sum(delays.values()) / steps / NS_A_MS
        if blame_ms + hidden_ms > floor_ms:
            both = {
                instance: costs.get(instance, 0) + others * delays.get(instance, 0)
                for instance in {**costs, **delays}
            }
            explained = _explained(rank, blame_ms, hidden_ms, both, times, communications)
            result.append(explained)
    return tuple(sorted(result, key=lambda straggler: -straggler.cost_ms))


def _passed_to_causes(times: dict[int, RankTime], found: list[Blame], least_ns: float) -> dict[int, float]:
    """What to add to each rank's blame, in nanoseconds: that of ranks which are late only because they waited for it.

    Such a rank computes no longer than the others do. What another waits for it is passed on to those that it waited
    for, up to as long as it did so while the other did not wait. Ranks with a blame below ``least_ns`` keep it.
    """
    lost: dict[int, dict[int, list[Blame]]] = {rank: {} for rank in times}
    for blame in found:
        lost[blame.blamed].setdefault(blame.waiting, []).append(blame)
    waits: dict[int, dict[int, intervals.Spans]] = {rank: {} for rank in times}
    for cause, by in lost.items():
        for waiting, own in by.items():
            starts_ns = np.array([blame.start_ns for blame in own], dtype=np.int64)
            ends_ns = np.array([blame.end_ns for blame in own], dtype=np.int64)
            waits[waiting][cause] = intervals.union(starts_ns, ends_ns)
    own_ns = {rank: float(time.own_ms.sum()) * NS_A_MS for rank, time in times.items()}
    usual_ns = float(np.median(list(own_ns.values())))
    passed_ns = dict.fromkeys(times, 0.0)
    for rank, by in lost.items():
        if not waits[rank] or sum(_length_ns(own) for own in by.values()) < least_ns:
            continue
        more_ns = max(0.0, own_ns[rank] - usual_ns)
        for waiting, own in by.items():
            busy = intervals.join(*waits[waiting].values())
            alone_ns = {
                cause: intervals.length_ns(intervals.subtract(spans, busy))
                for cause, spans in waits[rank].items()
                if cause != waiting
            }
            length_ns = _length_ns(own)
            moved_ns = min(max(0.0, length_ns - more_ns), sum(alone_ns.values()))
            for cause, part_ns in alone_ns.items():
                share_ns = moved_ns * part_ns / max(sum(alone_ns.values()), 1)
                passed_ns[cause] += share_ns
                passed_ns[rank] -= share_ns
    return passed_ns


def _length_ns(found: Sequence[Blame]) -> int:
    return sum(blame.end_ns - blame.start_ns for blame in found)


def _of_one_rank(hidden: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
    """Hidden delays of the rank that most of them are of; what comes from another rank each time is nobody's."""
    total = {rank: sum(delays.values()) for rank, delays in hidden.items()}
    whole = sum(total.values())
    return {rank: delays for rank, delays in hidden.items() if total[rank] > MOST_HIDDEN * whole}


def hidden_delays(
    times: dict[int, RankTime], rows: Communications, waited: dict[int, dict[int, int]]
) -> dict[int, dict[int, int]]:
    """By how much ranks delay communication that is waited for only later: nanoseconds by rank and instance.

    Where the network is busy without a break from one collective to one that all stand still for, the whole chain
    begins as late as the last member comes to the first of them, while the others still compute. Without that rank it
    would begin when the last of the others came, and they would wait less by as much, unless they wait for less.
    """
    found: dict[int, dict[int, int]] = {rank: {} for rank in times}
    collective = rows.where(rows.kind == Kind.COLLECTIVE)
    for group in dict.fromkeys(collective.group.tolist()):
        own = collective.where(collective.group == group)
        own = own.where(np.lexsort((own.enqueue_ns, own.instance)))
        begins = np.flatnonzero(np.diff(own.instance, prepend=-1))
        count = np.diff(np.append(begins, len(own)))
        if count.max() < 2:
            continue
        whole = count == count.max()
        final = (begins + count - 1)[whole]
        ended_ns = np.maximum.reduceat(own.end_ns, begins)[whole]
        order = np.argsort(own.enqueue_ns[final], kind="stable")
        final, ended_ns = final[order], ended_ns[order]
        came_ns, second_ns = own.enqueue_ns[final], own.enqueue_ns[final - 1]
        busy_until_ns = np.concatenate([[0], np.maximum.accumulate(ended_ns)[:-1]])
        head = np.flatnonzero(came_ns > busy_until_ns + BREAK_NS)
        over_ns = np.maximum.reduceat(ended_ns, head)
        ranks = np.unique(own.rank)
        last = own.rank[final[head]]
        waits_ns = np.stack(
            [intervals.length_within(times[rank].exposed, came_ns[head], over_ns) for rank in ranks.tolist()]
        )
        waits_ns[ranks[:, None] == last] = np.iinfo(np.int64).max
        gained_ns = np.minimum(came_ns[head] - second_ns[head], waits_ns.min(axis=0))
        for rank, instance, gain_ns in zip(
            last.tolist(), own.instance[final[head]].tolist(), gained_ns.tolist(), strict=True
        ):
            delay_ns = gain_ns - waited[rank].get(instance, 0) // (len(ranks) - 1)
            if delay_ns > 0:
                found[rank][instance] = delay_ns
    return found


def _explained(
    rank: int,
    blame_ms: float,
    hidden_ms: float,
    costs: dict[int, int],
    times: dict[int, RankTime],
    all_rows: Communications,
) -> Straggler:
    """Compare what the straggler did before its late arrivals with what the others did before theirs."""
    barriers = _barriers(times, all_rows)
    own = all_rows.of_rank(rank)
    late = np.zeros(len(CAUSES))
    weight = 0
    for instance in sorted(costs, key=lambda one: -costs[one])[:MAX_EXPLAINED]:
        windows = _windows(instance, own, all_rows, barriers, times)
        if rank not in windows or len(windows) < 2:
            continue
        spent = {one: _spent(times[one], *window) for one, window in windows.items()}
        typical = np.median([parts for one, parts in spent.items() if one != rank], axis=0)
        late += costs[instance] * (spent[rank] - typical)
        weight += costs[instance]
    late_ms = late / max(weight, 1) / NS_A_MS
    means_ms = {one: np.array(_mean_parts(time)) / NS_A_MS for one, time in times.items()}
    others_ms = np.median([means for one, means in means_ms.items() if one != rank], axis=0)
    # What is longer before single late arrivals, but not in the mean step, is chance. A step may have many of them.
    a_step = max(1.0, len(costs) / len(times[rank].step_start_ns))
    explaining_ms = np.minimum(late_ms * a_step, means_ms[rank] - others_ms)
    late_ms[explaining_ms <= LEAST_EXPLAINED * (blame_ms + hidden_ms)] = 0.0
    worst = int(np.argmax(late_ms))
    if late_ms[worst] <= 0:
        return Straggler(rank, blame_ms, UNKNOWN, 0.0, 0.0, 0.0, hidden_ms)
    return Straggler(
        rank,
        blame_ms,
        CAUSES[worst],
        float(late_ms[worst]),
        float(means_ms[rank][worst]),
        float(others_ms[worst]),
        hidden_ms,
    )


def _barriers(times: dict[int, RankTime], rows: Communications) -> Ints:
    """Instances that some rank blocked on, outside of backward: all ranks leave them together."""
    found = []
    for rank, time in times.items():
        own = rows.where((rows.rank == rank) & (rows.bucket < 0) & (rows.kind == Kind.COLLECTIVE))
        waited = intervals.length_within(time.wait, own.enqueue_ns, own.end_ns)
        found.append(own.instance[2 * waited > own.end_ns - own.enqueue_ns])
    return np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)


def _windows(
    instance: int, own: Communications, all_rows: Communications, barriers: Ints, times: dict[int, RankTime]
) -> dict[int, tuple[int, int]]:
    """For each member: from its arrival at the last point where all met before, to its arrival here.

    That point is the latest collective of the same group that belongs to an earlier step or that a rank blocked on;
    if there is none, it is the start of the first recorded step. ``own`` are the straggler's rows.
    """
    here = _enqueues(all_rows, instance)
    row = int(np.flatnonzero(own.instance == instance)[0])
    before = (own.group == own.group[row]) & (own.enqueue_ns < own.enqueue_ns[row])
    before &= (own.step < own.step[row]) | np.isin(own.instance, barriers)
    earlier = np.flatnonzero(before & (own.instance != instance))
    there: dict[int, int] = {}
    if len(earlier):
        there = _enqueues(all_rows, int(own.instance[earlier[np.argmax(own.enqueue_ns[earlier])]]))
    if not set(here) <= set(there):
        there = {one: int(times[one].step_start_ns.min()) for one in here}
    return {one: (there[one], end) for one, end in here.items() if there[one] < end}


def _enqueues(rows: Communications, instance: int) -> dict[int, int]:
    members = np.flatnonzero(rows.instance == instance)
    return dict(zip(rows.rank[members].tolist(), rows.enqueue_ns[members].tolist(), strict=True))


def _spent(time: RankTime, start_ns: int, end_ns: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What one rank spent on each of CAUSES in a window, waits left out."""
    start, end = np.array([start_ns]), np.array([end_ns])
    parts = [
        int(intervals.length_within(spans, start, end)[0])
        for spans in (time.forward, time.backward, time.input, time.optimizer, time.wait)
    ]
    parts[-1] = end_ns - start_ns - sum(parts)
    return np.array(parts, dtype=np.float64)


def _mean_parts(time: RankTime) -> list[float]:
    """What one rank spends on each of CAUSES in a mean step."""
    parts = [
        float(time.per_step(spans).mean())
        for spans in (time.forward, time.backward, time.input, time.optimizer, time.wait)
    ]
    parts[-1] = float((time.step_end_ns - time.step_start_ns).mean()) - sum(parts)
    return parts


MOST_STEPS = 0.6  # ranks that the others wait for in this share of the steps are stragglers
LEAST_COST = 0.25  # of the mean: steps that cost less do not count
MOST_COST = 0.9  # of all waiting: a rank that causes so much of it is to blame, in however few steps
MOVING_STANDS_OUT = 0.10  # of the step
STRAGGLER_STANDS_OUT = 0.05
LEAST_STEPS = 5  # of fewer it cannot be said that it is a different rank each time
NOISE = 0.08  # of a step: how much the work of equal workers varies, as a standard deviation
LEAST_NOISE = 0.06  # where the recording shows less than that, it has too few steps to know
DEVICE_NOISE = 0.02  # the same two of ranks that compute on devices of their own, which nothing else uses
SPREAD_OF_WAITS = (
    0.6  # standard deviation, over steps, of the wait averaged over ranks, in those of a rank's work
)
SURE = 3.0  # standard errors
CHANCE = 0.01  # how likely it may be at most that a rank is waited for so often by chance alone


def is_moving(found: list[Blame], times: dict[int, RankTime], apart: frozenset[int] = frozenset()) -> bool:
    """Whether ranks wait for a different rank each time.

    They do not where ranks that are waited for more often than by chance account for most of the steps, nor where
    one rank causes nearly all the waiting. Steps in ``apart``, as indices into the recording, do not count.
    """
    starts = np.min([time.step_start_ns for time in times.values()], axis=0)
    costs: dict[int, dict[int, int]] = {}
    for blame in found:
        step = max(int(np.searchsorted(starts, blame.start_ns, side="right")) - 1, 0)
        if step not in apart:
            of_step = costs.setdefault(step, {})
            of_step[blame.blamed] = of_step.get(blame.blamed, 0) + blame.end_ns - blame.start_ns
    worst = [max(of_step.items(), key=lambda cost: cost[1]) for of_step in costs.values()]
    floor = LEAST_COST * float(np.mean([cost for _, cost in worst])) if worst else 0.0
    chiefs = [rank for rank, cost in worst if cost > floor]
    if not chiefs or len(times) < 2:
        return False
    total: Counter[int] = Counter()
    for of_step in costs.values():
        total.update(of_step)
    if max(total.values()) >= MOST_COST * total.total():
        return False
    enough = _often(len(chiefs), len(times))
    explained = sum(often for often in Counter(chiefs).values() if often >= enough)
    return explained < MOST_STEPS * len(chiefs)


def uneven(late_ms: npt.NDArray[np.float64], step_ms: float, ranks: int, *, on_devices: bool = False) -> bool:
    """Whether ranks wait for one another for more than equal workers do.

    ``late_ms`` is how long ranks wait for others in each step, averaged over ranks. Of workers whose work varies by
    ``NOISE``, the slowest takes longer than the mean by the expected maximum of normal values (Blom, 1958), plus what
    so few steps leave uncertain. The worst tenth of the steps, at least one, does not count: what happens once is no
    imbalance.
    """
    steps = len(late_ms)
    if steps < LEAST_STEPS or ranks < 2:
        return False
    usual_ms = float(np.mean(np.sort(late_ms)[: steps - max(1, steps // 10)]))
    longest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    by_chance = (DEVICE_NOISE if on_devices else NOISE) * (longest + 2 * SPREAD_OF_WAITS / math.sqrt(steps))
    return usual_ms >= step_ms * max(MOVING_STANDS_OUT, by_chance)


def least_blame_ms(own_ms: npt.NDArray[np.float64], step_ms: float, *, on_devices: bool = False) -> float:
    """The blame from which a rank stands out: more than two equal workers would get by chance.

    ``own_ms`` is how long each rank's steps (rows) took without waits. Their spread is that of the median rank.
    """
    spread = np.sort(1.4826 * np.median(np.abs(own_ms - np.median(own_ms, axis=1, keepdims=True)), axis=1))
    least = DEVICE_NOISE if on_devices else LEAST_NOISE
    noise_ms = max(least * step_ms, float(spread[(len(spread) - 1) // 2]))
    return max(STRAGGLER_STANDS_OUT * step_ms, SURE * noise_ms * math.sqrt(2 / own_ms.shape[1]))


def _often(steps: int, ranks: int) -> int:
    """In how many of these steps the others must wait for one rank for that not to be chance.

    If each step chose among the ranks at random, some rank would be chosen that often in at most a share of CHANCE of
    all recordings: the tail of a binomial distribution, for every rank. All steps are enough, however few.
    """
    chance = 0.0
    for often in range(steps, 0, -1):
        ways = math.lgamma(steps + 1) - math.lgamma(often + 1) - math.lgamma(steps - often + 1)
        chance += math.exp(ways + (steps - often) * math.log(1 - 1 / ranks) - often * math.log(ranks))
        if ranks * chance > CHANCE:
            return min(often + 1, steps)
    return 1
