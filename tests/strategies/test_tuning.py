"""What tuning decides, from numbers made up for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.models import layered_model
from tests.planning.jobs import MS
from tests.strategies.test_shortlist import SMALLER, STOCK, guessed, large_question

from headway.graph.step_layout import UpdateCost
from headway.job import Job
from headway.plan import Plan
from headway.scheduling.buckets import GatherMode, forward_gather_order
from headway.strategies.adaptive import shortlist
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.adaptive.proposals import Trial, Tuned
from headway.strategies.adaptive.proposer import PlannedProposer
from headway.strategies.adaptive.shortlist import (
    choose,
    close_ones,
    undecided,
)
from headway.strategies.candidates import OTHER_FORM, Candidate
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.learning import Period, numbers_of, slowest_steps
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.shortlist import candidate as candidate_of
from headway.strategies.parameter_server.policy import ParameterServerStrategy


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


# Stock DDP -----------------------------------------------------------------------------------------------

SMALLEST = DistributedDataParallelStrategy(bucket_cap_mb=0.3)


def stock(
    measured_ms: float,
    uncertainty_ms: float = math.inf,
    strategy: DistributedDataParallelStrategy = STOCK,
) -> Trial:
    return Trial(Candidate(name="stock DDP", strategy=strategy), measured_ms, uncertainty_ms)


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(100, 90), stock(95), trial(98, 90)], 1),
        ([trial(100, 90), stock(110), trial(98, 90)], 2),
        ([trial(100, 90), stock(98.2), trial(98, 90)], 1),  # as fast as stock DDP is no reason to leave it
        ([trial(100, 90), stock(100)], 1),
        ([stock(100), trial(99.4, 90)], 1),
        ([stock(100)], 0),
        ([trial(100, 90), stock(110), stock(95, strategy=SMALLER)], 2),
        (
            [trial(100, 90), stock(95.2), stock(95, strategy=SMALLER)],
            1,
        ),  # the script's own buckets are as good
        ([trial(90, 90), stock(110), stock(95, strategy=SMALLER)], 0),
    ],
)
def test_stock_ddp_stays_unless_ours_is_measured_to_be_faster(trials: list[Trial], chosen: int) -> None:
    assert choose(trials) == chosen


def test_stock_ddp_is_measured_again_between_ours_where_it_is_close() -> None:
    first, second, far = trial(100, 1), trial(103, 1), trial(120, 1)
    near = stock(104)
    assert close_ones([far, second, near, first]) == [first.candidate, near.candidate, second.candidate]
    assert close_ones([far, near, first]) == [first.candidate, near.candidate]
    assert close_ones([stock(97), first]) == [stock(97).candidate, first.candidate][::-1]
    slow = stock(110)  # perhaps disturbed
    assert close_ones([slow, second, first]) == [first.candidate, slow.candidate, second.candidate]
    assert close_ones([stock(90), first, far]) == []


def test_other_buckets_of_stock_ddp_are_measured_again_where_it_may_be_the_best() -> None:
    own, smaller, smallest = stock(100), stock(103, strategy=SMALLER), stock(104, strategy=SMALLEST)
    ours = trial(98, 1)
    assert close_ones([own, ours, smallest, smaller]) == [each.candidate for each in (ours, own, smaller)]
    assert close_ones([own, trial(120, 1), smaller]) == [own.candidate, smaller.candidate]
    assert close_ones([own, trial(90, 1), smaller]) == [trial(90, 1).candidate, own.candidate]
    assert close_ones([own, stock(110, strategy=SMALLER)]) == []


@pytest.mark.parametrize(
    ("smaller_ms", "tried"),
    [
        (110.0, [STOCK, SMALLER]),
        (95.0, [STOCK, SMALLER, SMALLEST]),
        (102.0, [STOCK, SMALLER, SMALLEST]),  # which says nothing
    ],
)
def test_no_smaller_buckets_are_tried_once_they_are_slower(
    smaller_ms: float, tried: list[DistributedDataParallelStrategy]
) -> None:
    proposer = PlannedProposer()
    proposer._left = [stock(0, strategy=each).candidate for each in (STOCK, SMALLER, SMALLEST)]
    found: list[DistributedDataParallelStrategy] = []
    while (candidate := proposer.propose()) is not None:
        assert isinstance(candidate.strategy, DistributedDataParallelStrategy)
        found.append(candidate.strategy)
        times_ms = (100.0, smaller_ms, 90.0)
        proposer.tell(candidate, times_ms[(STOCK, SMALLER, SMALLEST).index(found[-1])])
    assert list(dict.fromkeys(found)) == tried


@pytest.mark.parametrize(("smaller_ms", "tried"), [(98.0, 2), (94.0, 3), (76.0, 3)])
def test_where_others_are_far_ahead_other_buckets_have_to_gain_something(
    smaller_ms: float, tried: int
) -> None:
    every, ours = (STOCK, SMALLER, SMALLEST), trial(99, 1).candidate
    proposer = PlannedProposer()
    proposer._left = [ours, *(stock(0, strategy=each).candidate for each in every)]
    found = []
    while (candidate := proposer.propose()) is not None:
        found.append(candidate.strategy)
        own = isinstance(candidate.strategy, DistributedDataParallelStrategy)
        proposer.tell(candidate, (100.0, smaller_ms, 90.0)[every.index(candidate.strategy)] if own else 80.0)
    assert len(set(found) & set(every)) == tried


def test_the_scripts_own_buckets_may_be_as_large_as_those_in_force() -> None:
    named, own = (DistributedDataParallelStrategy(bucket_cap_mb=each) for each in (25, None))
    proposer = PlannedProposer()
    proposer._left = [stock(0, strategy=each).candidate for each in (named, own)]
    for each in (named, own):
        candidate = proposer.propose()
        assert candidate is not None and candidate.strategy == each  # noqa: PT018 - for the type checker
        proposer.tell(candidate, 100.0)


LARGER, LARGEST = (DistributedDataParallelStrategy(bucket_cap_mb=cap_mb) for cap_mb in (40, 128))


@pytest.mark.parametrize(("larger_ms", "tried"), [(105.0, 3), (95.0, 4)])
def test_larger_buckets_are_a_way_of_their_own(larger_ms: float, tried: int) -> None:
    every = (STOCK, SMALLER, LARGER, LARGEST)
    proposer = PlannedProposer()
    proposer._left = [stock(0, strategy=each).candidate for each in every]
    found = []
    while (candidate := proposer.propose()) is not None:
        found.append(candidate.strategy)
        proposer.tell(candidate, (100.0, 105.0, larger_ms, 90.0)[every.index(found[-1])])
    assert list(dict.fromkeys(found)) == list(every[:tried])


@pytest.mark.parametrize(
    ("share", "others"), [(2, (6, 12, 32)), (20, (32, 12, 6)), (50, (32, 12, 6)), (32, (12, 6))]
)
def test_stock_ddp_is_tried_with_smaller_and_larger_buckets(share: int, others: tuple[int, ...]) -> None:
    question = large_question()
    size_bytes = question.model.size_bytes
    own = DistributedDataParallelStrategy(bucket_cap_mb=size_bytes // share / 2**20)
    caps = [
        each.strategy.bucket_cap_mb
        for each in guessed(replace(question, stock=own))
        if isinstance(each.strategy, DistributedDataParallelStrategy)
    ]
    assert caps == [own.bucket_cap_mb, *(size_bytes // each / 2**20 for each in others)]


def test_buckets_that_are_left_out_do_not_end_it_before_what_is_close_was_measured_again() -> None:
    proposer, ours = PlannedProposer(), trial(99, 1).candidate
    proposer._left = [ours, *(stock(0, strategy=each).candidate for each in (STOCK, SMALLER, SMALLEST))]
    found = []
    while (candidate := proposer.propose()) is not None:
        found.append(candidate)
        # In the second and third turn ours is not faster any more.
        proposer.tell(candidate, 105.0 if not candidate.is_stock or candidate.strategy == SMALLER else 100.0)
    own, smaller = (stock(0, strategy=each).candidate for each in (STOCK, SMALLER))
    assert found[:5] == [ours, own, smaller, ours, own]


@pytest.mark.parametrize(
    ("two_channels_ms", "stock_ms", "tried"),
    [(90.0, 100.0, [2]), (110.0, 120.0, [1]), (90.0, 80.0, [])],
)
def test_the_other_form_is_tried_with_the_channels_that_proved_best(
    two_channels_ms: float, stock_ms: float, tried: list[int]
) -> None:
    def candidate(name: str, gather: GatherMode, channels: int) -> Candidate:
        return Candidate(
            name=name, strategy=DecoupledStrategy(gather=gather, channels=channels), predicted_ms=1
        )

    proposer = PlannedProposer()
    one, two = (candidate("planned", "parameters", channels) for channels in (1, 2))
    others = [candidate(OTHER_FORM, "gradients", channels) for channels in (1, 2)]
    times_ms = {one: 100.0, two: two_channels_ms, stock(0).candidate: stock_ms}
    proposer._left = [*times_ms, *others]
    found: list[Candidate] = []
    while (each := proposer.propose()) is not None and len(found) < 20:
        found.append(each)
        proposer.tell(each, times_ms.get(each, 70.0))
    strategies: list[Any] = [each.strategy for each in dict.fromkeys(found) if each in others]
    assert [strategy.channels for strategy in strategies] == tried
    assert len(found) < 20


def test_what_repeated_measurements_have_not_parted_is_no_reason_to_leave_stock_ddp() -> None:
    faster = replace(trial(97, 1), uncertainty_ms=2.0)
    assert choose([faster, stock(100, 2.5)]) == 1
    assert choose([faster, stock(100, 1.0)]) == 0
    assert choose([faster, stock(100)]) == 0, "no measurement again was asked for"


def test_what_was_measured_once_does_not_win_a_tie_against_what_was_measured_again() -> None:
    again = replace(trial(100, 95), uncertainty_ms=2.0)
    once = trial(100.4, 90)
    assert choose([again, once, stock(101, 3.0)]) == 2, "what was measured again is not known to be faster"
    assert choose([again, once, stock(110, 3.0)]) == 0
    assert choose([again, once]) == 0


def test_stock_ddp_that_was_measured_again_goes_before_what_was_measured_once() -> None:
    own, smaller = (stock(103, 2.0, strategy=each) for each in (STOCK, SMALLER))
    once = stock(102, strategy=SMALLEST)
    assert choose([trial(120, 1), own, smaller, once]) == 1
    assert choose([own, replace(smaller, measured_ms=101), once]) == 1


def test_what_repeated_measurements_have_not_parted_is_measured_again() -> None:
    ours = replace(trial(100, 1), uncertainty_ms=2.0)
    assert undecided([ours, stock(101, 2.0)]) == [ours.candidate, stock(1).candidate]
    assert undecided([ours, stock(103, 2.0)]) == []
    assert undecided([ours, trial(100, 1)]) == []
    assert undecided([ours, stock(110, math.inf)]) == []


def test_a_trial_knows_how_far_its_measurements_are_apart() -> None:
    candidate = trial(1, 1).candidate
    assert Trial.of(candidate, [10.0]) == Trial(candidate, 10.0, math.inf)
    again = Trial.of(candidate, [10.0, 12.0])
    assert again.measured_ms == 11
    assert again.uncertainty_ms == pytest.approx(2)


@pytest.mark.parametrize(
    ("stock_ms", "ours_ms", "chosen", "said"),
    [
        (412.0, 423.0, 1, "stock DDP was faster: 412 against 423 ms"),
        (423.0, 412.0, 0, "faster than stock DDP: 412 against 423 ms"),
        (412.3, 412.0, 1, "stock DDP is as fast: 412.3 against 412 ms"),
    ],
)
def test_the_decision_says_how_stock_ddp_compared(
    stock_ms: float, ours_ms: float, chosen: int, said: str
) -> None:
    candidates = trial(ours_ms, 1).candidate, stock(stock_ms).candidate
    tuned = Tuned(candidates[chosen].strategy, candidates, (ours_ms, stock_ms), chosen, 40)
    assert said in tuned.describe()
    entry = tuned.entry(40, "what was there")
    assert entry.reason == f"tuned in 40 steps; {said}"
    assert (entry.order, entry.measured_ms) == (candidates[chosen].strategy.describe(), min(stock_ms, ours_ms)
                                                if chosen == 0 or stock_ms < ours_ms else stock_ms)  # fmt: skip
    assert entry.switches


def test_a_candidate_survives_its_way_to_the_other_ranks() -> None:
    model = layered_model(4)
    schedule = DecoupledStrategy(bucket_cap_bytes=5000).decide(Job.of(model))
    candidate = candidate_of("planned", schedule, model, 12.5)
    again = Candidate.model_validate_json(candidate.model_dump_json())
    assert again == candidate
    assert again.strategy.decide(Job.of(model)) == schedule
    assert isinstance(again.strategy, DecoupledStrategy)
    stock = Candidate(name="stock DDP", strategy=DistributedDataParallelStrategy(bucket_cap_mb=12.5))
    assert Candidate.model_validate_json(stock.model_dump_json()) == stock
    assert stock.is_stock
    assert not again.is_stock


def test_servers_stay_only_where_they_are_faster_than_what_needs_less_memory() -> None:
    servers = Candidate(name="servers", strategy=ParameterServerStrategy())
    assert shortlist.choose([Trial(servers, 100.0), trial(100.2, 90.0)]) == 1
    assert shortlist.choose([Trial(servers, 100.0), trial(102.0, 90.0)]) == 0
    assert shortlist.choose([stock(100.0), Trial(servers, 99.9)]) == 0


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
    strategy = AdaptiveStrategy(begin_as=DecoupledStrategy(bucket_cap_bytes=5000))
    assert "tuned while training" in strategy.describe()
    assert "tuned" not in DecoupledStrategy().describe()
    spelled = strategy.spelled_out(Job.of(model))
    assert spelled.tune
    assert spelled.decide(Job.of(model)) == strategy.decide(Job.of(model))
    plan = Plan.data_parallel(spelled, 2, model)
    assert Plan.model_validate(plan.model_dump(mode="json")).strategy == spelled
    begins_as = spelled.begin_as
    assert isinstance(begins_as, DecoupledStrategy)
    assert forward_gather_order(model, begins_as.decide(Job.of(model)).buckets) == begins_as.gather_order
