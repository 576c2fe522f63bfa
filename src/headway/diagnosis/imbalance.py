"""Imbalance: whether it moves from rank to rank, and whether it is more than the noise that equal workers have."""

from __future__ import annotations

import math
from collections import Counter
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from headway.diagnosis.stragglers import Blame
from headway.diagnosis.timeline import RankTime

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
