"""Stalls in single steps: who, how often, where in the step, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis.truth import JOB, found_in, only_finding, planted_ms, standing
from tests.exhaustive import examples
from tests.synthetic import Extra, SyntheticJob

from headway.diagnosis.stragglers import CAUSES

EVERY_5TH = range(2, 30, 5)


def stalled(*extras: Extra, **job: object) -> SyntheticJob:
    return replace(JOB, extras=extras, **job)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("forward", "in its forward"),
        ("backward", "in its backward"),
        ("input", "in its input"),
        ("optimizer", "in its optimizer"),
        ("rest", "outside of its passes"),
    ],
)
def test_every_nth_step(part: str, says: str, world_size: int) -> None:
    slow = world_size // 2
    job = stalled(Extra(slow, part, 25.0, EVERY_5TH), world_size=world_size)
    finding = only_finding(found_in(job), "stalls")
    assert finding.ranks == (slow,)
    assert finding.sentence.startswith("Every 5th step takes 2")
    assert f"because rank {slow} stalls {says}" in finding.sentence
    assert ("the others wait for it" in finding.sentence) == (world_size > 1)
    assert finding.cost_ms == pytest.approx(planted_ms(job, extras=()), rel=0.1)


def test_a_hiccup_between_them_leaves_them_regular() -> None:
    job = stalled(Extra(2, "rest", 60.0, EVERY_5TH), Extra(1, "forward", 10.0, (9,)))
    finding = only_finding(found_in(job), "stalls")
    assert finding.ranks == (2,)
    assert finding.sentence.startswith("Every 5th step takes ")


@pytest.mark.parametrize(
    "steps", [(3, 4, 17, 28), (11, 12, 13), (1, 6, 11), (19, 24, 29), (0, 15), (2, 7, 12, 18, 22, 27)]
)
def test_irregular_ones_are_counted(steps: tuple[int, ...]) -> None:
    job = stalled(Extra(2, "forward", 60.0, steps))
    finding = only_finding(found_in(job), "stalls")
    assert finding.sentence.startswith(f"{len(steps)} of the recorded steps take ")
    assert finding.cost_ms == pytest.approx(planted_ms(job, extras=()), rel=0.1)


@pytest.mark.parametrize("step", [0, 15, 29])
def test_a_single_one(step: int) -> None:
    job = stalled(Extra(2, "rest", 90.0, (step,)))
    finding = only_finding(found_in(job), "stalls")
    assert finding.sentence.startswith("1 of the recorded steps takes ")
    assert finding.ranks == (2,)


def test_all_ranks_at_once() -> None:
    job = stalled(*(Extra(rank, "rest", 50.0, range(4, 30, 10)) for rank in range(4)))
    finding = only_finding(found_in(job), "stalls")
    assert finding.ranks == (0, 1, 2, 3)
    assert "because every rank stalls outside of its passes: " in finding.sentence
    assert finding.cost_ms == pytest.approx(planted_ms(job, extras=()), rel=0.1)


def test_some_ranks_at_once() -> None:
    job = stalled(*(Extra(rank, "rest", 50.0, range(4, 30, 10)) for rank in (1, 3)))
    finding = only_finding(found_in(job), "stalls")
    assert finding.ranks == (1, 3)
    assert (
        "because ranks 1, 3 stall outside of their passes, and the others wait for them: " in finding.sentence
    )


@pytest.mark.parametrize(
    ("pause", "advice"),
    [("garbage collection", "gc.freeze"), ("torch.save", "save checkpoints"), ("x", "check")],
)
@pytest.mark.parametrize("part", ["backward", "rest", "input"])
def test_a_pause_is_named_wherever_it_falls(part: str, pause: str, advice: str) -> None:
    finding = only_finding(found_in(stalled(Extra(1, part, 25.0, EVERY_5TH, pause))), "stalls")
    assert f"rank 1 stalls in {pause}, and" in finding.sentence
    assert advice in finding.sentence


def test_a_pause_of_every_step_is_not_what_stalls() -> None:
    job = stalled(Extra(1, "rest", 30.0, range(30), "logging"), Extra(1, "input", 25.0, EVERY_5TH))
    finding = next(one for one in found_in(job).findings if one.cause == "stalls")
    assert "in its input" in finding.sentence


def test_a_garbage_collection_while_input_is_waited_for_is_not_the_input() -> None:
    for job in (
        stalled(*(Extra(rank, "input", 150.0, EVERY_5TH, "garbage collection") for rank in range(4))),
        stalled(*(Extra(rank, "input", 12.0, range(30), "garbage collection") for rank in range(4))),
    ):
        found = found_in(job)
        assert "input" not in standing(found)
        assert len(standing(found)) == 1
        assert "garbage collection" in found.verdict
        assert "gc.freeze" in found.verdict
    assert found.verdict.startswith("Time outside of the training passes")


def test_at_least_eight_steps_tell_what_is_usual() -> None:
    extra = Extra(1, "rest", 90.0, (3,))
    assert standing(found_in(stalled(extra, steps=8))) == ["stalls"]
    found = found_in(stalled(extra, steps=7))
    assert standing(found) == ["straggler"]
    assert found.verdict.startswith("Rank 1 is a straggler")


@pytest.mark.parametrize(("every", "stalls"), [(2, False), (3, True)])
def test_what_happens_in_more_than_a_third_of_the_steps_is_no_stall(every: int, stalls: bool) -> None:
    found = found_in(stalled(Extra(3, "forward", 25.0, range(0, 30, every))))
    finding = only_finding(found, "stalls" if stalls else "straggler")
    assert finding.ranks == (3,)


def test_ranks_that_stall_in_turns_do_not_stall() -> None:
    extras = (Extra(rank, "forward", 25.0, range(rank, 30, 4)) for rank in range(4))
    assert standing(found_in(stalled(*extras))) == ["moving_imbalance"]


def test_a_stall_while_others_are_waited_for_costs_nothing() -> None:
    job = stalled(Extra(1, "forward", 30.0, EVERY_5TH), slow={(3, "forward"): 45.0})
    assert planted_ms(job, extras=()) == pytest.approx(0, abs=0.5)
    found = found_in(job)
    assert standing(found) == ["straggler"]
    stalls = next(one for one in found.findings if one.cause == "stalls")
    assert stalls.cost_ms < 1


def test_small_ones_are_not_told() -> None:
    found = found_in(stalled(Extra(1, "rest", 9.0, (7, 20))))
    assert standing(found) == []
    assert [one.cause for one in found.findings if one.cause == "stalls"] == ["stalls"]


def test_rest_of_all_steps_is_told_beside_them() -> None:
    job = stalled(Extra(1, "rest", 60.0, EVERY_5TH), rest_ms=30.0)
    assert standing(found_in(job)) == ["rest", "stalls"]


def test_stalls_of_all_ranks_explain_the_rest_and_the_input() -> None:
    for part in ("rest", "input"):
        extras = (Extra(rank, part, 150.0, EVERY_5TH) for rank in range(4))
        assert standing(found_in(stalled(*extras))) == ["stalls"]


@settings(max_examples=examples(40), deadline=None)
@given(
    rank=st.integers(0, 3),
    part=st.sampled_from(CAUSES),
    ms=st.floats(20, 300),
    steps=st.sets(
        st.integers(0, 28), min_size=3, max_size=10
    ),  # the others pay for the last one's in the next
    jitter=st.floats(0, 0.1),
    seed=st.integers(0, 1000),
)
def test_any_planted_stalls_are_found_at_their_cost(
    rank: int, part: str, ms: float, steps: set[int], jitter: float, seed: int
) -> None:
    job = stalled(Extra(rank, part, ms, frozenset(steps)), jitter=jitter, seed=seed)
    finding = only_finding(found_in(job), "stalls")
    assert finding.ranks == (rank,)
    assert finding.cost_ms == pytest.approx(planted_ms(job, extras=()), rel=0.2, abs=0.3)
