"""What tuning decides, from numbers made up for it."""

from __future__ import annotations

import math

import pytest
import torch
from tests.models import layered_model
from tests.planning.jobs import MS, PlannedJob, layered_job

from headway.graph.update_cost import UpdateCost
from headway.job import Job
from headway.plan import Plan
from headway.scheduling.buckets import BucketSchedule, GatherMode, forward_gather_order
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.data_parallel.decoupled.tuning import planned
from headway.strategies.data_parallel.decoupled.tuning.agreement import Agreement
from headway.strategies.data_parallel.decoupled.tuning.learning import numbers_of, slowest_steps
from headway.strategies.data_parallel.decoupled.tuning.planned import choose, close_ones, guesses, shortlist
from headway.strategies.data_parallel.decoupled.tuning.proposals import Candidate, Learned, Setting, Trial
from headway.strategies.data_parallel.decoupled.tuning.watch import Period


def trial(measured_ms: float, predicted_ms: float | None, gather: GatherMode = "parameters") -> Trial:
    candidate = Candidate(
        name=str(measured_ms), strategy=DecoupledStrategy(gather=gather), predicted_ms=predicted_ms
    )
    return Trial(candidate, measured_ms)


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(100, 90), trial(90, 95)], 1),
        ([trial(100, 95), trial(100.4, 90)], 1),  # a tie goes to the better predicted
        ([trial(100, 95), trial(101.1, 90)], 0),
        ([trial(100, 80, "gradients"), trial(100.4, 90)], 1),  # and to parameters before that
        ([trial(100, 80, "gradients"), trial(102, 90)], 0),
        ([trial(100.4, None), trial(100, None)], 1),
    ],
)
def test_the_fastest_stays_and_ties_go_to_the_better_predicted(trials: list[Trial], chosen: int) -> None:
    assert choose(trials) == chosen


def test_the_best_two_are_measured_again_where_they_are_close() -> None:
    far, near, best = trial(120, 1), trial(103, 1), trial(100, 1)
    assert close_ones([far, near, best]) == [best.candidate, near.candidate]
    assert close_ones([far, best]) == []
    assert close_ones([best]) == []


def test_a_candidate_survives_its_way_to_the_other_ranks() -> None:
    model = layered_model(4)
    schedule = DecoupledStrategy(bucket_cap_bytes=5000).decide(Job.of(model))
    candidate = Candidate.of("planned", schedule, model, 12.5)
    again = Candidate.model_validate_json(candidate.model_dump_json())
    assert again == candidate
    assert again.strategy.decide(Job.of(model)) == schedule
    assert not again.strategy.tune


# The shortlist ---------------------------------------------------------------------------------------


def setting_of(job: PlannedJob, in_force: BucketSchedule, forms: tuple[GatherMode, ...]) -> Setting:
    nobody = Agreement(None, torch.device("cpu"))  # type: ignore[arg-type] # planning asks nobody
    return Setting(job.model, in_force, forms, 2, nobody, Learned(job.profile, job.cluster))


def names_of(candidates: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in candidates]


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_the_shortlist_holds_what_is_in_force_the_planned_and_fixed_caps(gather: GatherMode) -> None:
    job = layered_job([200_000] * 12)
    in_force = DecoupledStrategy(gather=gather).decide(Job.of(job.model))
    setting = setting_of(job, in_force, (gather,))
    assert setting.learned is not None
    found = shortlist(setting, setting.learned)
    assert names_of(found) == ["in force", *["planned"] * (len(found) - 3), "fixed cap", "fixed cap"]
    assert 1 <= names_of(found).count("planned") <= planned.MOST_PLANNED
    schedules = [candidate.strategy.decide(Job.of(job.model)) for candidate in found]
    assert schedules[0] == in_force
    assert len(set(schedules)) == len(schedules)
    assert {schedule.gather for schedule in schedules} == {gather}
    predicted = [candidate.predicted_ms for candidate in found if candidate.predicted_ms is not None]
    assert len(predicted) == len(found)
    assert min(predicted) == min(c.predicted_ms or math.inf for c in found if c.name == "planned")


def test_another_form_is_tried_only_where_it_promises_enough() -> None:
    job = layered_job(
        [400_000] * 8, communication=1.5, optimizer_ms=80.0
    )  # a share of the update is much faster
    in_force = DecoupledStrategy(gather="gradients").decide(Job.of(job.model))
    setting = setting_of(job, in_force, ("gradients", "parameters"))
    assert setting.learned is not None
    forms = {candidate.strategy.gather for candidate in shortlist(setting, setting.learned)}
    assert forms == {"gradients", "parameters"}

    job = layered_job([4_000] * 8, communication=0.01, optimizer_ms=0.0, overhead_us=1.0)  # nothing to gain
    for home in ("parameters", "gradients"):
        in_force = DecoupledStrategy(gather=home).decide(Job.of(job.model))
        setting = setting_of(job, in_force, ("parameters", "gradients"))
        assert setting.learned is not None
        assert {c.strategy.gather for c in shortlist(setting, setting.learned)} == {home}


def test_without_anything_learned_caps_are_tried() -> None:
    job = layered_job([200_000] * 12)
    in_force = DecoupledStrategy().decide(Job.of(job.model))
    found = guesses(setting_of(job, in_force, ("parameters",)))
    assert found[0].strategy.decide(Job.of(job.model)) == in_force
    assert len(found) >= len(planned.GUESSED_SHARES)
    assert all(candidate.predicted_ms is None for candidate in found)


# What is learned -------------------------------------------------------------------------------------


def period(scale: int = 1, *, disturbed: bool = False) -> Period:
    """Two layers: forward of 10 ms, 1 ms between, backward of 20 ms, 2 ms to the step's end, 3 ms of rest."""
    moments = {"begin": 0, "middle": 4, "forward_end": 10, "backward": 11, "first": 18, "last": 31}
    moments |= {"step": 33, "end": 36}
    at = {name: 5 * MS + moment * MS * scale for name, moment in moments.items()}
    return Period(
        begin=at["begin"], cpu_begin=0, forward_end=at["forward_end"], backward=at["backward"],
        step=at["step"], step_end=at["step"], end=at["end"], busy=0.25, disturbed=disturbed,
        needs={"": at["begin"], "layer0": at["begin"], "layer1": at["middle"]},
        ready={"layer1.weight": at["first"], "layer1.bias": at["first"],
               "layer0.weight": at["last"], "layer0.bias": at["last"]},
    )  # fmt: skip


def test_watched_steps_become_the_profile_of_the_slowest_rank() -> None:
    model = layered_model(2)
    cost = UpdateCost(1000.0, 4e6)
    quick = numbers_of([period(), period(), period(9)], cost, model)
    slow = numbers_of([period(2), period(2), period(50, disturbed=True)], cost, model)
    steps = slowest_steps([quick, slow], model)
    assert steps is not None
    profile = steps.profile
    assert (profile.forward_ns, profile.between_ns, profile.backward_ns) == (20 * MS, 2 * MS, 40 * MS)
    assert (profile.tail_ns, profile.rest_ns, profile.optimizer_ns) == (4 * MS, 6 * MS, 4 * MS)
    assert profile.needs_ns == {"layer0": 0, "layer1": 8 * MS}
    assert profile.ready_ns["layer1.bias"] == 14 * MS
    assert profile.ready_ns["layer0.bias"] == 40 * MS
    assert (steps.update_overhead_ns, steps.busy) == (1000.0, 0.25)


def test_a_module_that_is_never_called_is_needed_with_the_one_around_it() -> None:
    model = layered_model(2)
    seen = period()
    del seen.needs["layer1"]
    steps = slowest_steps([numbers_of([seen], UpdateCost(), model)], model)
    assert steps is not None
    assert steps.profile.needs_ns == {"layer0": 0, "layer1": 0}


def test_a_rank_that_saw_no_step_ends_it() -> None:
    model = layered_model(2)
    nothing, some = numbers_of([], UpdateCost(), model), numbers_of([period()], UpdateCost(), model)
    assert len(nothing) == len(some)
    assert slowest_steps([some, nothing], model) is None


# The option ------------------------------------------------------------------------------------------


def test_the_option_is_part_of_a_plan_and_survives_spelling_out() -> None:
    model = layered_model(4)
    strategy = DecoupledStrategy(bucket_cap_bytes=5000, tune=True)
    assert "tuned while training" in strategy.describe()
    assert "tuned" not in DecoupledStrategy().describe()
    spelled = strategy.spelled_out(Job.of(model))
    assert spelled.tune
    assert spelled.decide(Job.of(model)) == strategy.decide(Job.of(model))
    plan = Plan.data_parallel(spelled, 2, model)
    assert Plan.model_validate(plan.model_dump(mode="json")).strategy == spelled
    assert forward_gather_order(model, spelled.decide(Job.of(model)).buckets) == spelled.gather_order
