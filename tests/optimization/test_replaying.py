"""What a search leaves out, and when it stops."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.optimization.result import SearchResult
from headway.optimization.search import Evaluation, replay_all, search
from headway.replayer.replayer import Replayer
from headway.strategies.decoupled.planner.search import plan
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.time_limit import TimeLimit, limited

MANY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def replayer_of(**changes: object) -> Replayer:
    one = job(**changes)
    return Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))


def best_of_each(found: SearchResult) -> dict[str, str]:
    return {name: found.best(name).name for name in {each.strategy.name for each in found.candidates}}


@settings(MANY, max_examples=examples(12))
@given(
    st.integers(2, 4), st.sampled_from([0.2, 0.5, 1.0, 3.0, 10.0]), st.sampled_from([5, 20, 60]),
    st.sampled_from([0.0, 0.02, 1.0]),
)  # fmt: skip
def test_what_is_left_out_would_not_have_been_found(
    world_size: int, gbps: float, forward_ms: int, latency_ms: float
) -> None:
    one = replayer_of(
        world_size=world_size,
        gbps=gbps,
        forward_ms=forward_ms,
        backward_ms=2 * forward_ms,
        latency_ms=latency_ms,
    )
    pruned, every = search(one), search(one, prune=False)
    assert len(pruned.candidates) + pruned.pruned == len(every.candidates)
    assert every.pruned == 0
    assert pruned.best().name == every.best().name
    assert [each.name for each in pruned.like(pruned.best())] == [
        each.name for each in every.like(every.best())
    ]
    assert best_of_each(pruned) == best_of_each(every)
    kept = {each.name: each.predicted_ms for each in pruned.candidates}
    assert kept.items() <= {each.name: each.predicted_ms for each in every.candidates}.items()


def test_plans_are_left_out_where_buckets_are_too_coarse_to_begin_early() -> None:
    found = search(replayer_of(forward_ms=20, backward_ms=60, gbps=0.5))
    assert found.pruned > 0


def test_nothing_is_left_out_where_memory_is_limited() -> None:
    one = replayer_of(forward_ms=20, backward_ms=60, gbps=0.5)
    assert search(one, memory_limit_bytes=10**12).pruned == 0


def test_plans_that_cannot_be_replayed_are_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replayer_of()
    replay = Replayer.replay

    def refusing(self: Replayer, strategy: Any = None, *rest: Any, **options: Any) -> Any:
        if isinstance(strategy, DecoupledStrategy):
            raise UserError("the replay is too large")
        return replay(self, strategy, *rest, **options)

    monkeypatch.setattr(Replayer, "replay", refusing)
    found = search(one)
    assert found.candidates
    assert not any(isinstance(each.strategy, DecoupledStrategy) for each in found.candidates)
    assert "plans cannot be replayed: the replay is too large" in found.note


def test_without_time_what_the_job_would_be_left_with_is_found() -> None:
    one = replayer_of()
    found, every = search(one, budget_s=1e-9), search(one)
    assert found.unseen > 0
    assert found.cut_short
    names = {each.name for each in found.candidates}
    assert names < {each.name for each in every.candidates}
    assert any(not each.changed for each in found.candidates)
    assert any(each.name == "DDP, default buckets" for each in found.candidates)
    assert not every.cut_short
    assert every.unseen == 0


def test_strategies_take_turns() -> None:
    told: list[str] = []

    def noted(candidate: Candidate) -> Candidate:
        told.append(candidate.strategy.name)
        return candidate

    every = search(replayer_of(), prune=False).candidates
    asked = [Evaluation(each.strategy, each.schedule, partial(noted, each)) for each in every]
    found = replay_all(asked, TimeLimit())
    assert found.candidates == every
    assert [set(told[:2]), set(told[2:4])] == [{"ddp", "decoupled"}] * 2


def test_the_planner_stops_when_time_is_up() -> None:
    one = replayer_of()
    limit = TimeLimit.of(0.0)
    with limited(limit):
        short = plan(one.job)
    assert limit.cut_short
    assert short.schedules
    assert short.evaluated < plan(one.job).evaluated


def test_the_same_is_found_every_time() -> None:
    one = replayer_of()
    first, second = search(one), search(one)
    assert [each.name for each in first.candidates] == [each.name for each in second.candidates]
    assert [each.predicted_ms for each in first.candidates] == pytest.approx(
        [each.predicted_ms for each in second.candidates], rel=0
    )
