"""Placing the stages of a pipeline: which worker has which, where workers and the links between them differ.

That is a path through all workers whose dearest hop and whose length are both to be small (Yuan et al., arXiv
2206.01288, who place them by the travelling salesman problem). Few workers are placed exactly, many by local search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.planning.host_order import MOST_LOOKS, improved

EXACT = 9  # workers: beyond, subsets are too many


@dataclass(frozen=True, slots=True)
class Placement:
    """``workers[s]`` has stage ``s``. The times are those of a ``Split`` on these workers."""

    workers: tuple[int, ...]
    once_ns: float
    bottleneck_ns: float

    def step_ns(self, micro_batches: int) -> float:
        """About how long a step of so many micro-batches takes."""
        return self.once_ns + (micro_batches - 1) * self.bottleneck_ns


Hop = Callable[[int, int, int], float]
"""How long the message of the boundary behind a stage (first) takes from a worker (second) to another (third)."""


def place(
    busy_ns: Sequence[float],
    hop_ns: Hop,
    micro_batches: int,
    *,
    speeds: Sequence[float] = (),
) -> Placement:
    """The best placement of stages, which take ``busy_ns`` at speed 1, on as many workers of ``speeds``.

    It is exact for up to ``EXACT`` workers; for more it is the best of several local searches. Deterministic.
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
    """Held and Karp's recursion over the sets of workers that the first stages have, with both times of each path."""
    count = len(costs.busy_ns)
    paths: dict[tuple[frozenset[int], int], list[Placement]] = {
        (frozenset([w]), w): [Placement((w,), costs.stage_ns(0, w), costs.stage_ns(0, w))]
        for w in range(count)
    }
    for stage in range(1, count):
        longer: dict[tuple[frozenset[int], int], list[Placement]] = {}
        for (used, at), own in paths.items():
            for worker in set(range(count)) - used:
                there, back = (
                    costs.hop_ns(stage - 1, at, worker),
                    costs.hop_ns(stage - 1, worker, at),
                )
                busy = costs.stage_ns(stage, worker)
                ends = longer.setdefault((used | {worker}, worker), [])
                for path in own:
                    _keep(
                        ends,
                        Placement(
                            (*path.workers, worker),
                            path.once_ns + busy + there + back,
                            max(path.bottleneck_ns, busy, there, back),
                        ),
                    )
        paths = longer
    return min((each for own in paths.values() for each in own), key=lambda p: (costs.step_ns(p), p.workers))


def _keep(paths: list[Placement], new: Placement) -> None:
    """Add ``new`` unless another is no worse in both times; drop those that it is no worse than."""
    if any(each.once_ns <= new.once_ns and each.bottleneck_ns <= new.bottleneck_ns for each in paths):
        return
    paths[:] = [
        each for each in paths if each.once_ns < new.once_ns or each.bottleneck_ns < new.bottleneck_ns
    ]
    paths.append(new)


def _locally(costs: _Costs) -> Placement:
    count = len(costs.busy_ns)
    starts = [tuple(range(count)), *(_greedy(costs, first) for first in range(count))]
    starts = sorted(dict.fromkeys(starts), key=lambda workers: costs.step_ns(costs.of(workers)))[:4]
    found = (
        improved([start], lambda workers: costs.step_ns(costs.of(workers)), MOST_LOOKS // 4)
        for start in starts
    )
    return min(map(costs.of, found), key=costs.step_ns)


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
