"""Finds stragglers: ranks are blamed for arriving last at collectives, never for long phases.

A rank with a slow backward makes the backward of every other rank look just as long, because the others wait inside
it. The arrival distinguishes them: while others wait for a collective that lacks one member, that member is to blame.
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
LEAST_EXPLAINED = 0.1  # of the blame: a part of the work that explains less is not the cause
MAX_EXPLAINED = 200  # late arrivals, costliest first, that are examined to find the cause

CAUSES = ("forward", "backward", "input", "optimizer", REST)
UNKNOWN = "unknown"
MOST_HIDDEN = 0.6  # of all hidden delays: a rank that causes a larger share is to blame for them
BREAK_NS = 50_000  # collectives with a shorter gap wait for the network, not for a rank


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that other ranks wait for. Times are ms per step.

    ``blame_ms`` is how long the other ranks wait for it, averaged over them. ``hidden_ms`` is how much it delays
    communication that all ranks wait for later. ``cause`` is the part of its work that takes longer than the median of
    the other ranks, both before its late arrivals (by ``late_ms``) and in its mean step, or ``unknown``. ``own_ms`` and
    ``others_ms`` are the lengths of that part in a mean step: on this rank, and the median of the others.
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
        """How much longer steps are because of this rank."""
        return self.blame_ms + self.hidden_ms


class Blame(NamedTuple):
    """A stretch of time in which rank ``waiting`` waited for rank ``blamed`` to join a collective."""

    waiting: int
    blamed: int
    instance: int
    start_ns: int
    end_ns: int


def blames(times: dict[int, RankTime], communications: Communications) -> list[Blame]:
    """Assigns every stretch of waiting for stragglers to the rank that caused it.

    The last rank to arrive is blamed, at the collective in flight that completes first. If that rank was itself waiting
    for another rank, the blame passes on to that rank.
    """
    direct = {rank: list(_direct_blames(time, communications.of_rank(rank))) for rank, time in times.items()}
    starts = {
        rank: np.array([piece.start_ns for piece in pieces], dtype=np.int64)
        for rank, pieces in direct.items()
    }
    blamed: list[Blame] = []
    for pieces in direct.values():
        for piece in pieces:
            blamed.extend(_pass_on(piece, direct, starts, depth=len(times)))
    return blamed


def _direct_blames(time: RankTime, rank_rows: Communications) -> Iterator[Blame]:
    """Splits this rank's waiting where collectives are enqueued or complete, and blames the first to complete."""
    pending = rank_rows.where(rank_rows.arrival_ns > rank_rows.enqueue_ns)
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


def _pass_on(
    piece: Blame, direct: dict[int, list[Blame]], starts: dict[int, Ints], depth: int
) -> Iterator[Blame]:
    """Passes on the stretches in which the blamed rank was itself waiting for another rank."""
    its = direct.get(piece.blamed, [])
    cursor = piece.start_ns
    index = max(int(np.searchsorted(starts[piece.blamed], piece.start_ns, side="right")) - 1, 0) if its else 0
    while depth > 0 and index < len(its) and its[index].start_ns < piece.end_ns:
        wait = its[index]
        start, end = max(wait.start_ns, piece.start_ns), min(wait.end_ns, piece.end_ns)
        if end > start and wait.blamed != piece.waiting:
            if start > cursor:
                yield piece._replace(start_ns=cursor, end_ns=start)
            nearer = Blame(piece.waiting, wait.blamed, wait.instance, start, end)
            yield from _pass_on(nearer, direct, starts, depth - 1)
            cursor = end
        index += 1
    if cursor < piece.end_ns:
        yield piece._replace(start_ns=cursor)


def find_stragglers(
    times: dict[int, RankTime],
    communications: Communications,
    blamed: list[Blame],
    *,
    step_ms: float,
    uncertainty_ms: float = 0.0,
) -> tuple[Straggler, ...]:
    """The ranks whose cost exceeds the noise floor, worst first.

    The floor is the largest of 2 % of the step, 0.5 ms and the clocks' uncertainty.
    """
    steps = len(next(iter(times.values())).step_start_ns)
    other_count = max(len(times) - 1, 1)
    floor_ms = max(FLOOR_SHARE * step_ms, FLOOR_MS, uncertainty_ms)
    waited: dict[int, dict[int, int]] = {rank: {} for rank in times}
    for blame in blamed:
        costs = waited[blame.blamed]
        costs[blame.instance] = costs.get(blame.instance, 0) + blame.end_ns - blame.start_ns
    hidden = _of_dominant_rank(hidden_delays(times, communications, waited))
    passed_on_ns = _passed_to_causes(times, blamed, floor_ms * steps * other_count * NS_A_MS)
    result = []
    for rank in times:
        costs, delays = waited[rank], hidden.get(rank, {})
        blame_ms = (sum(costs.values()) + passed_on_ns[rank]) / steps / other_count / NS_A_MS
        hidden_ms = sum(delays.values()) / steps / NS_A_MS
        if blame_ms + hidden_ms > floor_ms:
            both = {
                instance: costs.get(instance, 0) + other_count * delays.get(instance, 0)
                for instance in {**costs, **delays}
            }
            explained = _explain(rank, blame_ms, hidden_ms, both, times, communications)
            result.append(explained)
    return tuple(sorted(result, key=lambda straggler: -straggler.cost_ms))


def _passed_to_causes(times: dict[int, RankTime], blamed: list[Blame], least_ns: float) -> dict[int, float]:
    """Moves blame from ranks that are late only because they waited to the ranks they waited for, in ns per rank.

    Such a rank computes no longer than the others. The blame moved is limited to the time it waited while the rank
    that blames it did not. Ranks with less blame than ``least_ns`` keep theirs.
    """
    lost: dict[int, dict[int, list[Blame]]] = {rank: {} for rank in times}
    for blame in blamed:
        lost[blame.blamed].setdefault(blame.waiting, []).append(blame)
    waits: dict[int, dict[int, intervals.Spans]] = {rank: {} for rank in times}
    for cause, by in lost.items():
        for waiting, pieces in by.items():
            starts_ns = np.array([blame.start_ns for blame in pieces], dtype=np.int64)
            ends_ns = np.array([blame.end_ns for blame in pieces], dtype=np.int64)
            waits[waiting][cause] = intervals.union(starts_ns, ends_ns)
    busy_ns = {rank: float(time.busy_ms.sum()) * NS_A_MS for rank, time in times.items()}
    usual_ns = float(np.median(list(busy_ns.values())))
    passed_ns = dict.fromkeys(times, 0.0)
    for rank, by in lost.items():
        if not waits[rank] or sum(_length_ns(pieces) for pieces in by.values()) < least_ns:
            continue
        more_ns = max(0.0, busy_ns[rank] - usual_ns)
        for waiting, pieces in by.items():
            busy = intervals.join(*waits[waiting].values())
            alone_ns = {
                cause: intervals.length_ns(intervals.subtract(spans, busy))
                for cause, spans in waits[rank].items()
                if cause != waiting
            }
            length_ns = _length_ns(pieces)
            moved_ns = min(max(0.0, length_ns - more_ns), sum(alone_ns.values()))
            for cause, part_ns in alone_ns.items():
                share_ns = moved_ns * part_ns / max(sum(alone_ns.values()), 1)
                passed_ns[cause] += share_ns
                passed_ns[rank] -= share_ns
    return passed_ns


def _length_ns(blamed: Sequence[Blame]) -> int:
    return sum(blame.end_ns - blame.start_ns for blame in blamed)


def _of_dominant_rank(hidden: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
    """The hidden delays of the rank that causes most of them; empty if the ranks take turns."""
    total = {rank: sum(delays.values()) for rank, delays in hidden.items()}
    total_ns = sum(total.values())
    return {rank: delays for rank, delays in hidden.items() if total[rank] > MOST_HIDDEN * total_ns}


def hidden_delays(
    times: dict[int, RankTime], rows: Communications, waited: dict[int, dict[int, int]]
) -> dict[int, dict[int, int]]:
    """How much ranks delay communication that is waited for only later, in ns by rank and instance.

    A chain of collectives without gaps starts when the last member reaches the first of them, often while the others
    still compute. Without that rank it would start when the second-to-last member arrived. All ranks would then wait
    that much less at the end of the chain, limited by how long they wait.
    """
    delays: dict[int, dict[int, int]] = {rank: {} for rank in times}
    collective = rows.where(rows.kind == Kind.COLLECTIVE)
    for group in dict.fromkeys(collective.group.tolist()):
        of_group = collective.where(collective.group == group)
        of_group = of_group.where(np.lexsort((of_group.enqueue_ns, of_group.instance)))
        begins = np.flatnonzero(np.diff(of_group.instance, prepend=-1))
        count = np.diff(np.append(begins, len(of_group)))
        if count.max() < 2:
            continue
        complete = count == count.max()
        final = (begins + count - 1)[complete]
        ended_ns = np.maximum.reduceat(of_group.end_ns, begins)[complete]
        order = np.argsort(of_group.enqueue_ns[final], kind="stable")
        final, ended_ns = final[order], ended_ns[order]
        came_ns, second_ns = of_group.enqueue_ns[final], of_group.enqueue_ns[final - 1]
        busy_until_ns = np.concatenate([[0], np.maximum.accumulate(ended_ns)[:-1]])
        head = np.flatnonzero(came_ns > busy_until_ns + BREAK_NS)
        over_ns = np.maximum.reduceat(ended_ns, head)
        ranks = np.unique(of_group.rank)
        last = of_group.rank[final[head]]
        waits_ns = np.stack(
            [intervals.length_within(times[rank].exposed, came_ns[head], over_ns) for rank in ranks.tolist()]
        )
        waits_ns[ranks[:, None] == last] = np.iinfo(np.int64).max
        gained_ns = np.minimum(came_ns[head] - second_ns[head], waits_ns.min(axis=0))
        for rank, instance, gain_ns in zip(
            last.tolist(), of_group.instance[final[head]].tolist(), gained_ns.tolist(), strict=True
        ):
            delay_ns = gain_ns - waited[rank].get(instance, 0) // (len(ranks) - 1)
            if delay_ns > 0:
                delays[rank][instance] = delay_ns
    return delays


def _explain(
    rank: int,
    blame_ms: float,
    hidden_ms: float,
    costs: dict[int, int],
    times: dict[int, RankTime],
    all_rows: Communications,
) -> Straggler:
    """Finds the cause: compares the straggler's work before its late arrivals with the work of the others."""
    barriers = _barriers(times, all_rows)
    rank_rows = all_rows.of_rank(rank)
    late = np.zeros(len(CAUSES))
    weight = 0
    for instance in sorted(costs, key=lambda late_instance: -costs[late_instance])[:MAX_EXPLAINED]:
        windows = _windows(instance, rank_rows, all_rows, barriers, times)
        if rank not in windows or len(windows) < 2:
            continue
        spent = {member: _spent(times[member], *window) for member, window in windows.items()}
        typical = np.median([parts for member, parts in spent.items() if member != rank], axis=0)
        late += costs[instance] * (spent[rank] - typical)
        weight += costs[instance]
    late_ms = late / max(weight, 1) / NS_A_MS
    means_ms = {member: np.array(_mean_parts(time)) / NS_A_MS for member, time in times.items()}
    others_ms = np.median([means for member, means in means_ms.items() if member != rank], axis=0)
    # A part that is longer before late arrivals but not in the mean step is chance. A step may have many arrivals.
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
    """Collectives outside the buckets that some rank blocked on: all ranks leave them together."""
    instances = []
    for rank, time in times.items():
        rank_rows = rows.where((rows.rank == rank) & (rows.bucket < 0) & (rows.kind == Kind.COLLECTIVE))
        waited = intervals.length_within(time.wait, rank_rows.enqueue_ns, rank_rows.end_ns)
        instances.append(rank_rows.instance[2 * waited > rank_rows.end_ns - rank_rows.enqueue_ns])
    return np.unique(np.concatenate(instances)) if instances else np.zeros(0, dtype=np.int64)


def _windows(
    instance: int,
    rank_rows: Communications,
    all_rows: Communications,
    barriers: Ints,
    times: dict[int, RankTime],
) -> dict[int, tuple[int, int]]:
    """For each member, the window from its arrival at the previous synchronisation to its arrival at ``instance``.

    The previous synchronisation is the latest collective of the same group in an earlier step, or one that a rank
    blocked on; without one, the start of the first recorded step. ``rank_rows`` are the straggler's rows.
    """
    here = _enqueues(all_rows, instance)
    row = int(np.flatnonzero(rank_rows.instance == instance)[0])
    before = (rank_rows.group == rank_rows.group[row]) & (rank_rows.enqueue_ns < rank_rows.enqueue_ns[row])
    before &= (rank_rows.step < rank_rows.step[row]) | np.isin(rank_rows.instance, barriers)
    earlier = np.flatnonzero(before & (rank_rows.instance != instance))
    there: dict[int, int] = {}
    if len(earlier):
        there = _enqueues(
            all_rows, int(rank_rows.instance[earlier[np.argmax(rank_rows.enqueue_ns[earlier])]])
        )
    if not set(here) <= set(there):
        there = {member: int(times[member].step_start_ns.min()) for member in here}
    return {member: (there[member], end) for member, end in here.items() if there[member] < end}


def _enqueues(rows: Communications, instance: int) -> dict[int, int]:
    members = np.flatnonzero(rows.instance == instance)
    return dict(zip(rows.rank[members].tolist(), rows.enqueue_ns[members].tolist(), strict=True))


def _spent(time: RankTime, start_ns: int, end_ns: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One rank's time for each of CAUSES within a window, without waits, in ns."""
    start, end = np.array([start_ns]), np.array([end_ns])
    parts = [
        int(intervals.length_within(spans, start, end)[0])
        for spans in (time.forward, time.backward, time.input, time.optimizer, time.wait)
    ]
    parts[-1] = end_ns - start_ns - sum(parts)
    return np.array(parts, dtype=np.float64)


def _mean_parts(time: RankTime) -> list[float]:
    """One rank's time for each of CAUSES in a mean step, in ns."""
    parts = [
        float(time.per_step(spans).mean())
        for spans in (time.forward, time.backward, time.input, time.optimizer, time.wait)
    ]
    parts[-1] = float((time.step_end_ns - time.step_start_ns).mean()) - sum(parts)
    return parts


MOST_STEPS = 0.6  # share of the steps that stragglers have to explain
LEAST_COST = 0.25  # of the mean: cheaper steps do not count
MOST_COST = 0.9  # of all waiting: a rank that causes this share is to blame, even in few steps
MOVING_STANDS_OUT = 0.10  # of the step
STRAGGLER_STANDS_OUT = 0.05
LEAST_STEPS = 5  # with fewer steps, turn-taking cannot be distinguished from chance
NOISE = 0.08  # of a step: the standard deviation of equal workers' work
LEAST_NOISE = 0.06  # the same as a lower limit: less variation in a recording means too few steps
DEVICE_NOISE = 0.02  # replaces both for ranks with exclusive devices
SPREAD_OF_WAITS = 0.6  # the standard deviation of the mean wait over steps, relative to that of a rank's work
SURE = 3.0  # standard errors
CHANCE = 0.01  # significance level for a rank being last this often by chance


def is_moving(blamed: list[Blame], times: dict[int, RankTime], apart: frozenset[int] = frozenset()) -> bool:
    """Whether ranks wait for a different rank each time (moving imbalance).

    False if ranks that are last significantly often explain most steps, or if one rank causes nearly all waiting. Steps
    in ``apart`` (indices into the recording) do not count.
    """
    starts = np.min([time.step_start_ns for time in times.values()], axis=0)
    costs: dict[int, dict[int, int]] = {}
    for blame in blamed:
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
    enough = _least_often(len(chiefs), len(times))
    explained = sum(often for often in Counter(chiefs).values() if often >= enough)
    return explained < MOST_STEPS * len(chiefs)


def is_uneven(
    late_ms: npt.NDArray[np.float64], step_ms: float, ranks: int, *, on_devices: bool = False
) -> bool:
    """Whether ranks wait for one another longer than equal workers would.

    ``late_ms`` is the wait for other ranks in each step, averaged over ranks. If work varies by ``NOISE``, the slowest
    worker exceeds the mean by the expected maximum of normal values (Blom, 1958), plus the uncertainty of few steps.
    The worst tenth of the steps, at least one, does not count: a single event is no imbalance.
    """
    steps = len(late_ms)
    if steps < LEAST_STEPS or ranks < 2:
        return False
    usual_ms = float(np.mean(np.sort(late_ms)[: steps - max(1, steps // 10)]))
    longest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    by_chance = (DEVICE_NOISE if on_devices else NOISE) * (longest + 2 * SPREAD_OF_WAITS / math.sqrt(steps))
    return usual_ms >= step_ms * max(MOVING_STANDS_OUT, by_chance)


def least_blame_ms(busy_ms: npt.NDArray[np.float64], step_ms: float, *, on_devices: bool = False) -> float:
    """The blame from which a rank stands out: more than equal workers would get by chance, in ms per step.

    ``busy_ms`` holds the steps' lengths without waits, shape (ranks, steps). The spread of the median rank counts.
    """
    spread = np.sort(1.4826 * np.median(np.abs(busy_ms - np.median(busy_ms, axis=1, keepdims=True)), axis=1))
    least = DEVICE_NOISE if on_devices else LEAST_NOISE
    noise_ms = max(least * step_ms, float(spread[(len(spread) - 1) // 2]))
    return max(STRAGGLER_STANDS_OUT * step_ms, SURE * noise_ms * math.sqrt(2 / busy_ms.shape[1]))


def _least_often(steps: int, ranks: int) -> int:
    """The number of steps in which one rank must be last to be significant at level CHANCE.

    Under the null hypothesis each step picks a rank at random: a binomial tail, with a Bonferroni correction over ranks.
    If even all steps are not significant, all steps are enough.
    """
    chance = 0.0
    for often in range(steps, 0, -1):
        ways = math.lgamma(steps + 1) - math.lgamma(often + 1) - math.lgamma(steps - often + 1)
        chance += math.exp(ways + (steps - often) * math.log(1 - 1 / ranks) - often * math.log(ranks))
        if ranks * chance > CHANCE:
            return min(often + 1, steps)
    return 1
