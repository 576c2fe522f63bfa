"""The pure parts of the benchmark of the optimizer: its search among stock settings, its spaces, its rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from optimizing.cases import CASES, DEFAULT, EXHAUSTIVE, HEADWAY, STOCK, DataParallelCase
from optimizing.rows import page, rows_of
from optimizing.spaces import bucketings, data_parallel_space, ends_of_groups, pipeline_space, runs_of
from optimizing.stock_search import (
    ONE_BYTE_MB,
    DdpOptions,
    StockSearch,
    first_ddp_options,
    near_ddp_options,
)
from tests.models import layered_model
from tests.planning.jobs import layered_job

from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.policy import PipelineStrategy

MIB = 2**20


def search_on(search: StockSearch[int], trials: int) -> None:
    """Trials of options that take as long as they are far from 7."""
    for _ in range(trials):
        if (option := search.ask()) is not None:
            search.tell(option, 1 + abs(option - 7))


def test_a_search_tries_what_it_is_given_and_then_walks_to_the_best() -> None:
    search = StockSearch([0, 20, 0], lambda option: [option - 1, option + 1])
    search_on(search, 2)
    assert search.took_first
    assert search.finalists(1) == [0]
    search_on(search, 20)
    assert search.finalists(1) == [7]
    asked = search.ask()
    assert asked is None, "everything near the best is tried"
    assert search.trials == len(search.tried_s)


def test_the_best_option_is_that_of_the_lowest_median_and_not_of_the_luckiest_trial() -> None:
    search = StockSearch(["lucky", "good"], lambda _: [])
    for taken_s in (0.1, 3.0, 3.0):
        search.tell("lucky", taken_s)
    search.tell("good", 2.0)
    assert search.finalists(2) == ["good", "lucky"]


def test_caps_reach_from_a_bucket_a_parameter_to_one_bucket() -> None:
    options = first_ddp_options(1 / 16, 2.0, (1 / 16, 25 / 16), [(0.5, 1.5)])
    caps = [option.caps_mb for option in options]
    assert caps[0] == (1 / 16, 25 / 16)
    assert caps[-1] == (0.5, 1.5)
    alone = [cap for (cap,) in caps[1:-1]]
    assert alone == sorted(alone)
    assert alone[0] == ONE_BYTE_MB
    assert alone[-1] == 2.0
    assert alone[-2] < 2.0


@pytest.mark.parametrize("caps_mb", [(1.0,), (0.5, 2.0), (1.0, 2.0, 3.0, 4.0)])
def test_neighbours_of_ddp_options_differ_and_keep_the_size_of_lists(caps_mb: tuple[float, ...]) -> None:
    option = DdpOptions(caps_mb)
    near = near_ddp_options(option)
    assert option not in near
    assert len(set(near)) == len(near)
    assert {(each.views, each.static_graph) for each in near if each.caps_mb == caps_mb} == {
        (True, True), (False, False),
    }  # fmt: skip
    if len(caps_mb) > 2:
        assert all(sum(each.caps_mb) == sum(caps_mb) for each in near)
        assert {each.caps_mb for each in near} - {caps_mb} == {
            (3.0, 3.0, 4.0),
            (1.0, 5.0, 4.0),
            (1.0, 2.0, 7.0),
        }


def test_runs_hold_every_parameter_once_in_the_order_of_readiness() -> None:
    model = layered_model(11)
    runs = runs_of(model, 5)
    assert [part.parameter for run in runs for part in run] == [
        each.name for each in model.ready_parameters()
    ]
    assert 1 < len(runs) <= 5
    assert len(runs_of(model, 1)) == 1


def test_all_divisions_are_there_once() -> None:
    found = list(ends_of_groups(4))
    assert len(found) == len(set(found)) == 8
    assert all(ends[-1] == 4 and all(a < b for a, b in pairwise((0, *ends))) for ends in found)
    model = layered_model(11)
    runs = runs_of(model, 4)
    assert len(list(bucketings(model, 4))) == 2 ** (len(runs) - 1)


@pytest.mark.parametrize(("workers", "algorithms"), [(1, 1), (2, 2)])
def test_the_space_has_every_division_in_every_form(workers: int, algorithms: int) -> None:
    job = layered_job([MIB] * 12, communication=0.8, workers_a_host=workers).job
    space = data_parallel_space(job, 3)
    assert len(set(space)) == len(space)
    divisions = list(bucketings(job.model, 3))
    of_ddp = [each for each in space if isinstance(each, DistributedDataParallelStrategy)]
    assert len(of_ddp) == len(divisions) == 4
    for each, groups in zip(of_ddp, divisions, strict=True):
        assert [bucket.parts for bucket in each.decide(job).buckets] == [tuple(group) for group in groups]
    decided = [each.decide(job) for each in space if isinstance(each, DecoupledStrategy)]
    # In both forms, on one channel or two; and some gradients can be gathered early.
    plain = [each for each in decided if not each.gathers_after]
    assert len(plain) == len(divisions) * 2 * 2 * algorithms
    assert any(min(each.gathers_after) < len(each.buckets) - 1 for each in decided if each.gathers_after)
    assert len({each.algorithms for each in decided}) == algorithms


def test_orders_of_pipelines_are_different_and_have_enough_buffers() -> None:
    space = pipeline_space(4)
    assert len(set(space)) == len(space)
    for each in space:
        assert isinstance(each, PipelineStrategy)
        schedule = each.schedule_of(3)  # which refuses too few buffers
        assert sum(map(len, schedule.ranks)) >= 3 * 4 * 2


def test_there_are_eight_jobs_and_their_labs_have_a_place_for_every_rank() -> None:
    assert len(CASES) == 8
    for case in CASES.values():
        workers = case.model.world_size if isinstance(case, DataParallelCase) else case.network.stages
        for quick in (False, True):
            assert case.lab(quick=quick).world_size == workers
            assert case.described(quick=quick)["workers"] == workers


def samples(*step_s: float) -> dict[str, list[float]]:
    return {"step_s": list(step_s), "busy_cores": [0.5] * len(step_s)}


def test_rows_are_held_against_the_better_of_default_and_tuned() -> None:
    measured = {
        DEFAULT: samples(1.0, 1.0, 1.1), STOCK: samples(1.2, 1.2, 1.3), HEADWAY: samples(0.8, 0.8, 0.9),
        EXHAUSTIVE: samples(0.9, 0.9, 0.9),
    }  # fmt: skip
    told = {"predicted_ms": 810.0, "uncertainty_ms": 20.0, "search_s": 70.0}
    known = {DEFAULT: {}, STOCK: {}, HEADWAY: told, EXHAUSTIVE: {**told, "predicted_ms": 800.0}}
    rows = {
        row["method"]: row
        for row in rows_of("case", measured, known, {"bound_ms": 700.0, "recorded_ms": 1250.0})
    }
    assert rows[HEADWAY]["over_stock"] == pytest.approx(1.0 / 0.8)
    assert rows[STOCK]["over_stock"] == pytest.approx(1.0 / 1.2)
    assert rows[HEADWAY]["error"] == pytest.approx(810 / 800 - 1)
    assert rows[HEADWAY]["within"]
    assert not rows[EXHAUSTIVE]["within"]
    assert rows[HEADWAY]["rounds"] == 3
    said = page("optimizer", {"rows": list(rows.values()), "environment": {}}, "words")
    assert "1.25x at best" in said
    assert "0 of 1 cases" in said, "the search took more than a minute"
    assert "1.012 (case)" in said
    assert "1.429 times (case)" in said, "of a bound of 560 ms: recording made the default a quarter longer"
