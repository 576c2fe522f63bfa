"""Imbalance that moves: whether it is another rank each time that is waited for, which is nobody's fault."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from headway.diagnose.stragglers import Blame
from headway.diagnose.timeline import RankTime

MOST_STEPS = 0.6  # ranks that are the one waited for in this share of the steps are stragglers
LEAST_COST = 0.25  # of the mean: steps that cost less do not count
MOST_COST = 0.9  # of all waiting: a rank that causes so much of it is to blame, in however few steps
CHANCE = 0.05  # how likely it may be at most that a rank is waited for so often by chance alone


def moves(found: list[Blame], times: dict[int, RankTime], apart: frozenset[int] = frozenset()) -> bool:
    """Whether it is another rank each time that is waited for.

    It is not where ranks that are the one waited for more often than by chance are so in most of the steps, nor where
    one rank causes nearly all the waiting. Steps in ``apart``, which holds their places in the recording, do not count.
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


def _often(steps: int, ranks: int) -> int:
    """In how many of these steps a rank has to be the one waited for, if that is not to be chance.

    Were each step to choose among the ranks at random, then one would be chosen that often in a share of CHANCE of all
    recordings at most: the tail of a binomial distribution, for every rank. All steps are enough, however few.
    """
    chance = 0.0
    for often in range(steps, 0, -1):
        ways = math.lgamma(steps + 1) - math.lgamma(often + 1) - math.lgamma(steps - often + 1)
        chance += math.exp(ways + (steps - often) * math.log(1 - 1 / ranks) - often * math.log(ranks))
        if ranks * chance > CHANCE:
            return min(often + 1, steps)
    return 1
