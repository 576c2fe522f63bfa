"""Plans of partial all-reduce through ``headway.parallelize``, with real coordinators, against one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import workers
from tests.behaviour.decentralised import job

from headway.strategies.partial_all_reduce.coordinator.child import CoordinatorProcess
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice
from headway.strategies.partial_all_reduce.coordinator.security import write_secret

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

CASES = "tests.behaviour.decentralised.joined_cases"
STEPS = 6


def check_against_reference(results: list[Any], options: dict[str, Any]) -> None:
    rounds = [result["rounds"] for result in results]
    expected = job.reference(4, rounds, STEPS, moments=options.get("moments", "local"), buffers="averaged")
    for result, found in zip(results, expected, strict=True):
        assert result["values"] == pytest.approx(found, rel=1e-9, abs=1e-12)
        assert result["ranks"] == [0, 1, 2, 3]
        assert result["final"] == results[0]["final"]
    mean = torch.tensor([result["values"] for result in results], dtype=torch.float64).mean(0)
    assert results[0]["final"] == pytest.approx(mean.tolist(), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"groups": "static", "group_size": 2, "hosts": [2, 2]}, marks=pytest.mark.exhaustive),
        {"groups": "static", "staleness": 1},
        {"groups": "all"},
        pytest.param({"groups": "all", "staleness": 1, "moments": "averaged"}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"groups": "first-come", "group_size": 2, "deadline_ms": 50}, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"groups": "global-division", "group_size": 2, "slowdown_threshold": 5, "seed": 2**40},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"groups": "inter-intra", "group_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"groups": "group-buffer", "group_size": 3, "mixing_window": 3}, marks=pytest.mark.exhaustive
        ),
        pytest.param({"groups": "random", "group_size": 3}, marks=pytest.mark.exhaustive),
        {"groups": "pairs", "neighbours": "any"},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values())[:30],
)
def test_parallelize_mixes_as_the_matrices_of_its_groups(options: dict[str, Any]) -> None:
    results = workers.run(4, f"{CASES}:trains", options, STEPS)
    check_against_reference(results, options)
    for result in results:
        assert result["is_ddp"]
        assert result["names"][0].startswith("module.0.")
        members = [each["members"] for each in result["rounds"] if each["ending"] == "committed"]
        assert len(members) > 1
        if options["groups"] == "all":
            assert members == [[0, 1, 2, 3]] * STEPS
        elif options["groups"] == "static":
            assert [0, 1, 2, 3] in members or [0, 1] in members or [2, 3] in members
        else:
            assert (
                max(map(len, members)) <= options.get("group_size", 2) or options["groups"] == "inter-intra"
            )
            made = {name: value for name, value in options.items() if name not in ("groups", "seed")}
            choice = GeneratorChoice(str(options["groups"]), made, options.get("seed", 0))
            assert result["generator"] == str(choice)


def test_groups_of_all_are_the_averages_of_one_process() -> None:
    """Written down without rounds: SGD with momentum on each worker, then the mean over all, step after step."""
    results = workers.run(4, f"{CASES}:trains", {"groups": "all"}, STEPS)
    alone = [job.Reference(worker, average_moments=False, average_buffers=True) for worker in range(4)]
    for step in range(STEPS):
        for each in alone:
            each.advance(step + 1)
        means = [torch.stack(parts).mean(0) for parts in zip(*(each.mixed for each in alone), strict=True)]
        for each in alone:
            for tensor, mean in zip(each.mixed, means, strict=True):
                tensor.copy_(mean)
    for result in results:
        assert result["values"] == pytest.approx(job.values(alone[0].module), rel=1e-9, abs=1e-12)


def test_static_groups_are_of_the_hosts_that_ranks_find_themselves_on() -> None:
    options = {"groups": "static", "group_size": 2}
    results = workers.run(4, f"{CASES}:trains_on", "abab", options, STEPS)
    check_against_reference(results, options)
    members = [tuple(each["members"]) for each in results[0]["rounds"]]
    assert set(members) == {(0, 2), (0, 1)}, "within the host, and across hosts"


@pytest.mark.parametrize(
    "options",
    [
        {"groups": "all"},
        *(
            pytest.param(options, marks=pytest.mark.exhaustive)
            for options in ({"groups": "static"}, {"groups": "all", "staleness": 1})
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("begins_frozen", [False, True], ids=["freezes", "thaws"])
def test_frozen_parameters_and_buffers_are_the_same_on_all_ranks_at_the_end(
    options: dict[str, Any], begins_frozen: bool
) -> None:
    results = workers.run(3, f"{CASES}:freezes", options, begins_frozen)
    for result in results:
        assert result["ranks"] == [0, 1, 2]
        assert result["state"] == results[0]["state"]
        assert result["state"]["levels"][1] == -torch.inf
        # Where one thaws a layer a step after the others, one group takes no mean, and training goes on.
        assert result["endings"].count("aborted") == (1 if begins_frozen else 0)
        assert result["endings"].count("committed") == (7 if begins_frozen else 8)


def test_the_others_go_on_when_the_rank_with_the_coordinator_is_killed() -> None:
    first, *others = workers.launch(3, f"{CASES}:the_first_is_killed")
    assert first.status != 0
    for worker in others:
        assert worker.status == 0, worker.output
        assert worker.result["endings"].count("committed") >= 3
        assert worker.result["endings"][-1] == "alone"
        assert worker.result["ranks"] == [1, 2]
        assert worker.result["final"] == others[0].result["final"]


def test_what_would_train_wrongly_is_refused_on_every_rank() -> None:
    assert workers.run(2, f"{CASES}:refusals") == [{}, {}]


def test_a_coordinator_of_other_groups_is_refused() -> None:
    process = CoordinatorProcess(GeneratorChoice("pairs", {}, 2))
    try:
        said = workers.run(2, f"{CASES}:other_groups", process.address, process.secret.decode())
    finally:
        process.close()
    assert all("generator differs from the plan" in each and "seed 3" in each for each in said)


def check_what_was_lost(results: list[Any]) -> list[str]:
    """Returns how the round ended, time after time, whose decision rank 1 did not hear."""
    rounds = [result["rounds"] for result in results]
    lost = [each["ending"] for each in rounds[1] if each["number"] == rounds[1][2]["number"]]
    steps = [each["steps"] for each in results]
    expected = job.reference(3, rounds, steps, moments="local", buffers="averaged")
    for result, found in zip(results, expected, strict=True):
        assert result["values"] == pytest.approx(found, rel=1e-9, abs=1e-12)
    return lost


def test_a_decision_that_was_not_heard_is_told_by_the_next_coordinator() -> None:
    """The coordinator is killed between vote and answer, and goes on from its journal at once."""
    process = CoordinatorProcess(GeneratorChoice("all"), lease_s=5.0)
    try:
        secret = process.secret.decode()
        results = workers.run(3, f"{CASES}:answers_are_lost", process.address, secret, process.pid, [])
    finally:
        process.close()
    assert check_what_was_lost(results)[-1] == "committed"


def test_a_decision_that_was_not_heard_in_time_is_asked_for(tmp_path: Path) -> None:
    """It comes back when the time for the vote is over, and the worker has gone on alone."""
    secret = write_secret(tmp_path / "secret")
    command = [
        sys.executable, "-m", "headway", "coordinate", "--json", "--with-parent", "--generator", "all",
        "--secret-file", str(tmp_path / "secret"), "--journal", str(tmp_path / "journal"),
    ]  # fmt: skip
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        again = [*command, "--listen", address]
        results = workers.run(3, f"{CASES}:answers_are_lost", address, secret, process.pid, again)
        process.kill()
    assert check_what_was_lost(results) == ["uncertain", "committed"]
