"""Training in one process whose losses say what averaging in groups costs."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from decentralised_training.loss_causes import VARIANTS, WORKERS, Variant, drawn_groups, trained
from decentralised_training.tasks import digits, tensors_of

NAMED = {each.name: each for each in VARIANTS}


def after(variant: Variant, iterations: int = 3) -> list[list[torch.Tensor]]:
    """The values of all workers after so many iterations on the digits."""
    task = digits()
    torch.manual_seed(0)
    first = task.make()
    workers = [copy.deepcopy(first) for _ in range(WORKERS)]
    training = trained(task, workers, variant, 0.04, seed=0)
    for _ in range(iterations):
        next(training)
    return [[value.detach() for value in tensors_of(each)] for each in workers]


def apart(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def test_steps_of_their_own_that_all_average_are_those_of_the_mean_gradient_where_these_are_linear() -> None:
    (reference, *_), averaged = after(NAMED["all-reduce"]), after(NAMED["own-steps"])
    parameters = len(
        list(digits().make().parameters())
    )  # of statistics each worker of all-reduce has its own
    assert all(apart(each[:parameters], reference[:parameters]) < 1e-5 for each in averaged)
    assert all(apart(each, averaged[0]) == pytest.approx(0, abs=1e-6) for each in averaged)


def test_groups_leave_models_apart_and_staleness_farther() -> None:
    groups, stale = after(NAMED["groups"]), after(NAMED["groups-stale"])
    assert len({float(each[0].sum()) for each in groups}) == WORKERS // 4
    assert apart(stale[0], stale[1]) > 0
    assert len({float(each[0].sum()) for each in stale}) == WORKERS


def test_every_worker_is_in_one_group() -> None:
    groups = drawn_groups(4, random.Random(1))
    assert sorted(each for group in groups for each in group) == list(range(WORKERS))
    assert {len(each) for each in groups} == {4}
