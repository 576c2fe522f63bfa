"""Asynchronous parameter servers: one worker is one process; several are the updates that their servers logged."""

from __future__ import annotations

import pytest
from tests import workers

from asynchronous_cases import LIMIT_S, replayed
from local_sgd_cases import STEPS

CASES = "asynchronous_cases"

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("inner", ["sgd", "momentum", "adam"])
def test_one_worker_is_one_process_to_the_bit(inner: str) -> None:
    (result,) = workers.run(1, f"{CASES}:trained", inner, None)
    assert result["values"] == result["alone"]
    assert result["staleness"] == [0.0, 0, STEPS]


@pytest.mark.parametrize(
    ("inner", "bound"), [("momentum", None), ("adam", None), ("adam", 0), ("groups", None)]
)
def test_what_servers_logged_gives_the_same_model_in_one_process(inner: str, bound: int | None) -> None:
    results = workers.run(3, f"{CASES}:trained", inner, bound)
    expected = replayed(inner, [result["log"] for result in results])
    parameters = [0, 1, 2, 6, 7]
    for result in results:
        assert result["values"][:5] == results[0]["values"][:5], "statistics too"
        for index, wanted in zip(parameters, expected, strict=True):
            assert result["values"][index] == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    every = sum(result["steps"] for result in results)
    for result in results:
        assert [version for *_, version in result["log"]] == list(range(every))
    stale = [version - read for result in results for _, _, read, version in result["log"]]
    told = sum(mean * pushes for mean, _, pushes in (result["staleness"] for result in results))
    assert told == pytest.approx(sum(stale))
    assert max(result["staleness"][1] for result in results) == max(stale)


def test_a_bound_holds_workers_together() -> None:
    first, second = workers.run(2, f"{CASES}:bounded")
    apart = [max(abs(one - other) for one, other in seen) for seen in (first, second)]
    assert apart[0] == 2, "one pushes its next gradient, and then waits for its answer"
    assert apart[1] <= 2


def test_an_unmodified_script_follows_a_plan_and_who_ends_serves_on() -> None:
    results = workers.run(2, f"{CASES}:unmodified")
    assert [result["followed"] for result in results] == [True, True]
    assert [result["iteration"] for result in results] == [3, STEPS]


def test_a_state_that_is_loaded_after_wrapping_is_trained_from() -> None:
    (found,) = workers.run(1, f"{CASES}:loaded")
    assert found["wrapper"] == found["module"] == found["alone"]


def test_a_state_that_one_rank_loads_is_refused() -> None:
    assert all("load the same state" in said for said in workers.run(2, f"{CASES}:loaded_alone"))


def test_a_worker_without_a_step_serves() -> None:
    first, second = workers.run(2, f"{CASES}:late", 1)
    assert first == second


def test_what_would_train_wrongly_is_refused() -> None:
    (found,) = workers.run(1, f"{CASES}:refused")
    said = {"closure": "step(closure)", "optimizer": "LBFGS", "some": "leaves parameters out",
            "fused": "a GradScaler", "option": "kind, a object",
            "load": "after the first step", "optimizer state": "has a state"}  # fmt: skip
    assert {name: part for name, part in said.items() if part not in found.get(name, "")} == {}
    assert "not fused" not in found


def test_who_ends_early_serves_for_longer_than_the_groups_time_limit() -> None:
    ended = workers.launch(2, f"{CASES}:ends_early", timeout_s=60, group_timeout_s=LIMIT_S)
    assert [worker.status for worker in ended] == [0, 0]
    assert "trained to the end" in ended[1].output


def test_finish_without_a_peer_is_a_communication_error() -> None:
    ended = workers.launch(2, f"{CASES}:unfinished", timeout_s=60, group_timeout_s=20)
    assert [worker.status for worker in ended] == [-9, 3]
    assert "CommunicationError" in ended[1].output
    assert "finish() failed" in ended[1].output


def test_a_killed_server_ends_the_others_with_a_word() -> None:
    ended = workers.launch(3, f"{CASES}:bereft", timeout_s=60, group_timeout_s=20)
    assert [worker.status for worker in ended] == [3, 3, -9]
    assert all(
        "CommunicationError" in worker.output and "a push of step" in worker.output for worker in ended[:2]
    )
