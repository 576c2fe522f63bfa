"""What tuning finds worth a measurement, from jobs made up for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.planning.jobs import MS, PlannedJob, layered_job, replayed_ns

from headway.cluster import Host
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule, GatherMode
from headway.strategies.adaptive.shortlist import shortlist
from headway.strategies.candidates import Candidate, Learned, Question
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled import shortlist as planned
from headway.strategies.decoupled.planner import search
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import LEAST_PIECE_MB, ParameterServerStrategy
from headway.strategies.parameter_server.shares import shares_on, worth_trying

STOCK = DistributedDataParallelStrategy()
SMALLER = DistributedDataParallelStrategy(bucket_cap_mb=1)


def question_of(job: PlannedJob, in_force: BucketSchedule, forms: tuple[GatherMode, ...]) -> Question:
    return Question(job.model, in_force, forms, 2, Learned(job.profile, job.cluster))


def guessed(question: Question) -> list[Candidate]:
    return shortlist(replace(question, learned=None))


def servers_for(question: Question) -> list[ParameterServerStrategy]:
    servers = [each.strategy for each in worth_trying(question)]
    assert all(isinstance(each, ParameterServerStrategy) for each in servers)
    return [each for each in servers if isinstance(each, ParameterServerStrategy)]


def large_question() -> Question:
    job = layered_job([20_000] * 40)
    asked = question_of(job, DecoupledStrategy().decide(Job.of(job.model)), ("parameters",))
    return replace(asked, stock=STOCK)


def schedules_of(candidates: list[Candidate], job: PlannedJob) -> list[Any]:
    return [candidate.strategy.decide(Job.of(job.model)) for candidate in candidates]


def names_of(candidates: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in candidates]


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_the_shortlist_holds_what_is_in_force_the_planned_and_fixed_caps(gather: GatherMode) -> None:
    job = layered_job([200_000] * 12)
    in_force = DecoupledStrategy(gather=gather).decide(Job.of(job.model))
    question = question_of(job, in_force, (gather,))
    assert question.learned is not None
    found = shortlist(question)
    assert names_of(found) == ["in force", *["planned"] * (len(found) - 3), "fixed cap", "fixed cap"]
    assert 1 <= names_of(found).count("planned") <= planned.MOST_PLANNED
    schedules = schedules_of(found, job)
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
    question = question_of(job, in_force, ("gradients", "parameters"))
    assert question.learned is not None
    forms = {schedule.gather for schedule in schedules_of(shortlist(question), job)}
    assert forms == {"gradients", "parameters"}

    job = layered_job([4_000] * 8, communication=0.01, optimizer_ms=0.0, overhead_us=1.0)  # nothing to gain
    for home in ("parameters", "gradients"):
        in_force = DecoupledStrategy(gather=home).decide(Job.of(job.model))
        question = question_of(job, in_force, ("parameters", "gradients"))
        assert question.learned is not None
        assert {s.gather for s in schedules_of(shortlist(question), job)} == {home}


@pytest.mark.parametrize(
    ("parameters_ms", "tried"), [((95.0, 89.9), [1]), ((99.9, 91.0), []), ((95.0, 80.0), [1, 2])]
)
def test_the_other_form_is_a_candidate_where_it_promises_more_with_as_many_channels(
    parameters_ms: tuple[float, float], tried: list[int]
) -> None:
    job = layered_job([4_000] * 8)
    one = DecoupledStrategy(gather="gradients").decide(Job.of(job.model))
    forms: tuple[tuple[GatherMode, tuple[float, float]], ...] = (
        ("gradients", (100.0, 90.0)), ("parameters", parameters_ms)
    )  # fmt: skip
    rows = [
        search.PlannedSchedule(replace(one, gather=form, channels=channels), ms * MS)
        for form, own in forms
        for channels, ms in enumerate(own, start=1)
    ]
    found = search.Planned(tuple(sorted(rows, key=lambda each: each.step_ns)), len(rows))
    assert sorted(each.channels for each in planned._of_other_form(found, "gradients")) == tried


@pytest.mark.parametrize("stock_in_force", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_stock_ddp_is_among_the_first_that_are_tried(learns: bool, stock_in_force: bool) -> None:
    job = layered_job([200_000] * 12)
    in_force = DecoupledStrategy().decide(Job.of(job.model))
    question = replace(
        question_of(job, in_force, ("parameters",)),
        stock=STOCK,
        on_stock_ddp=STOCK if stock_in_force else None,
    )
    assert question.learned is not None
    found = shortlist(question) if learns else guessed(question)
    assert names_of(found)[:2] == (["in force", "before"] if stock_in_force else ["in force", "stock DDP"])
    assert [c.strategy.bucket_cap_mb for c in found if isinstance(c.strategy, DistributedDataParallelStrategy)] == [
        None, *(job.model.size_bytes // share / 2**20 for share in (6, 12, 32)),
    ]  # fmt: skip
    assert found[0 if stock_in_force else 1].is_stock
    assert found[1 if stock_in_force else 0].strategy.decide(Job.of(job.model)) == in_force


def serving_question(
    rates_gbps: Sequence[float], begun: ParameterServerStrategy | None = None, *, may_serve: bool = True
) -> Question:
    """Of a job on hosts of such rates, where ``begun`` is in force."""
    job = layered_job([200_000] * 12)
    question = question_of(job, DecoupledStrategy().decide(Job.of(job.model)), ("parameters",))
    assert question.learned is not None
    hosts = tuple(
        Host(name=f"host{n}", workers=1, up_gbps=each, down_gbps=each) for n, each in enumerate(rates_gbps)
    )
    learned = replace(question.learned, cluster=question.learned.cluster.model_copy(update={"hosts": hosts}))
    return replace(question, learned=learned, stock=STOCK, on_stock_ddp=begun, may_serve=may_serve)


def test_servers_are_tried_where_links_are_unequal() -> None:
    question = serving_question([1, 1, 1, 0.4])
    assert question.learned is not None
    found = [each for each in shortlist(question) if each.name == "servers"]
    strategies = [each.strategy for each in found]
    assert all(isinstance(each, ParameterServerStrategy) for each in strategies)
    assert len(strategies) == 2
    for each in strategies:
        assert isinstance(each, ParameterServerStrategy)
        assert each.shares == shares_on(question.learned.cluster)
        assert each.shares[3] < min(each.shares[:3])
        assert each.bucket_cap_mb / each.pieces >= LEAST_PIECE_MB
    assert all(each.predicted_ms is None and not each.is_stock for each in found)
    assert servers_for(serving_question([1, 1, 1, 1])) == []
    assert servers_for(serving_question([1, 1, 1, 0.4], may_serve=False)) == []
    assert servers_for(replace(question, learned=None)) == []


def test_servers_in_force_are_tried_with_other_shares() -> None:
    begun = ParameterServerStrategy(bucket_cap_mb=2, channels=1)
    first, *others = servers_for(serving_question([1, 1, 1, 0.4], begun))
    assert (first.bucket_cap_mb, first.channels) == (2, 1)
    assert {each.shares for each in (first, *others)} == {first.shares}
    assert servers_for(serving_question([1, 1, 1, 0.4], first)) == others  # not those in force again
    assert servers_for(serving_question([1, 1, 1, 1], first)) == [begun]
    assert servers_for(serving_question([1, 1, 1, 1], begun)) == []


def test_servers_in_force_come_first_and_stock_ddp_is_among_the_others() -> None:
    begun = ParameterServerStrategy(bucket_cap_mb=2)
    question = serving_question([1, 1, 1, 1], begun)
    assert question.learned is not None
    found = shortlist(question)
    assert names_of(found)[:3] == ["in force", "before", "stock DDP"]
    assert (found[0].strategy, found[2].strategy) == (begun, STOCK)


def test_without_anything_learned_caps_are_tried() -> None:
    job = layered_job([200_000] * 12)
    in_force = DecoupledStrategy().decide(Job.of(job.model))
    found = guessed(question_of(job, in_force, ("parameters",)))
    assert found[0].strategy.decide(Job.of(job.model)) == in_force
    assert len(found) >= len(planned.GUESSED_SHARES)
    assert all(candidate.predicted_ms is None for candidate in found)


def test_the_scripts_own_buckets_stay_a_candidate_where_smaller_ones_are_in_force() -> None:
    question = replace(large_question(), stock=SMALLER, on_stock_ddp=SMALLER, script_stock=STOCK)
    found = [each.strategy for each in guessed(question) if each.is_stock]
    assert found[:2] == [SMALLER, STOCK]
    plain = guessed(replace(question, script_stock=SMALLER))
    assert next(each.strategy for each in plain if each.is_stock) == SMALLER
    assert STOCK not in [each.strategy for each in plain]


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_where_cores_are_shared_a_step_is_predicted_that_is_slowed_down(gather: GatherMode) -> None:
    still = layered_job([200_000] * 12, communication=0.6)
    job = replace(still, cluster=still.cluster.model_copy(update={"compute_slowdown": 0.4}))
    in_force = DecoupledStrategy(bucket_cap_bytes=10**9, gather=gather).decide(Job.of(job.model))
    assert (
        len(in_force.buckets) == 1
    )  # which disturbs backward by nothing, so that what was seen is undisturbed
    question = question_of(job, in_force, (gather,))
    assert question.learned is not None
    found = shortlist(question)
    for schedule, each in zip(schedules_of(found, job), found, strict=True):
        assert each.predicted_ms == pytest.approx(replayed_ns(job, schedule) / MS, rel=0.04)
    predicted = {each.predicted_ms or math.inf: each.name for each in reversed(found)}
    assert predicted[min(predicted)] == "planned"
    quiet = question_of(still, in_force, (gather,))
    assert quiet.learned is not None
    best, best_quiet = (
        min(each.predicted_ms for each in candidates if each.predicted_ms is not None)
        for candidates in (found, shortlist(quiet))
    )
    assert best > 1.05 * best_quiet
