"""Pipelines trained live in every order, held against the same training in one process."""

from __future__ import annotations

import re
import signal

import pytest
import torch
from tests import workers
from tests.behaviour import live_pipeline_cases as cases

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_order_trains_as_one_process_does(world_size: int) -> None:
    """Losses, parameters and evaluations; also where the order changes from step to step."""
    found = workers.run(world_size, "tests.behaviour.live_pipeline_cases:in_every_order", timeout_s=120)
    expected = cases.alone(world_size, len(cases.orders(world_size)))
    for rank, own in enumerate(found):
        assert set(own) == {*cases.orders(world_size), "all in turn"}
        last = rank == world_size - 1
        for name, steps in own.items():
            for number, values in enumerate(steps):
                wanted = (expected[number]["losses"] if last else []) + expected[number][str(rank)]
                wanted += expected[number]["output"] if last and number == 0 else []
                assert_close(values, wanted, f"{name}, step {number}, rank {rank}")


def test_batches_split_anew_train_as_one_process_does() -> None:
    """Into fewer micro-batches than there are stages too; evaluations go through as many."""
    found = workers.run(3, "tests.behaviour.live_pipeline_cases:split_anew", timeout_s=120)
    expected = cases.alone(3, cases.STEPS)
    for rank, own in enumerate(found):
        assert set(own) == set(cases.ANEW)
        for order, steps in own.items():
            for number, values in enumerate(steps):
                wanted = expected[number][str(rank)]
                wanted = wanted + (expected[number]["output"] if rank == 2 and number == 0 else [])
                assert_close(values, wanted, f"{order}, step {number}, rank {rank}")


def test_several_stages_a_rank() -> None:
    found = workers.run(2, "tests.behaviour.live_pipeline_cases:several_stages_a_rank", timeout_s=120)
    expected = cases.alone(4, cases.STEPS)
    for rank, steps in enumerate(found):
        for number, values in enumerate(steps):
            wanted = expected[number]["losses"] if rank == 1 else []
            wanted = [*wanted, *expected[number][str(rank)], *expected[number][str(rank + 2)]]
            assert_close(values, wanted, f"step {number}, rank {rank}")


def test_a_hundred_switches_change_no_bit() -> None:
    for own in workers.run(3, "tests.behaviour.live_pipeline_cases:switched_often", timeout_s=120):
        assert own["often"] == own["never"]


def test_orders_that_follow_a_tuner_train_as_one_process_does() -> None:
    found = workers.run(2, "tests.behaviour.live_pipeline_cases:followed", timeout_s=120)
    expected = cases.alone(2, cases.FOLLOWED_STEPS)
    for rank, own in enumerate(found):
        for name, run in own.items():
            for number, values in enumerate(run["values"]):
                wanted = (expected[number]["losses"] if rank == 1 else []) + expected[number][str(rank)]
                assert_close(values, wanted, f"{name}, step {number}, rank {rank}")
    told = found[0]
    assert [each[1:] for each in told["scripted"]["decided"]][:6] == [
        [0, 1],
        [0, 1],
        [1, 2],
        [1, 2],
        [2, 0],
        [2, 0],
    ]
    assert len(told["thinking"]["decided"]) >= 1
    assert told["thinking"]["alive"]
    assert not told["killed"]["alive"]
    assert not found[1]["thinking"]["decided"]
    assert {run["left behind"] for own in found for run in own.values()} == {0}, "processes"


def test_all_name_the_stage_that_was_killed_and_none_hangs() -> None:
    ended = workers.launch(4, "tests.behaviour.live_pipeline_cases:killed", timeout_s=60, group_timeout_s=600)
    assert ended[1].status == -signal.SIGKILL
    for worker in ended:
        if worker.rank != 1:
            assert worker.status == 0, worker.output
            expected = (
                rf"rank {worker.rank}: the (activation|gradient) of micro-batch \d .*: rank 1 has ended"
            )
            assert re.match(expected, worker.result), worker.result


def test_all_name_the_replica_that_was_killed() -> None:
    """Also its replicas, which wait in an all-reduce, and who waits for these."""
    ended = workers.launch(
        4, "tests.behaviour.live_pipeline_cases:replica_killed", timeout_s=60, group_timeout_s=600
    )
    assert ended[3].status == -signal.SIGKILL
    for worker in ended[:3]:
        assert worker.status == 0, worker.output
        assert re.match(rf"rank {worker.rank}: .* failed: rank 3 has ended", worker.result), worker.result


@pytest.mark.parametrize(
    ("when", "what"),
    [("before the cut", "cutting the model into stages"), ("before the step", "the first step")],
)
def test_a_rank_that_is_missing_at_the_start_is_named(when: str, what: str) -> None:
    ended = workers.launch(2, "tests.behaviour.live_pipeline_cases:missing", when, timeout_s=60)
    assert ended[1].status == 3
    assert ended[0].result.startswith(f"rank 0: {what} failed: rank 1 has ended"), ended[0].result


def assert_close(values: list[float], wanted: list[float], where: str) -> None:
    torch.testing.assert_close(
        torch.tensor(values), torch.tensor(wanted), msg=lambda said: f"{where}: {said}"
    )
