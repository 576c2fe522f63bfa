"""Waiting for stragglers is one thing: it adds up to the breakdown, and equal workers are not accused of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.diagnosis.healthy import noisy_trace
from tests.diagnosis.truth import found_in, standing
from tests.synthetic import Extra, SyntheticJob, synthetic_trace

from headway.diagnosis import Diagnosis, diagnose
from headway.diagnosis.breakdown import rank_time
from headway.diagnosis.communication import match
from headway.diagnosis.stragglers import blames

EXACT = SyntheticJob(world_size=2, steps=10, bucket_bytes=(4,), latency_ms=0.0)


def waited_ms(found: Diagnosis) -> float:
    """What the mean rank waits for the last to arrive."""
    return sum(parts.straggler_wait for parts in found.breakdown.values()) / len(found.breakdown)


def test_of_two_ranks_one_that_is_10_ms_late_is_blamed_for_10_ms() -> None:
    found = found_in(replace(EXACT, slow={(1, "forward"): 10.0}))
    (straggler,) = found.stragglers
    assert straggler.blame_ms == pytest.approx(10.0, abs=1e-3)
    assert found.breakdown[0].straggler_wait == pytest.approx(10.0, abs=1e-3)
    assert found.breakdown[1].straggler_wait == 0
    assert "the other ranks wait 10 ms of each" in found.verdict


def test_two_ranks_that_take_turns_wait_half_of_the_time_each() -> None:
    turns = tuple(Extra(rank, "forward", 10.0, range(rank, 10, 2)) for rank in range(2))
    found = found_in(replace(EXACT, extras=turns))
    assert [one.blame_ms for one in found.stragglers] == pytest.approx([5.0, 5.0], abs=1e-3)
    (finding,) = [one for one in found.findings if one.cause == "moving_imbalance"]
    assert finding.cost_ms == pytest.approx(5.0, abs=1e-3) == pytest.approx(waited_ms(found), abs=1e-3)
    assert "Ranks wait for one another for 5 ms of each" in finding.sentence


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_blame_adds_up_to_what_the_breakdown_says_is_waited(world_size: int) -> None:
    job = SyntheticJob(world_size=world_size, steps=7, jitter=1.0, slow={(1, "backward"): 12.0})
    trace = synthetic_trace(job)
    rows = match(trace)
    times = {
        rank: rank_time(rank, events, trace.steps, rows.of_rank(rank))
        for rank, events in trace.events.items()
    }
    blamed_ms = sum(one.end_ns - one.start_ns for one in blames(times, rows)) / 1e6 / job.steps
    found = diagnose(trace)
    assert blamed_ms / world_size == pytest.approx(waited_ms(found), abs=1e-6)
    reported_ms = sum(one.blame_ms for one in found.stragglers) * (world_size - 1)
    assert reported_ms <= blamed_ms + 1e-6


@pytest.mark.parametrize(("world_size", "seeds"), [(2, 60), (4, 30), (8, 12)])
@pytest.mark.parametrize(("steps", "noise"), [(3, 0.04), (10, 0.05), (20, 0.08)])
def test_equal_workers_are_never_accused(world_size: int, seeds: int, steps: int, noise: float) -> None:
    for seed in range(seeds):
        job = SyntheticJob(world_size=world_size, steps=steps, forward_ms=20.0, backward_ms=40.0, seed=seed)
        found = diagnose(noisy_trace(job, noise))
        assert standing(found) == []
        assert found.verdict.startswith("Nothing stands out: ")


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_slow_one_among_noisy_workers_is_accused(world_size: int) -> None:
    for seed in range(5):
        slow = {(1, "backward"): 15.0}
        job = SyntheticJob(
            world_size=world_size, steps=20, forward_ms=20.0, backward_ms=40.0, seed=seed, slow=slow
        )
        found = diagnose(noisy_trace(job, 0.05))
        assert standing(found) == ["straggler"]
        assert found.findings[0].ranks == (1,)


def test_what_happens_once_is_no_imbalance() -> None:
    once = (Extra(0, "forward", 200.0, (2,)), Extra(1, "forward", 1.0, (3,)))
    assert standing(found_in(replace(EXACT, steps=6, bucket_bytes=(4,), extras=once))) != ["moving_imbalance"]
