"""A rank that is late each time is to blame; where it is another one each time, nobody is."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import pytest
from tests.diagnosis.truth import JOB, found_in, only_finding, planted_ms, standing
from tests.synthetic import MS, Extra, SyntheticJob, synthetic_trace

from headway.diagnosis.breakdown import rank_time
from headway.diagnosis.communication import match
from headway.diagnosis.stragglers import Blame, is_moving

SIZES = [2, 3, 4, 8]


def uneven(world_size: int, *, steps: int = 20, seed: int = 0) -> SyntheticJob:
    """Every rank's work varies a lot from step to step."""
    return SyntheticJob(world_size=world_size, steps=steps, jitter=3.0, seed=seed)


def in_turns(world_size: int) -> SyntheticJob:
    extras = tuple(Extra(rank, "forward", 20.0, range(rank, 24, world_size)) for rank in range(world_size))
    return replace(JOB, world_size=world_size, steps=24, extras=extras)


@pytest.mark.parametrize("world_size", SIZES)
def test_ranks_that_are_late_in_turns(world_size: int) -> None:
    job = in_turns(world_size)
    finding = only_finding(found_in(job), "moving_imbalance")
    assert finding.ranks == ()
    assert "each time for a different one" in finding.sentence
    # Spread evenly, what is planted would make every step longer by one part in so many ranks.
    shared_ms = planted_ms(job, extras=()) * (1 - 1 / world_size)
    assert finding.cost_ms == pytest.approx(shared_ms, rel=0.35)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("steps", [6, 10, 30])
def test_chance_makes_no_straggler(steps: int, world_size: int) -> None:
    told = [standing(found_in(uneven(world_size, steps=steps, seed=seed))) for seed in range(10)]
    assert sum("straggler" in causes for causes in told) <= 1
    least = 0 if world_size == 2 else 7  # of two ranks each waits half of the time
    assert sum("moving_imbalance" in causes for causes in told) >= least


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("steps", [1, 2, 4, 10, 30])
def test_a_fixed_straggler_is_told_from_it(steps: int, world_size: int) -> None:
    slow, extra_ms = world_size - 1, 15.0 if steps > 2 else 30.0  # so few steps say less
    for seed in range(3):
        job = replace(
            JOB, world_size=world_size, steps=steps, jitter=0.4, seed=seed, slow={(slow, "forward"): extra_ms}
        )
        found = found_in(job)
        assert standing(found) == ["straggler"]
        assert only_finding(found, "straggler").ranks == (slow,)


def test_two_fixed_stragglers_of_many_ranks_do_not_move() -> None:
    slow = {(1, "forward"): 15.0, (6, "forward"): 15.0}
    finding = only_finding(found_in(replace(JOB, world_size=8, slow=slow)), "straggler")
    assert finding.ranks in ((1,), (6,))
    assert f"; rank {7 - finding.ranks[0]} to a lesser degree" in finding.sentence


def test_a_rank_that_is_late_in_half_of_the_steps_is_a_straggler() -> None:
    job = replace(JOB, extras=(Extra(2, "forward", 50.0, frozenset({*range(1, 14), 20})),))
    finding = only_finding(found_in(job), "straggler")
    assert finding.ranks == (2,)
    assert finding.cost_ms == pytest.approx(planted_ms(job, extras=()), rel=0.15)


@pytest.mark.parametrize("world_size", SIZES)
def test_who_causes_nearly_all_waiting_is_to_blame_in_however_few_steps(world_size: int) -> None:
    job = replace(JOB, world_size=world_size, steps=5, jitter=0.3, extras=(Extra(1, "rest", 200.0, (2,)),))
    assert only_finding(found_in(job), "straggler").ranks == (1,)


@pytest.mark.parametrize(("ms", "steps"), [(900.0, (11,)), (300.0, range(2, 30, 6))])
def test_a_stall_beside_it_makes_no_straggler(ms: float, steps: Container[int]) -> None:
    job = replace(uneven(4, steps=30), extras=(Extra(1, "rest", ms, steps),))
    found = found_in(job)
    assert standing(found) == ["stalls", "moving_imbalance"]
    assert found.findings[0].ranks == (1,)


def test_steps_that_are_set_apart_do_not_count() -> None:
    trace = synthetic_trace(SyntheticJob(world_size=2, steps=12))
    rows = match(trace)
    times = {
        rank: rank_time(rank, events, trace.steps, rows.of_rank(rank))
        for rank, events in trace.events.items()
    }
    late = {
        step: 1 if step % 3 == 0 else step % 2 for step in range(12)
    }  # every third time it is rank 1's stall
    starts = times[0].step_start_ns.tolist()
    found = [Blame(1 - rank, rank, step, starts[step], starts[step] + MS) for step, rank in late.items()]
    assert is_moving(found, times, frozenset(range(0, 12, 3)))
    only_one = [blame for blame in found if blame.blamed == 1]
    assert not is_moving(only_one, times)
    assert not is_moving(only_one, times, frozenset(range(12)))


@pytest.mark.parametrize("world_size", SIZES)
def test_nothing_is_missing_from_the_straggler_s_cost(world_size: int) -> None:
    job = replace(JOB, world_size=world_size, slow={(0, "input"): 18.0})
    finding = only_finding(found_in(job), "straggler")
    assert finding.cost_ms == pytest.approx(planted_ms(job, slow={}), rel=0.1)
