"""The search against every plan of small spaces."""

from __future__ import annotations

import numpy as np
import pytest
from tests.optimization.every_plan import MOST_PARAMETERS, best_of, every_plan, exhaust
from tests.planning.jobs import layered_job

from headway.errors import UserError
from headway.job import Job
from headway.optimization.search import candidate_strategies
from headway.simulator.simulate import Simulator
from headway.strategies.base import fits
from headway.strategies.registry import plugins

WITHIN = 0.01


def small_job(seed: int) -> Job:
    """Three layers of sizes and times by chance, on links that are anything from idle to far too slow."""
    random = np.random.default_rng(seed)
    sizes = [int(2 ** random.uniform(12, 23)) for _ in range(3)]
    return layered_job(
        sizes,
        forward_ms=float(random.choice([5.0, 20.0, 60.0])),
        communication=float(random.choice([0.1, 0.3, 0.6, 1.0, 2.0, 4.0])),
        world_size=int(random.choice([2, 4])),
        latency_us=float(random.choice([5.0, 50.0, 500.0])),
        overhead_us=float(random.choice([20.0, 100.0, 400.0])),
        seed=seed,
    ).job


def missed(job: Job) -> float:
    """By what share the best plan that a search replays is slower than the best of all."""
    simulator = Simulator()
    made = [plugin.propose(job) for plugin in plugins().values() if fits(job, plugin.policy)]
    proposed = [each for each, _ in candidate_strategies(job, made) if not each.changes_training]
    found = best_of(proposed, lambda each: simulator.simulate(job, each).step_ms)
    return found.step_ms / exhaust(job).step_ms - 1


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_near_the_best_of_every_plan(seed: int) -> None:
    assert missed(small_job(seed)) <= WITHIN


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6, 46))
def test_the_search_is_near_the_best_of_every_plan_of_many(seed: int) -> None:
    assert missed(small_job(seed)) <= WITHIN


def test_every_way_to_cut_parameters_into_buckets_is_tried_once() -> None:
    job = small_job(0)
    plans = list(every_plan(job))
    assert len(plans) == len(set(plans)) == 2**5 * (1 + 2 * 2)
    assert len({(each.name, each.decide(job)) for each in plans}) == len(plans)


def test_too_many_plans_are_refused() -> None:
    large = layered_job([1024] * (MOST_PARAMETERS // 2 + 1)).job
    with pytest.raises(UserError, match="not every plan"):
        list(every_plan(large))
