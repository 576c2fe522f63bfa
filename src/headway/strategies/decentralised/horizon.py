"""A job under partial all-reduce for some time, as replay and predictions simulate it."""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import UserError
from headway.incidents import Incidents
from headway.job import Job
from headway.strategies.decentralised.cosimulation import CoSimulation
from headway.strategies.decentralised.footprint import averaged_bytes
from headway.strategies.decentralised.policy import PartialAllReduceStrategy
from headway.strategies.decentralised.scenario import Iterations, Scenario, parts_of
from headway.strategies.horizon import Outcome

WARM_UP, COUNTED = 10, 40  # iterations of a rank that takes the mean time
MOST_RANK_ITERATIONS = 200_000


def over_a_horizon(job: Job, strategy: PartialAllReduceStrategy) -> Outcome:
    """Simulate ``job`` for some dozens of iterations; ranks that were not recorded take the steps of those that were.

    The horizon is as long as 50 iterations of a mean rank take without communication, and at least as 10 of the slowest
    one do, and until after the last of the job's incidents; the first fifth is a warm-up. Raises UserError where that
    would be too large, or where nobody is left at some time.
    """
    timelines, cluster = job.steps.timelines, job.on
    names = sorted(timelines)
    of_recorded = {rank: [parts_of(timeline) for timeline in own] for rank, own in timelines.items()}
    steps = [
        of_recorded[rank] if rank in of_recorded else of_recorded[names[rank % len(names)]]
        for rank in range(job.world_size)
    ]
    factors = {rank: job.steps.factor_of(rank) for rank in range(job.world_size)}
    lengths_ns = [
        factors[rank] * sum(time_ns for parts in own for _, time_ns in parts) / len(own)
        for rank, own in enumerate(steps)
    ]
    mean_ns = sum(lengths_ns) / len(lengths_ns)
    until_ns = max(round((WARM_UP + COUNTED) * mean_ns), round(10 * max(lengths_ns)), 10)
    incidents = job.incidents
    _check_somebody_stays(incidents, job.world_size)
    until_ns = max(until_ns, incidents.last_ns + until_ns // 5)  # so that what follows from the last is seen
    expected = sum(until_ns / max(1.0, each) for each in lengths_ns)
    if expected > MOST_RANK_ITERATIONS:
        raise UserError(
            "the simulation would be too large", got=f"about {expected:.1e} iterations of ranks",
            expected=f"at most {MOST_RANK_ITERATIONS}", fix="Replay fewer workers.",
        )  # fmt: skip
    scenario = Scenario(
        until_ns, from_ns=until_ns // 5, deaths=incidents.deaths, joins=incidents.joins,
        slow_share=incidents.slow_share, slow_factor=incidents.slow_factor,
    )  # fmt: skip
    size_bytes = averaged_bytes(job.model, strategy)
    iterations = Iterations(steps, scenario, factors)
    return CoSimulation(cluster, strategy.decide(job), iterations, size_bytes, strategy.staleness).play()


def _check_somebody_stays(incidents: Incidents, world_size: int) -> None:
    """Raise UserError where at some time no rank is there."""
    moments = sorted({0, *(time_ns for time_ns, _ in (*incidents.deaths, *incidents.joins))})
    always = world_size - len(incidents.ranks)
    for moment_ns in moments:
        if always + sum(_is_there(incidents.of(rank), moment_ns) for rank in incidents.ranks) < 1:
            raise UserError(
                "no rank is left", got=f"{', '.join(incidents.describe())}", expected="one that trains at any time",
                fix="Let fewer ranks die.",
            )  # fmt: skip


def _is_there(happens: Sequence[tuple[int, bool]], moment_ns: int) -> bool:
    before = [is_join for time_ns, is_join in happens if time_ns <= moment_ns]
    return before[-1] if before else not happens[0][1]
