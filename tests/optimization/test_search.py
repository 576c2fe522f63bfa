from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.bound import bound_of
from headway.cli.optimize import WITHIN, doubts_of
from headway.cluster import AlgorithmCost
from headway.errors import UserError
from headway.job import Job
from headway.optimization.candidate import UNCHANGED, Candidate, is_better, needed_bytes
from headway.optimization.explanation import explain
from headway.optimization.result import best_first, best_to_take, plan_of
from headway.optimization.search import _changes, candidate_strategies, search
from headway.plan import Plan
from headway.replayer.replayer import Replayer
from headway.scheduling.buckets import BucketSchedule
from headway.simulator.expectation import Expectation
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.planner.search import plan
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.registry import plugins
from headway.trace.events import Kind


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    return Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))


def candidates(job: Job, recorded: Strategy | None = None) -> list[Strategy]:
    found = candidate_strategies(job, [plugin.propose(job) for plugin in plugins().values()], recorded)
    return [strategy for strategy, _ in found]


def test_candidates_decide_on_different_buckets(replayer: Replayer) -> None:
    decided = [(s.name, s.decide(replayer.job), s.changes_training) for s in candidates(replayer.job)]
    assert len(set(decided)) == len(decided)
    forms = {(name, schedule.gather) for name, schedule, _ in decided if isinstance(schedule, BucketSchedule)}
    assert forms == {("ddp", "gradients"), ("decoupled", "gradients"), ("decoupled", "parameters")}


@pytest.mark.parametrize(
    "recorded",
    [
        DistributedDataParallelStrategy(bucket_cap_mb=0.3),
        DistributedDataParallelStrategy(),
        DecoupledStrategy(bucket_cap_bytes=123_456),
        DecoupledStrategy(bucket_cap_bytes=2**18),
    ],
)
def test_the_recorded_strategy_is_the_first_candidate(recorded: Strategy, replayer: Replayer) -> None:
    found = candidates(replayer.job, recorded)
    assert found[0].decide(replayer.job) == recorded.decide(replayer.job)
    assert found[0].name == recorded.name
    decided = [(s.name, s.decide(replayer.job), s.changes_training) for s in found]
    assert len(set(decided)) == len(decided)


def test_servers_are_offered_where_a_probe_has_measured_them(replayer: Replayer) -> None:
    assert not any(isinstance(c.strategy, ParameterServerStrategy) for c in search(replayer).candidates)
    probed = replayer.cluster.model_copy(
        update={"algorithms": {**replayer.cluster.algorithms, "servers": AlgorithmCost(byte_factor=1.1)}}
    )
    found = search(Replayer(replayer.trace, probed)).candidates
    offered = [c for c in found if isinstance(c.strategy, ParameterServerStrategy)]
    assert offered
    assert all("parameter_server instead of ddp" in c.changes for c in offered)


def test_servers_share_unequally_where_links_are_unequal() -> None:
    one = job(world_size=4, forward_ms=2, backward_ms=4, gbps=1.0)
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    slow, *others = replayer.cluster.hosts
    hosts = (slow.model_copy(update={"up_gbps": slow.up_gbps / 5, "down_gbps": slow.down_gbps / 5}), *others)
    probed = replayer.cluster.model_copy(
        update={"hosts": hosts, "algorithms": {**replayer.cluster.algorithms, "servers": AlgorithmCost()}}
    )
    found = search(Replayer(replayer.trace, probed))
    servers = [c for c in found.candidates if isinstance(c.strategy, ParameterServerStrategy)]
    shares = [dict(c.strategy)["shares"] for c in servers]
    unequal = [c for c, own in zip(servers, shares, strict=True) if own]
    equal = [c for c in servers if c not in unequal]
    assert {own[0] for own in shares if own} == {1}
    assert all(any("serving 1:" in said for said in c.changes) for c in unequal)
    least_ms, equal_ms = (min(c.predicted_ms for c in each) for each in (unequal, equal))
    assert least_ms < 0.9 * equal_ms
    assert min(c.predicted_ms for c in unequal) >= found.bound_ms
    fewer = search(Replayer(replayer.trace, probed), prune=False)
    assert fewer.best().strategy == found.best().strategy


def test_local_steps_are_found_where_they_are_permitted(replayer: Replayer) -> None:
    without = search(replayer)
    assert not any(each.strategy.name == "local-sgd" for each in without.candidates)
    found = search(replayer, allow=("local-steps",))
    local = [each for each in found.candidates if each.strategy.name == "local-sgd"]
    assert len(local) > 1
    assert all("for" in each.changes_training for each in local)
    fewer = sorted(local, key=lambda each: dict(each.strategy)["steps"])
    assert [each.predicted_ms for each in fewer] == sorted((c.predicted_ms for c in local), reverse=True)
    explained = explain(replayer, found, local[0], go_further=True)
    assert explained is not None
    (choice,) = explained.choices
    assert choice.name == "local-sgd instead of ddp"
    assert explained.from_ms - choice.saved_ms == pytest.approx(explained.to_ms)
    assert sum(choice.saved.ms.values()) == pytest.approx(choice.saved_ms)
    assert explained.after.step_ms == pytest.approx(explained.to_ms)
    assert choice.saved.parts_ms["exposed communication"] > 0
    assert explained.next_bottleneck.startswith("Under this plan a mean iteration is ")
    assert explained.further is None, "it has no bound"


def test_only_the_recorded_plan_changes_nothing(replayer: Replayer) -> None:
    found = search(replayer)
    in_force = replayer.recorded_strategy.decide(replayer.job)
    for each in found.candidates:
        recorded = (each.strategy.name, each.schedule) == (replayer.recorded_strategy.name, in_force)
        assert each.changed != (recorded and not each.passes), each.name


def test_other_buckets_of_the_same_number_are_a_change(replayer: Replayer) -> None:
    plans = [DecoupledStrategy(bucket_cap_bytes=2**18, channels=channels) for channels in (1, 2)]
    one, two = (each.decide(replayer.job) for each in plans)
    assert _changes(plans[0], one, plans[0], one) == UNCHANGED
    assert _changes(plans[0], one, plans[1], two) == (
        "the same number of collectives, with other contents or in another order",
    )


def taking(each: Candidate, ms: float, uncertainty_ms: float = 0.0, **more: Any) -> Candidate:
    return replace(each, expected=Expectation(100.0, ms, uncertainty_ms), **more)


def test_plans_are_sorted_by_what_is_predicted_alone(replayer: Replayer) -> None:
    every = search(replayer, prune=False).candidates
    many, few = (sorted(every, key=lambda each: sign * each.schedule.collectives)[0] for sign in (-1, 1))
    assert best_first([taking(few, 70.6), taking(many, 70.5)])[0].schedule == many.schedule


def test_what_is_recorded_is_kept_unless_a_gain_is_more_than_it_may_be_off(replayer: Replayer) -> None:
    found = search(replayer)
    recorded = next(each for each in found.candidates if not each.changed)
    other = next(each for each in found.candidates if each.changed)
    for ms, uncertainty_ms, taken in ((90.0, 10.0, recorded), (90.0, 9.9, other), (101.0, 0.0, recorded)):
        candidates = best_first([taking(recorded, 100.0), taking(other, ms, uncertainty_ms)])
        made = replace(found, baseline_ms=100.0, replayed_ms=100.0, candidates=candidates)
        assert made.best().name == taken.name
        assert made.best(other.strategy.name).strategy.name == other.strategy.name, "it was asked for"
        off = replace(made, replayed_ms=111.0)
        assert (made.can_rank, off.can_rank) == (True, False)
        assert off.best().name == recorded.name, "the recording cannot rank plans"
    without = replace(made, candidates=best_first([taking(other, 120.0)]))
    assert without.best().name == other.name, "what is recorded needs more memory than there is"


def test_of_plans_that_tie_less_memory_counts_and_then_fewer_changes(replayer: Replayer) -> None:
    ddp, decoupled = (search(replayer).best(name) for name in ("ddp", "decoupled"))
    wide = taking(decoupled, 80.0, 5.0, peak_bytes=100, changes=("one", "two"))
    less = taking(ddp, 84.0, 5.0, peak_bytes=50, changes=("one", "two", "three"))
    few = taking(ddp, 84.5, 5.0, peak_bytes=100, changes=("one",))
    slow = taking(ddp, 90.0, 5.0, peak_bytes=10, changes=("one",))
    variant = taking(decoupled, 82.0, 5.0, peak_bytes=10, changes=("one",))
    assert best_to_take([wide, slow]) is wide
    assert best_to_take([wide, few, slow]) is few
    assert best_to_take([wide, less, few, slow]) is less
    assert best_to_take([wide, variant]) is wide, "plans of one strategy are predicted more closely than that"


def test_what_the_recorded_command_cannot_run_is_never_taken(replayer: Replayer) -> None:
    found = search(replayer)
    pipeline = replace(found.candidates[0], recut=replayer.job, name="2 stages")
    assert not pipeline.is_runnable
    ahead = replace(found, for_other_scripts=(taking(pipeline, 1.0),))
    assert ahead.best() == found.best()
    assert pipeline.name not in [each.name for each in ahead.like(ahead.best())]
    assert ahead.best("stages").name == pipeline.name
    only = replace(ahead, candidates=())
    with pytest.raises(
        UserError, match=r"without editing the script; got 2 stages, which needs headway\.parallelize"
    ):
        only.best()


def test_a_hand_tuned_job_is_not_given_something_slower(replayer: Replayer) -> None:
    found = search(replayer)
    assert replayer.recorded_strategy in [candidate.strategy for candidate in found.candidates]
    recorded = next(c for c in found.candidates if c.strategy == replayer.recorded_strategy)
    assert (
        recorded.predicted_ms == pytest.approx(found.baseline_ms) == pytest.approx(replayer.recorded_step_ms)
    )
    assert found.recorded == recorded
    assert found.best().predicted_ms <= found.baseline_ms


def test_plans_come_best_first_and_none_beats_the_bound(replayer: Replayer) -> None:
    seen: list[tuple[int, int, str]] = []
    found = search(replayer, lambda done, of, best: seen.append((done, of, best)))
    times = [candidate.predicted_ms for candidate in found.candidates]
    assert times == sorted(times)
    assert times[0] >= 0.999 * found.bound_ms
    assert found.bound is not None
    assert found.bound.step_ms == pytest.approx(found.bound_ms)
    assert seen[-1][0] == seen[-1][1] == len(found.candidates) + found.pruned
    assert seen[-1][2].endswith(f"{min(times):.1f} ms")
    assert found.best("ddp").predicted_ms >= min(times)


def test_the_planners_schedules_are_replayed_and_none_of_a_fixed_cap_is_better(replayer: Replayer) -> None:
    model = replayer.trace.model
    planned = plan(replayer.job).schedules
    found = search(replayer, prune=False)
    times = {
        c.strategy.decide(Job.of(model)): c.predicted_ms for c in found.candidates if c.strategy.name != "ddp"
    }
    assert all(each.schedule in times for each in planned)
    assert min(times[each.schedule] for each in planned) <= 1.002 * min(times.values())
    for each in planned:
        assert times[each.schedule] == pytest.approx(each.step_ns / 1e6, rel=0.02)
    gathered = [c for c in found.candidates if "parameters are gathered" in c.changes]
    assert gathered
    assert gathered[0].name.startswith("decoupled")


def test_all_reduces_never_beat_their_own_bound(replayer: Replayer) -> None:
    bound = bound_of(replayer.job, "all-reduce")
    best = search(replayer).best("ddp")
    assert best.predicted_ms >= 0.999 * bound.step_ms


def test_the_plan_holds_what_was_predicted_and_fits_the_recorded_job(replayer: Replayer) -> None:
    found = search(replayer)
    plan = plan_of(found.best("decoupled"), replayer)
    plan.check(replayer.trace.model, replayer.trace.world_size)
    assert plan.prediction is not None
    assert plan.prediction.step_ms == found.best("decoupled").predicted_ms
    assert replayer.expect(replayer.replay(plan.strategy)).step_ms == plan.prediction.step_ms
    assert plan.prediction.baseline_ms == replayer.recorded_step_ms
    assert not plan.is_recorded


def test_the_recorded_plan_is_known_as_such_until_it_is_edited(replayer: Replayer, tmp_path: Path) -> None:
    recorded = search(replayer).recorded
    assert recorded is not None
    plan_of(recorded, replayer).save(tmp_path / "plan.yaml")
    plan = Plan.load(tmp_path / "plan.yaml")
    assert plan.is_recorded
    edited = plan.model_copy(update={"parallel": {"data": DistributedDataParallelStrategy(bucket_cap_mb=9)}})
    assert not edited.is_recorded


def test_gains_are_counted_from_the_record_where_its_replay_is_too_slow(replayer: Replayer) -> None:
    hosts = tuple(
        host.model_copy(update={"up_gbps": 0.6 * host.up_gbps, "down_gbps": 0.6 * host.down_gbps})
        for host in replayer.cluster.hosts
    )
    slow = Replayer(replayer.trace, replayer.cluster.model_copy(update={"hosts": hosts}))
    found = search(slow)
    assert found.replayed_ms > 1.05 * found.baseline_ms == 1.05 * slow.recorded_step_ms
    best = found.best("decoupled")
    assert best.expected.speedup == found.baseline_ms / slow.replay(best.strategy).step_ms
    recorded = next(c for c in found.candidates if not c.changed)
    assert recorded.expected.speedup == pytest.approx(1.0)
    assert all(c.uncertainty_ms >= 0.05 * c.predicted_ms for c in found.candidates)


def test_plans_that_cannot_be_told_apart_are_named(replayer: Replayer) -> None:
    found = search(replayer)
    best = found.candidates[0]
    like = found.like(best)
    assert best not in like
    assert 0 < len(like) < len(found.candidates) - 1
    near_ms = max(abs(each.predicted_ms - best.predicted_ms) for each in like)
    assert near_ms <= max(each.uncertainty_ms for each in (best, *like))
    assert doubts_of(best, like)[-1].startswith("Predictions cannot distinguish it from ")
    assert doubts_of(best, ()) == [WITHIN] * (best.changed and best.expected.may_gain_nothing)


def test_without_deferrable_optimizers_only_stock_plans_are_left() -> None:
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    trace = as_bucketed(synthetic_trace(one))
    for events in trace.events.values():
        events.name[events.kind == Kind.OPTIMIZER] = "own.Shampoo"
    found = search(Replayer(trace, cluster_of(one)))
    assert {candidate.strategy.name for candidate in found.candidates} == {"ddp"}
    with pytest.raises(UserError, match=r"there is no plan of this strategy: own\.Shampoo may read"):
        found.best("decoupled")


def test_plans_over_the_memory_limit_are_left_out(replayer: Replayer) -> None:
    every = search(replayer)
    needs = sorted({needed_bytes(each) for each in every.candidates})
    assert len(needs) > 1
    limited = search(replayer, memory_limit_bytes=needs[0])
    assert limited.candidates
    assert all(needed_bytes(each) <= needs[0] for each in limited.candidates)
    assert len(limited.candidates) + len(limited.excluded) == len(every.candidates) + every.pruned
    assert all(each.name in limited.note for each in limited.excluded)
    assert plan_of(limited.candidates[0], replayer).prediction is not None
    with pytest.raises(
        UserError, match=r"no plan keeps every rank within the memory limit; got .* expected at most"
    ):
        search(replayer, memory_limit_bytes=needs[0] - 1)


def test_dominated_plans_are_no_better_in_anything(replayer: Replayer) -> None:
    found = search(replayer)
    kept = [each for each in found.candidates if not found.dominated(each)]
    assert kept
    assert min(each.predicted_ms for each in kept) == min(each.predicted_ms for each in found.candidates)
    assert min(map(needed_bytes, kept)) == min(map(needed_bytes, found.candidates))
    for one in kept:
        assert not any(is_better(other, one) for other in found.candidates)


def test_compressed_gradients_are_candidates_only_where_precision_is_permitted() -> None:
    one = job(forward_ms=20, backward_ms=40, gbps=0.1)
    slow = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    for allow in ((), ("asynchronous",)):
        assert all(each.strategy.permission != "precision" for each in search(slow, allow=allow).candidates)
    found = search(slow, allow=("precision",))
    assert all(each.strategy.permission in ("", "precision") for each in found.candidates)
    best = found.best()
    assert best.strategy.permission == "precision", "links are slow"
    assert "gradients sent as" in " ".join(best.changes)
    made = plan_of(best, slow)
    assert made.changes_training == best.changes_training != ""
    assert Plan.model_validate(made.model_dump(mode="json")) == made
    assert best.predicted_ms < 0.8 * search(slow).best().predicted_ms
