"""Tuning while training: the same results as without, the same changes on every rank, the best stays."""

from __future__ import annotations

from typing import Any

import pytest
from tests import workers
from tests.behaviour import tuning_cases
from tests.behaviour.tuning_cases import agrees

CASES = "tests.behaviour.tuning_cases"

pytestmark = pytest.mark.processes


def _same_changes(results: list[dict[str, Any]]) -> None:
    for key in ("schedules", "chosen", "tried", "measured", "predicted", "steps", "cluster"):
        assert all(result[key] == results[0][key] for result in results), key


@pytest.mark.parametrize(("world_size", "optimizer"), [(2, "sgd"), (3, "adam"), (2, "adam")])
def test_forms_channels_and_cuts_change_while_training(world_size: int, optimizer: str) -> None:
    steps = 30
    results = workers.run(world_size, f"{CASES}:scripted", optimizer, steps, {})
    agrees(results, tuning_cases.alone(optimizer, steps, world_size))
    _same_changes(results)
    result = results[0]
    assert len(set(result["schedules"])) == 6
    assert result["chosen"] == 2
    assert result["in force"]
    assert result["strategy"]
    assert result["steps"] == 3 + 5 * 4


@pytest.mark.parametrize(("world_size", "optimizer"), [(2, "adam"), (3, "sgd")])
def test_schedules_are_planned_from_the_steps(world_size: int, optimizer: str) -> None:
    steps = tuning_cases.STEPS
    options = {"sometimes_evaluate": True, "sometimes_accumulate": True}
    results = workers.run(world_size, f"{CASES}:planned", optimizer, steps, options)
    accumulated = {"sometimes_accumulate": True}
    agrees(results, tuning_cases.alone(optimizer, steps, world_size, **accumulated))
    _same_changes(results)
    result = results[0]
    assert result["ended early"] == ""
    assert result["steps"] <= 75
    assert result["in force"]
    assert result["strategy"]
    assert result["decides"]
    assert result["tried"][:2] == ["in force", "stock DDP"]
    assert len(result["tried"]) > 2
    assert all(
        (p is None) == (f == "stock") for p, f in zip(result["predicted"], result["forms"], strict=True)
    )
    assert all(predicted > 0 for predicted in result["predicted"] if predicted is not None)
    assert result["cluster"]["latency_us"] >= 0
    assert len(result["cluster"]["hosts"]) == world_size
    assert [len(each["log"]) for each in results] == [1] + [0] * (world_size - 1)
    assert "tuned in" in result["log"][0]
    assert result["observer"] == "NullObserver"
    hooks = 0 if result["stock"] else len(list(tuning_cases.net().modules()))  # the engine's own
    assert result["hooks"] == hooks


def test_training_goes_on_while_a_large_model_is_planned() -> None:
    results = workers.run(2, f"{CASES}:planned_apart", timeout_s=200)
    assert results[0] == results[1]
    assert results[0]["ended early"] == ""
    assert "planned" in results[0]["planned"]
    assert results[0]["steps"] > 40, "besides those in which plans were tried"


@pytest.mark.parametrize(("places", "workers_of"), [("aabb", [2, 2]), ("abab", [1] * 4), ("aaaa", [1] * 4)])
def test_schedules_are_planned_for_the_hosts_that_ranks_share(places: str, workers_of: list[int]) -> None:
    """Where a cluster can have them: in the order of ranks."""
    results = workers.run(4, f"{CASES}:planned_on_hosts", places)
    agrees(results, tuning_cases.alone("sgd", tuning_cases.STEPS, 4))
    _same_changes(results)
    cluster = results[0]["cluster"]
    assert [host["workers"] for host in cluster["hosts"]] == workers_of
    assert ("hierarchical" in cluster["algorithms"]) == (places == "aabb")
    assert all(result["cluster"] == cluster for result in results)


def test_an_unmodified_script_is_tuned() -> None:
    results = workers.run(2, f"{CASES}:injected")
    agrees(results, tuning_cases.alone("sgd", tuning_cases.STEPS, 2))
    _same_changes(results)
    assert results[0]["in force"]


@pytest.mark.parametrize("changes", [1, 3])
def test_other_parameters_are_trained_in_the_middle(changes: int) -> None:
    results = workers.run(2, f"{CASES}:freezing", changes)
    frozen = {6 + 5 * change: change % 2 == 0 for change in range(changes)}
    agrees(results, tuning_cases.alone("sgd", tuning_cases.STEPS, 2, frozen=frozen))
    _same_changes(results)
    assert ("again and again" in results[0]["ended early"]) == (changes == 3)
    assert results[0]["in force"] is (True if changes == 1 else None)


def test_what_ends_it_early() -> None:
    results = workers.run(2, f"{CASES}:left_alone")
    assert results[0] == results[1]
    assert "another schedule" in results[0]["another schedule"]
    assert results[0]["no backward"] == "goes on"
    assert results[0]["copies"] == "goes on"


def test_several_forwards_before_a_backward() -> None:
    results = workers.run(2, f"{CASES}:several_forwards")
    reference = tuning_cases.several_forwards_alone(2)
    for number in range(2):
        agrees([result[number] for result in results], reference[number])
        assert results[0][number]["chosen"] == results[1][number]["chosen"] is not None
    first, second = results[0]
    assert second["trained"] >= first["trained"] + second["steps"] - 2, "one after the other"


def test_ranks_may_call_the_model_unequally_often() -> None:
    results = workers.run(2, f"{CASES}:lopsided")
    agrees(results, tuning_cases.alone("sgd", tuning_cases.STEPS, 2))
    assert results[0]["chosen"] == results[1]["chosen"] is not None


@pytest.mark.parametrize(("before", "inputs"), [(9, (5, 6)), (5, (0, 3)), (4, (2, 0)), (12, (0, 0))], ids=str)
def test_it_pauses_while_joined(before: int, inputs: tuple[int, ...]) -> None:
    results = workers.run(2, f"{CASES}:joined", before, inputs)
    assert results[0] == results[1]
    assert results[0]["unfinished"]
    assert not results[0]["uneven"]
    assert results[0]["chosen"] is not None


def test_an_optimizer_that_needs_whole_gradients() -> None:
    results = workers.run(2, f"{CASES}:whole_gradients")
    agrees(results, tuning_cases.alone("sgd", tuning_cases.STEPS, 2))
    assert set(results[0]["forms"]) == {"gradients", "stock"}
