"""The checks of schedules of faults find what they are there for."""

from __future__ import annotations

from typing import Any

import pytest
from decentralised_training.fault_checks import recoveries, wrong
from decentralised_training.fault_schedules import COORDINATOR_HOST, LEAST_HEALTHY, WORKERS, schedule_of
from decentralised_training.fault_worker import stepped

Log = list[dict[str, Any]]


def _line(kind: str, at: float, x: float, **said: Any) -> dict[str, Any]:
    return {"kind": kind, "at": at, "x": x, "low": x, "high": x, **said}


def _round(at: float, x: float, ending: str = "committed", number: int = 0) -> dict[str, Any]:
    return _line(
        "round", at, x, iteration=1, ending=ending, number=number, members=[0, 1], iterations=[1, 1], reason="",
        checksum=0,
    )  # fmt: skip


def _job(ending: str = "committed") -> dict[str, Log]:
    """Two workers that step once and average once."""
    stepped_to = [stepped(0.0, worker, 1) for worker in (0, 1)]
    mean = sum(stepped_to) / 2
    logs: dict[str, Log] = {}
    for worker, x in enumerate(stepped_to):
        after = mean if ending == "committed" else x
        logs[f"{worker}.1"] = [
            _line("joined", 1.0, 0.0, iteration=0), _line("step", 2.0, x, iteration=1), _round(3.0, after, ending),
            _line("finished", 4.0, 1.0, workers=[0, 1], checksum=7, iteration=1),
        ]  # fmt: skip
    return logs


ENDED = {"0.1": 0, "1.1": 0}


@pytest.mark.parametrize("ending", ["committed", "aborted"])
def test_a_sound_job_is_found_sound(ending: str) -> None:
    assert wrong(_job(ending), ENDED, []) == []


def test_a_group_that_one_took_and_the_other_did_not_is_found() -> None:
    logs = _job()
    logs["1.1"][2] = _round(3.0, logs["1.1"][1]["x"], "aborted")
    assert any("others took it, worker 1 ended ['aborted']" in each for each in wrong(logs, ENDED, []))


def test_a_member_that_says_nothing_of_a_group_is_found() -> None:
    logs = _job()
    del logs["1.1"][2]
    assert any("worker 1 says nothing of it" in each for each in wrong(logs, ENDED, []))


@pytest.mark.parametrize("stale", [False, True])
def test_a_member_that_was_killed_before_it_could_say_so_is_none(stale: bool) -> None:
    logs = _job()
    del logs["1.1"][2:]
    if stale:  # it had made another step meanwhile
        logs["1.1"].append(_line("step", 2.4, stepped(logs["1.1"][1]["x"], 1, 2), iteration=2))
    for line in logs["0.1"]:
        line["workers"] = [0]
    kill = {"kind": "kill", "target": 1, "began_at": 2.5, "ended_at": 2.5}
    assert wrong(logs, {"0.1": 0, "1.1": 137}, [kill]) == []


def test_a_wrong_mean_and_a_torn_one_are_found() -> None:
    logs = _job()
    logs["0.1"][2]["x"] += 0.01
    assert any("worker 0 took" in each for each in wrong(logs, ENDED, []))
    logs = _job()
    logs["0.1"][2]["high"] += 0.01
    assert any("elements differ" in each for each in wrong(logs, ENDED, []))


def test_a_step_that_begins_elsewhere_is_found() -> None:
    logs = _job()
    logs["0.1"].insert(3, _line("step", 3.5, stepped(0.7, 0, 2), iteration=2))
    assert any("step 2 came to" in each for each in wrong(logs, ENDED, []))


def test_final_models_that_differ_and_ends_that_fail_are_found() -> None:
    logs = _job()
    logs["0.1"][3]["checksum"] = 8
    found = wrong(logs, {"0.1": 0, "1.1": 1}, [])
    assert "the final models differ" in found
    assert any("1.1 ended with status 1" in each for each in found)


def test_recovery_counts_survivors_only_and_from_the_end_where_all_are_hit() -> None:
    logs = {
        f"{worker}.1": [_line("joined", 0.0, 0.0), _round(5.0 + worker, 0.0)] for worker in range(WORKERS)
    }
    kill = {"kind": "kill", "target": 5, "began_at": 4.0, "ended_at": 4.0}
    (found,) = recoveries(logs, [kill])
    assert (found["first_s"], found["all_s"], found["back_s"]) == (1.0, 5.0, None)
    cut = {"kind": "cut", "target": COORDINATOR_HOST, "began_at": 1.0, "ended_at": 3.0}
    (found,) = recoveries(logs, [cut])
    assert (found["first_s"], found["all_s"]) == (2.0, 7.0)


def test_schedules_are_of_their_seed_and_leave_enough_workers() -> None:
    schedules = [schedule_of(seed) for seed in range(200)]
    assert schedules == [schedule_of(seed) for seed in range(200)]
    kinds = {fault.kind for each in schedules for fault in each.faults}
    assert kinds == {"kill", "stop", "cut", "join", "coordinator"}
    assert {each.staleness for each in schedules} == {0, 1}
    for each in schedules:
        gone = {fault.target for fault in each.faults if fault.kind == "kill"}
        assert WORKERS - len(gone) >= LEAST_HEALTHY
