"""Which plans are measured, and which is taken, with made-up runs in the place of a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.cli.measuring import _folder_next_to, measured_document, measured_sentences
from headway.errors import LaunchError, UserError
from headway.optimization.candidate import Candidate
from headway.optimization.measured import MOST, Contenders, choose, contenders, is_measurable
from headway.optimization.result import SearchResult
from headway.optimization.search import search
from headway.permission import ASYNCHRONOUS
from headway.replayer.replayer import Replayer
from headway.strategies.ddp.policy import DistributedDataParallelStrategy


@pytest.fixture(scope="module")
def found() -> SearchResult:
    one = job(forward_ms=20, backward_ms=40, gbps=1.0)
    return search(
        Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one)), allow=[ASYNCHRONOUS], prune=False
    )


def uncertain(found: SearchResult, uncertainty_ms: float) -> SearchResult:
    """The same where every prediction may be off by so much."""
    rougher = [
        replace(each, expected=replace(each.expected, uncertainty_ms=uncertainty_ms))
        for each in found.candidates
    ]
    return replace(found, candidates=tuple(rougher))


def test_the_best_of_each_kind_comes_first_and_references_are_kept(found: SearchResult) -> None:
    chosen = contenders(found, found.best(), 5)
    assert [each.strategy for each in chosen.kept][1:] == [DistributedDataParallelStrategy()]
    assert not chosen.kept[0].changed
    assert len(chosen.plans) == 5
    kinds = [each.kind for each in chosen.plans]
    able = [each for each in found.candidates if is_measurable(each) and each not in chosen.kept]
    all_kinds = {each.kind for each in able}
    assert len(all_kinds) == 3
    assert set(kinds[:3]) == all_kinds
    assert chosen.plans[0] is able[0]


def test_only_what_cannot_be_told_apart_is_measured_without_a_number(found: SearchResult) -> None:
    exact = uncertain(found, 0.0)
    best = exact.best()
    assert not contenders(exact, best).plans or exact.like(best)
    rough = uncertain(found, 1000.0)
    chosen = contenders(rough, rough.best())
    assert len(chosen.plans) == MOST
    assert contenders(exact, best, 2).plans


def test_plans_of_ranks_that_do_not_wait_for_each_other_are_not_measured(found: SearchResult) -> None:
    apart = [each for each in found.candidates if ASYNCHRONOUS in each.permissions]
    assert apart
    assert not any(map(is_measurable, apart))


def test_a_strategy_limits_what_is_measured_but_not_what_is_kept(found: SearchResult) -> None:
    chosen = contenders(found, found.best("decoupled"), 8, "decoupled")
    assert {each.strategy.name for each in chosen.plans} == {"decoupled"}
    assert {each.strategy.name for each in chosen.kept} == {"ddp"}


def test_the_name_of_a_dimension_stands_for_all_strategies_along_it(found: SearchResult) -> None:
    along = contenders(found, found.best("data"), 8, "data")
    assert along.plans == contenders(found, found.best("data"), 8).plans


def test_a_plan_that_is_ahead_and_cannot_be_measured_is_named(found: SearchResult) -> None:
    apart = next(each for each in found.candidates if not is_measurable(each))
    apart = replace(apart, expected=replace(apart.expected, step_ms=1.0))
    chosen = Contenders(kept=found.candidates[:1], plans=())
    choice = choose(chosen, lambda _, steps: [10.0] * steps, 10.0)
    assert any(apart.short_name in each for each in measured_sentences(choice, apart))
    assert not any(apart.short_name in each for each in measured_sentences(choice, found.candidates[0]))
    document = measured_document(choice, apart)
    assert document is not None
    assert document["passed_over"] == apart.name


def run_with(times_ms: dict[int, float], refused: Sequence[Candidate] = ()):  # type: ignore[no-untyped-def]
    def run(candidate: Candidate, steps: int) -> list[float]:
        if any(candidate is each for each in refused):
            raise LaunchError("refused")
        return [times_ms[id(candidate)]] * steps

    return run


def test_the_fastest_as_measured_is_taken_whatever_was_predicted(found: SearchResult) -> None:
    chosen = contenders(found, found.best(), 4)
    times_ms = {id(each): 60.0 - number for number, each in enumerate(chosen.all)}
    told: list[tuple[int, int, str]] = []
    taken = choose(chosen, run_with(times_ms), 60.0, lambda *progress: told.append(progress))
    assert taken.taken.candidate is chosen.plans[-1]
    assert taken.taken.step_ms == pytest.approx(55.0)
    assert taken.plans[0] is taken.taken
    assert not taken.keeps_recorded
    assert [each.kept for each in taken.plans].count(True) == len(chosen.kept)
    assert told[-1][:2] == (taken.runs, taken.runs)
    assert chosen.plans[-1].short_name in told[-1][2]
    assert "times as fast as" in taken.why


def test_no_plan_is_taken_that_is_slower_than_what_the_job_would_be_left_with(found: SearchResult) -> None:
    chosen = contenders(found, found.best(), 3)
    times_ms = {id(each): 61.0 for each in chosen.all} | {id(chosen.kept[0]): 60.0}
    taken = choose(chosen, run_with(times_ms), 60.0)
    assert taken.taken.candidate is chosen.kept[0]
    assert taken.why.startswith("No other plan was faster")


def test_what_is_recorded_is_kept_where_a_gain_is_within_the_spread(found: SearchResult) -> None:
    chosen = contenders(found, found.best(), 1)
    ran: dict[int, int] = {}

    def run(candidate: Candidate, steps: int) -> list[float]:
        ran[id(candidate)] = ran.get(id(candidate), 0) + 1
        return [59.0 if candidate in chosen.kept else 54.0 + 8 * (ran[id(candidate)] % 2)] * steps

    taken = choose(chosen, run, 60.0)
    assert taken.plans[0].candidate is chosen.plans[0], "it was faster"
    assert taken.taken.candidate is chosen.kept[0]
    assert taken.keeps_recorded
    assert taken.why.startswith("No other plan was faster by more than the variation between rounds: ")


def test_a_recording_that_cannot_rank_plans_has_the_best_of_each_kind_measured(found: SearchResult) -> None:
    exact = uncertain(found, 0.0)
    off = replace(exact, replayed_ms=1.2 * exact.baseline_ms)
    assert off.best() is off.recorded
    chosen = contenders(off, off.best())
    assert len(chosen.plans) == MOST
    assert chosen.plans[0].kind != chosen.plans[1].kind


def test_a_plan_that_cannot_be_run_is_out_and_says_why(found: SearchResult) -> None:
    chosen = contenders(found, found.best(), 2)
    times_ms = {id(each): 60.0 for each in chosen.all}
    taken = choose(chosen, run_with(times_ms, chosen.plans), 60.0)
    assert taken.taken.kept
    assert [candidate for candidate, _ in taken.failed] == list(chosen.plans)
    assert taken.failed[0][1] == "refused"
    with pytest.raises(UserError, match="refused"):
        choose(chosen, run_with(times_ms, chosen.kept[:1]), 60.0)
    with pytest.raises(UserError, match="no plan could be run"):
        choose(Contenders((), chosen.plans), run_with(times_ms, chosen.plans), 60.0)


def test_a_folder_that_plans_cannot_be_written_to_is_said_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"cannot write to .*missing"),
        _folder_next_to(tmp_path / "missing" / "plan.yaml"),
    ):
        pass
    with _folder_next_to(tmp_path / "plan.yaml") as folder:
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())
