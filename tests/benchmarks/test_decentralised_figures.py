"""Figures of the benchmark of decentralised training, from what was measured."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from decentralised_training import contraction
from decentralised_training.cases import (
    COMPUTE_S,
    GTX_1080_TI,
    MOST_LAYERS,
    SITUATIONS,
    THROUGHPUT,
    merged,
)
from decentralised_training.losses import loss_at, time_to
from decentralised_training.predicting import Predicted, choice
from decentralised_training.rates import throughput

from headway.models.catalogue import MODELS
from headway.models.roofline import step_s
from headway.strategies.partial_all_reduce.matrices import Consensus


def test_throughput_counts_all_of_the_time_of_ranks_by_themselves_and_whole_steps_of_others() -> None:
    by_itself = {
        "by_itself": True,
        "begin_s": 10.0,
        "warm_s": 1.0,
        "until_s": 3.0,
        "ends_s": [10.5, 11.4, 12.2, 13.5],
    }
    together = {"by_itself": False, "begin_s": 0.0, "warm_steps": 1, "ends_s": [1.0, 1.5, 2.0]}
    stands = {**by_itself, "ends_s": [10.5, 11.2, 11.4]}  # waits for somebody from then on
    assert throughput([by_itself, by_itself]) == pytest.approx(2 * 2 / 2.0)
    assert throughput([by_itself, stands]) == pytest.approx(2 / 2.0 + 2 / 2.0)
    assert throughput([together]) == pytest.approx(2.0)


def test_ranks_that_are_ahead_count_only_while_all_train() -> None:
    slow = {"by_itself": False, "begin_s": 0.0, "warm_steps": 1, "ends_s": [2.0, 4.0, 6.0, 8.0]}
    ahead = {"by_itself": False, "begin_s": 0.0, "warm_steps": 1, "ends_s": [0.5, 1.0, 3.0, 5.0]}
    assert throughput([slow, ahead]) == pytest.approx(0.5 + 0.5)


def test_the_time_to_a_loss_is_between_two_looks_and_stays_reached() -> None:
    run = {"times_s": [1.0, 2.0, 3.0, 4.0], "losses": [2.0, 0.9, 1.5, 0.5], "samples": [10, 20, 30, 40]}
    assert time_to(run, 1.0) == pytest.approx(3.5)
    assert time_to(run, 0.1) is None
    assert loss_at(run, 35) == pytest.approx(1.0)


def test_distances_are_those_of_the_mixing_matrices() -> None:
    groups = [(0, 1, 2), (3, 4), (1, 3, 5), (0, 5)]
    models = np.eye(6)
    consensus = Consensus(6)
    for group, squared in zip(groups, contraction.distances(models, groups), strict=True):
        consensus.averaged(group)
        assert squared == pytest.approx(consensus.distance(range(6)) ** 2)


def test_layers_taken_together_have_the_parameters_and_times_of_all() -> None:
    whole = MODELS["resnet50"]()
    few = merged(whole, MOST_LAYERS)
    assert len(few.layers) == len(few.parameters) == MOST_LAYERS
    assert few.parameter_count == whole.parameter_count
    assert step_s(few, GTX_1080_TI) == pytest.approx(step_s(whole, GTX_1080_TI))
    assert merged(few, MOST_LAYERS) is few


@pytest.mark.parametrize(
    ("method", "groups"),
    [
        ("random:group_size=3", list(combinations(range(contraction.WORKERS), 3))),
        ("pairs:neighbours=any", list(combinations(range(contraction.WORKERS), 2))),
        ("pairs", [pair for pair in combinations(range(contraction.WORKERS), 2) if sum(pair) % 2]),
    ],
)
def test_what_a_uniform_group_leaves_is_the_second_eigenvalue(
    method: str, groups: list[tuple[int, ...]]
) -> None:
    total = np.zeros((contraction.WORKERS, contraction.WORKERS))
    for group in groups:
        matrix = np.eye(contraction.WORKERS)
        matrix[np.ix_(group, group)] = 1 / len(group)
        total += matrix.T @ matrix
    eigenvalues = sorted(np.linalg.eigvalsh(total / len(groups)))
    assert contraction.uniform_rate(method) == pytest.approx(eigenvalues[-2])


def test_headway_is_the_fastest_of_those_that_stay_as_close_as_ad_psgd() -> None:
    found = {
        "ad-psgd": Predicted(10.0, spread=2.0), "static": Predicted(9.0, spread=1.0),
        "first-come": Predicted(12.0, spread=1.9), "first-come-stale": Predicted(15.0, spread=3.0),
    }  # fmt: skip
    assert choice(found) == "first-come"


@pytest.mark.parametrize("name", THROUGHPUT)
def test_sizes_and_rates_are_scaled_together(name: str) -> None:
    case = THROUGHPUT[name]
    plan = case.plan(quick=False)
    size_bytes = 4 * case.table.parameter_count / plan.shrink
    passes_s = size_bytes * 8e-6 / (plan.rate_mbit * 0.956) / plan.ratio
    assert passes_s == pytest.approx(COMPUTE_S, rel=0.01)


def test_chance_slows_about_as_many_iterations_as_it_should() -> None:
    situation = SITUATIONS["random"]
    factors = [situation.factor(rank, step) for rank in range(16) for step in range(24)]
    assert 0.05 < sum(factor > 1 for factor in factors) / len(factors) < 0.15
    assert situation.factor(3, 1) == situation.factor(3, 25)
