"""Orders hosts, and places pipeline stages on workers, so that slow links carry little.

Orders are compared by an estimate of messages, the slowest stage or link, and the replicas' all-reduce; a replay then
decides. Placing stages on different workers means finding a path through them whose slowest hop and total length are
both small (Yuan et al., arXiv 2206.01288, use a travelling salesman formulation). Few workers are placed exactly, many
by local search.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

import numpy as np
import numpy.typing as npt

from headway.cluster import Cluster, Ways

Order = tuple[int, ...]
Matrix = npt.NDArray[np.float64]

MOST_TRIED = 6
"""Up to this many hosts, every order is evaluated."""
MOST_LINKED = 512
"""For more hosts, the order stays unchanged."""
MOST_LOOKS = 6000
"""About how many orders a search evaluates."""
MOST_KICKS = 20


@dataclass(frozen=True, slots=True)
class StageDemand:
    """The load of every stage: ``busy_ns`` of computation and ``message_bytes`` to the next stage per micro-batch.

    Its replicas reduce ``gradient_bytes``. If it ``loops``, the last rank of a pipeline sends to the first.
    """

    busy_ns: float
    message_bytes: float
    gradient_bytes: float
    micro_batches: int
    loops: bool = False


def order_for(cluster: Cluster, pipelines: Sequence[Sequence[int]], demand: StageDemand) -> Order:
    """Find the order of hosts with the shortest estimated step, where rank ``pipelines[p][s]`` has stage ``s``.

    Ranks are counted along that order. Returns the current order if no better one is found. Deterministic: few hosts
    are ordered exactly, more by local search.
    """
    count = len(cluster.hosts)
    as_it_is = tuple(range(count))
    links = {(host.workers, host.up_gbps, host.down_gbps) for host in cluster.hosts}
    if count < 3 or count > MOST_LINKED or (len(links) == 1 and not cluster.paths):
        return as_it_is
    costs = _StepCosts(cluster, pipelines, demand)
    if count <= MOST_TRIED:
        return min(permutations(as_it_is), key=lambda order: (costs(order), order))
    return improved([as_it_is, by_speed(costs.message_ns)], costs, MOST_LOOKS)


def by_speed(apart: Matrix) -> Order:
    """Order hosts so that close ones are neighbours (single-linkage clustering); clusters join at their nearest ends."""
    count = len(apart)
    group_of = [[host] for host in range(count)]
    both = np.maximum(apart, apart.T)
    rows, columns = np.triu_indices(count, 1)
    for pair in np.argsort(both[rows, columns], kind="stable").tolist():
        left, right = int(rows[pair]), int(columns[pair])
        first, second = group_of[left], group_of[right]
        if first is second:
            continue
        joints = {
            (turn_first, turn_second): both[first[0 if turn_first else -1], second[-1 if turn_second else 0]]
            for turn_first in (False, True)
            for turn_second in (False, True)
        }
        turn_first, turn_second = min(joints, key=lambda turns: joints[turns])
        if turn_first:
            first.reverse()
        if turn_second:
            second.reverse()
        first += second
        for host in second:
            group_of[host] = first
        if len(first) == count:
            break
    return tuple(group_of[0])


def improved(starts: Sequence[Order], cost: Callable[[Order], float], looks: int) -> Order:
    """Improve ``starts`` by swaps and reversals within a budget of about ``looks`` evaluations; returns the best order.

    In a local optimum, random swaps restart the search (iterated local search: Lourenço, Martin, Stützle, 2003).
    """
    chance = random.Random(0)
    best = min(starts, key=cost)
    least, at, kicks = cost(best), best, 0
    while looks > 0 and kicks < MOST_KICKS:
        here, better = cost(at), True
        while better and looks > 0:
            better = False
            for left, right in combinations(range(len(at)), 2):
                swapped = list(at)
                swapped[left], swapped[right] = swapped[right], swapped[left]
                turned = (*at[:left], *at[left : right + 1][::-1], *at[right + 1 :])
                for changed in dict.fromkeys((tuple(swapped), turned)):
                    looks -= 1
                    if (changed_cost := cost(changed)) < here * (1 - 1e-9):
                        at, here, better = changed, changed_cost, True
        kicks += 1
        if here < least * (1 - 1e-9):
            best, least, kicks = at, here, 0
        kicked = list(best)
        for place in [chance.sample(range(len(best)), 2) for _ in range(3)] if len(best) > 1 else []:
            kicked[place[0]], kicked[place[1]] = kicked[place[1]], kicked[place[0]]
        at = tuple(kicked)
    return best


class _StepCosts:
    """Estimates the step time (ns) of an order of hosts: one pipeline pass, its bottleneck, the all-reduce."""

    def __init__(self, cluster: Cluster, pipelines: Sequence[Sequence[int]], demand: StageDemand) -> None:
        ways, places = Ways(cluster), range(len(cluster.hosts))
        self._gbps = np.array([[ways.gbps(source, target) for target in places] for source in places])
        self._latency_ns = 1e3 * np.array(
            [[ways.latency_us(source, target) for target in places] for source in places]
        )
        self._up = np.array([host.up_gbps for host in cluster.hosts])
        self._down = np.array([host.down_gbps for host in cluster.hosts])
        self._workers = np.array([host.workers for host in cluster.hosts])
        self._ranks = np.array(pipelines)
        self._demand = demand
        self.message_ns: Matrix = self._latency_ns + 8 * demand.message_bytes / self._gbps

    def __call__(self, order: Order) -> float:
        at = np.array(order)
        hosts = np.repeat(at, self._workers[at])[self._ranks]  # of every pipeline and stage
        demand = self._demand
        follows = np.roll(hosts, -1, axis=1)
        there, here = (follows, hosts) if demand.loops else (follows[:, :-1], hosts[:, :-1])
        forth_ns, back_ns = (
            self._latency_ns[source, target] + 8 * demand.message_bytes / self._shared(source, target)
            for source, target in ((here, there), (there, here))
        )
        once_ns = float((forth_ns + back_ns).sum(axis=1).max())
        busiest_ns = max(demand.busy_ns, float(forth_ns.max()), float(back_ns.max()))
        return once_ns + (demand.micro_batches - 1) * busiest_ns + self._reducing_ns(hosts)

    def _reducing_ns(self, hosts: npt.NDArray[np.int64]) -> float:
        """The time of the ring all-reduces of all stages' replicas at once."""
        count = len(hosts)
        if count == 1:
            return 0.0
        follows = np.roll(hosts, -1, axis=0)
        slowest_gbps = float(self._shared(hosts, follows).min())
        sent_bytes = 2 * (count - 1) / count * self._demand.gradient_bytes
        return 8 * sent_bytes / slowest_gbps + 2 * (count - 1) * float(self._latency_ns[hosts, follows].max())

    def _shared(self, senders: npt.NDArray[np.int64], receivers: npt.NDArray[np.int64]) -> Matrix:
        """The rates (Gbit/s) of simultaneous messages that share the hosts' links."""
        apart, count = senders != receivers, len(self._up)
        leaving = np.bincount(senders[apart], minlength=count)
        coming = np.bincount(receivers[apart], minlength=count)
        links = np.minimum(
            self._up[senders] / np.maximum(1, leaving[senders]),
            self._down[receivers] / np.maximum(1, coming[receivers]),
        )
        rates: Matrix = np.where(
            apart, np.minimum(self._gbps[senders, receivers], links), self._gbps[senders, receivers]
        )
        return rates


EXACT = 9  # workers: beyond, subsets are too many


@dataclass(frozen=True, slots=True)
class Placement:
    """Worker ``workers[s]`` has stage ``s``; the times are those of a ``Split`` on these workers."""

    workers: tuple[int, ...]
    once_ns: float
    bottleneck_ns: float

    def step_ns(self, micro_batches: int) -> float:
        """The estimated time of a step."""
        return self.once_ns + (micro_batches - 1) * self.bottleneck_ns


Hop = Callable[[int, int, int], float]
"""(stage, sender, receiver) -> ns: the time of the message after a stage between two workers."""


def place(
    busy_ns: Sequence[float],
    hop_ns: Hop,
    micro_batches: int,
    *,
    speeds: Sequence[float] = (),
) -> Placement:
    """Place stages, which take ``busy_ns`` at speed 1, on as many workers of ``speeds``.

    Exact for up to ``EXACT`` workers; the best of several local searches for more. Deterministic.
    """
    speeds = speeds or (1.0,) * len(busy_ns)
    assert len(speeds) == len(busy_ns), "as many workers as stages"
    costs = _Costs(busy_ns, hop_ns, speeds, micro_batches)
    return _exactly(costs) if len(busy_ns) <= EXACT else _locally(costs)


@dataclass(frozen=True, slots=True)
class _Costs:
    busy_ns: Sequence[float]
    hop_ns: Hop
    speeds: Sequence[float]
    micro_batches: int

    def stage_ns(self, stage: int, worker: int) -> float:
        return self.busy_ns[stage] / self.speeds[worker]

    def of(self, workers: Sequence[int]) -> Placement:
        stages = [self.stage_ns(stage, worker) for stage, worker in enumerate(workers)]
        there = [self.hop_ns(s, a, b) for s, (a, b) in enumerate(pairwise(workers))]
        back = [self.hop_ns(s, b, a) for s, (a, b) in enumerate(pairwise(workers))]
        return Placement(
            tuple(workers), sum(stages) + sum(there) + sum(back), max([*stages, *there, *back], default=0.0)
        )

    def step_ns(self, placement: Placement) -> float:
        return placement.step_ns(self.micro_batches)


def _exactly(costs: _Costs) -> Placement:
    """Held-Karp dynamic programming over sets of used workers, keeping the Pareto-optimal paths of each."""
    count = len(costs.busy_ns)
    paths: dict[tuple[frozenset[int], int], list[Placement]] = {
        (frozenset([w]), w): [Placement((w,), costs.stage_ns(0, w), costs.stage_ns(0, w))]
        for w in range(count)
    }
    for stage in range(1, count):
        longer: dict[tuple[frozenset[int], int], list[Placement]] = {}
        for (used, at), kept in paths.items():
            for worker in set(range(count)) - used:
                there, back = (
                    costs.hop_ns(stage - 1, at, worker),
                    costs.hop_ns(stage - 1, worker, at),
                )
                busy = costs.stage_ns(stage, worker)
                ends = longer.setdefault((used | {worker}, worker), [])
                for path in kept:
                    _keep(
                        ends,
                        Placement(
                            (*path.workers, worker),
                            path.once_ns + busy + there + back,
                            max(path.bottleneck_ns, busy, there, back),
                        ),
                    )
        paths = longer
    return min(
        (path for kept in paths.values() for path in kept), key=lambda p: (costs.step_ns(p), p.workers)
    )


def _keep(paths: list[Placement], new: Placement) -> None:
    """Add ``new`` unless it is dominated, and drop the paths that it dominates."""
    if any(path.once_ns <= new.once_ns and path.bottleneck_ns <= new.bottleneck_ns for path in paths):
        return
    paths[:] = [
        path for path in paths if path.once_ns < new.once_ns or path.bottleneck_ns < new.bottleneck_ns
    ]
    paths.append(new)


def _locally(costs: _Costs) -> Placement:
    count = len(costs.busy_ns)
    starts = [tuple(range(count)), *(_greedy(costs, first) for first in range(count))]
    starts = sorted(dict.fromkeys(starts), key=lambda workers: costs.step_ns(costs.of(workers)))[:4]
    orders = (
        improved([start], lambda workers: costs.step_ns(costs.of(workers)), MOST_LOOKS // 4)
        for start in starts
    )
    return min(map(costs.of, orders), key=costs.step_ns)


def _greedy(costs: _Costs, first: int) -> tuple[int, ...]:
    path = [first]
    left = set(range(len(costs.busy_ns))) - {first}
    while left:
        stage, at = len(path), path[-1]
        path.append(
            min(
                left,
                key=lambda w: (
                    costs.hop_ns(stage - 1, at, w)
                    + costs.hop_ns(stage - 1, w, at)
                    + costs.stage_ns(stage, w),
                    w,
                ),
            )
        )
        left.discard(path[-1])
    return tuple(path)
