from __future__ import annotations

from dataclasses import replace

import pytest
from tests.optimization.test_with_passes import Faster, Slower
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.optimization.explanation import Choice, Explanation, PathParts, explain, further
from headway.optimization.result import SearchResult
from headway.optimization.search import search
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    return Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))


@pytest.fixture(scope="module")
def found(replayer: Replayer) -> SearchResult:
    return search(replayer)


@pytest.fixture(scope="module")
def explained(replayer: Replayer, found: SearchResult) -> Explanation:
    said = explain(replayer, found, found.best("decoupled"))
    assert said is not None
    return said


def test_choices_lead_from_the_recorded_step_to_the_plans(
    replayer: Replayer, found: SearchResult, explained: Explanation
) -> None:
    assert explained.from_ms == replayer.recorded_step_ms
    assert explained.to_ms == found.best("decoupled").predicted_ms
    assert explained.choices[0].name == "decoupled instead of ddp"
    assert explained.choices[-1].step_ms == explained.to_ms
    saved_ms = sum(each.saved_ms for each in explained.choices)
    assert saved_ms == pytest.approx(explained.from_ms - explained.to_ms)


def test_what_a_choice_saves_is_split_over_the_critical_path(explained: Explanation) -> None:
    for choice in explained.choices:
        assert sum(choice.saved.ms.values()) == pytest.approx(choice.saved_ms, abs=1e-6)
    assert explained.after.step_ms == pytest.approx(explained.to_ms)
    assert "computation" in explained.next_bottleneck


def test_a_decoupled_plan_saves_exposed_communication_and_part_of_the_update(explained: Explanation) -> None:
    saved: dict[str, float] = {}
    for choice in explained.choices:
        for part, part_ms in choice.saved.parts_ms.items():
            saved[part] = saved.get(part, 0.0) + part_ms
    assert saved["update"] > 0, "each rank updates its share"
    assert saved["exposed communication"] > 0


def test_what_closes_half_of_the_distance_does(replayer: Replayer, found: SearchResult) -> None:
    recorded = next(each for each in found.candidates if not each.changed)
    explained = explain(replayer, found, recorded, go_further=True)
    assert explained is not None
    more = explained.further
    assert more is not None
    assert more.target_ms == pytest.approx((recorded.predicted_ms + found.bound_ms) / 2)
    assert more.bandwidth is not None
    assert f"{more.bandwidth:.2g} times the bandwidth" in more.sentence
    for factor, closes in ((more.bandwidth, True), (more.bandwidth / 1.2, False)):
        played = replayer.replay(recorded.strategy, WhatIf(bandwidth=factor))
        assert (replayer.expect(played).step_ms <= more.target_ms) == closes


def test_as_many_workers_are_said_as_come_close_enough() -> None:
    one = job(world_size=8, forward_ms=20, backward_ms=40, gbps=0.3)
    of_eight = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    recorded = next(each for each in search(of_eight).candidates if not each.changed)

    def step_ms(workers: int) -> float:
        return of_eight.expect(of_eight.replay(recorded.strategy, WhatIf(workers=workers))).step_ms

    assert step_ms(2) < step_ms(4) < recorded.predicted_ms
    target_ms = (step_ms(2) + step_ms(4)) / 2
    more = further(of_eight, recorded, bound_ms=2 * target_ms - recorded.predicted_ms)
    assert more.target_ms == pytest.approx(target_ms)
    assert more.workers == 2
    assert "2 workers" in more.sentence


def test_fewer_workers_are_not_said_to_be_of_no_use_where_a_plan_cannot_have_them(
    replayer: Replayer, found: SearchResult
) -> None:
    recorded = next(each for each in found.candidates if not each.changed)
    shares = replace(recorded, strategy=ParameterServerStrategy(shares=(1, 3)))
    more = further(replayer, shares, bound_ms=recorded.predicted_ms * 1e-6)
    assert not more.any_workers
    assert "workers" not in more.sentence


def test_the_recorded_plan_has_no_choices(replayer: Replayer, found: SearchResult) -> None:
    recorded = next(each for each in found.candidates if not each.changed)
    said = explain(replayer, found, recorded)
    assert said is not None
    assert said.choices == ()
    assert said.from_ms == said.to_ms


@pytest.mark.parametrize("strategy", ["recorded", "decoupled"])
def test_passes_are_choices_upon_the_strategy(
    replayer: Replayer, found: SearchResult, explained: Explanation, strategy: str
) -> None:
    of_strategy = explained.choices if strategy == "decoupled" else ()
    base = next(each for each in found.candidates if not each.changed)
    base = found.best("decoupled") if of_strategy else base
    passes = (Slower(factor=1.5), Faster(factor=0.5))
    played = replayer.replay(base.strategy, passes=passes)
    plan = replace(base, passes=passes, expected=replayer.expect(played), changes=("both",))
    said = explain(replayer, found, plan, go_further=True)
    assert said is not None
    assert said.choices[: len(of_strategy)] == of_strategy
    slower, faster = said.choices[len(of_strategy) :]
    assert (slower.name, faster.name) == ("slower by 1.5", "faster by 0.5"), "as they are applied"
    assert faster.saved_ms > 0 > slower.saved_ms
    assert "computation" in faster.where
    assert faster.step_ms == said.to_ms == replayer.expect(played).step_ms
    assert said.after.step_ms == pytest.approx(said.to_ms)


def test_passes_are_choices_upon_a_strategy_whose_ranks_do_not_wait(
    replayer: Replayer, found: SearchResult
) -> None:
    strategy, passes = PartialAllReduceStrategy(groups="static"), (Slower(factor=1.5), Faster(factor=0.5))
    outcome = replayer.replay_horizon(strategy, passes=passes)
    assert outcome is not None
    plan = replace(found.best(), strategy=strategy, passes=passes, expected=replayer.expect_outcome(outcome))
    said = explain(replayer, found, plan)
    assert said is not None
    assert [each.name for each in said.choices] == [
        "partial-all-reduce instead of ddp",
        "slower by 1.5",
        "faster by 0.5",
    ]
    assert said.choices[1].saved_ms < 0 < said.choices[2].saved_ms
    assert said.to_ms == pytest.approx(replayer.expect_outcome(outcome).step_ms)
    assert sum(each.saved_ms for each in said.choices) == pytest.approx(said.from_ms - said.to_ms)


def test_a_recording_that_replay_does_not_reproduce_is_explained_from_its_own_step(
    replayer: Replayer,
) -> None:
    hosts = tuple(
        host.model_copy(update={"up_gbps": 0.7 * host.up_gbps, "down_gbps": 0.7 * host.down_gbps})
        for host in replayer.cluster.hosts
    )
    slow = Replayer(replayer.trace, replayer.cluster.model_copy(update={"hosts": hosts}))
    found = search(slow)
    assert found.reproduction_error > 0.02
    best = found.best("decoupled")
    said = explain(slow, found, best)
    assert said is not None
    assert said.from_ms == slow.recorded_step_ms
    assert said.from_ms - sum(each.saved_ms for each in said.choices) == pytest.approx(best.predicted_ms)


def test_what_replay_does_not_say_is_not_explained(replayer: Replayer, found: SearchResult) -> None:
    best = found.best()
    off = replace(best, expected=replace(best.expected, step_ms=best.expected.step_ms * 1.1))
    assert explain(replayer, found, off) is None


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({("update", 0): 2.0, ("computation", 1): 1.0}, "update, most on rank 0"),
        ({("update", 0): 5.0, ("update", 1): -3.0, ("computation", 0): 0.5}, "update"),  # the path has moved
        ({("update", 0): -2.0}, ""),
    ],
)
def test_a_rank_is_named_where_the_path_stays_on_it(saved: dict[tuple[str, int], float], said: str) -> None:
    assert Choice("what", 10.0, 2.5, PathParts(saved)).where == said
