"""Local SGD and DiLoCo: the numbers of one process that averages by hand, refusals, restarts, peers that die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import workers

from headway.cluster import Cluster, Host
from headway.errors import UnsupportedError
from headway.replayer.replayer import Replayer
from headway.trace.folder import load_trace
from headway_baselines.local_sgd.policy import LocalSGDStrategy
from local_sgd_cases import alone

CASES = "local_sgd_cases"
HOSTS = tuple(Host(name=f"h{number}", workers=1, up_gbps=1, down_gbps=1) for number in range(2))
DILOCO = {"outer_optimizer": "sgd"}

pytestmark = pytest.mark.processes

CASES_OF_TRAINING: list[tuple[str, dict[str, Any], bool]] = [
    ("sgd", {"steps": 1}, False),
    ("sgd", {"steps": 4}, False),
    ("adam", {"steps": 4}, True),
    ("adam", {"steps": 3, "moments": "averaged", "buffers": "local"}, False),
    ("sgd", {"steps": 1, **DILOCO}, False),
    ("adam", {"steps": 4, **DILOCO}, True),
    ("adam", {"steps": 3, **DILOCO, "outer_learning_rate": 0.5, "outer_momentum": 0.8, "nesterov": False}, False),
    ("sgd", {"steps": 3, **DILOCO, "outer_learning_rate": 1.0, "outer_momentum": 0}, False),
]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 3])
def test_same_numbers_as_one_process_that_averages_by_hand(world_size: int) -> None:
    by_rank = workers.run(world_size, f"{CASES}:trained", CASES_OF_TRAINING)
    for number, (inner, options, finish) in enumerate(CASES_OF_TRAINING):
        for rank, expected in enumerate(alone(world_size, inner, options, finish)):
            for got, wanted in zip(by_rank[rank][number], expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12), (options, rank)
        if finish and options.get("buffers") != "local":
            assert all(own[number] == by_rank[0][number] for own in by_rank), "to the same bits"


def test_a_period_of_one_step_is_ddp_and_others_are_torchs_own_local_sgd() -> None:
    for found in workers.run(2, f"{CASES}:as_others_do"):
        for ours, theirs in (("ours 1", "ddp"), ("ours 3", "torch 3")):
            for got, wanted in zip(found[ours], found[theirs], strict=True):
                assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12), theirs


def test_a_rank_goes_on_from_its_checkpoint_to_the_bit() -> None:
    assert workers.run(2, f"{CASES}:restored") == [True, True]


def test_a_state_that_is_loaded_after_wrapping_is_trained_from() -> None:
    for found in workers.run(2, f"{CASES}:loaded"):
        for when in ("wrapper", "module", "late"):
            assert found[when] == found["before"], when
            assert ("after 3 steps" in found[f"said {when}"]) == (when == "late")


def test_what_would_train_wrongly_is_refused_on_all_ranks() -> None:
    for found in workers.run(2, f"{CASES}:refused"):
        said = {
            "a scaler": "leave out steps", "join": "join()", "a hook": "register_comm_hook",
            "compile": "before wrapping", "an option": "mixed_precision",
            "wrapped": "already wrapped",
            "no checkpoint": "no checkpoint", "state": "1 steps apart", "uneven": "same number of steps",
            "another optimizer": "same tensors", "another plan": "do not agree",
            "loaded alone": "with the same parameters",
        }  # fmt: skip
        assert {name: part for name, part in said.items() if part not in found.get(name, "")} == {}
        assert found["state"].count("apart") == 1, "said once"


def test_an_unmodified_script_follows_a_plan_and_is_recorded(tmp_path: Path) -> None:
    results = workers.run(2, f"{CASES}:unmodified", str(tmp_path))
    expected = alone(2, "sgd", {"steps": 3}, False)
    for result, wanted in zip(results, expected, strict=True):
        assert result["followed"]
        assert result["names"][0] == "module.0.weight"
        parameters = [0, 1, 2, 6, 7]  # buffers have seen one forward more
        for index in parameters:
            assert result["values"][index] == pytest.approx(wanted[index], rel=1e-9, abs=1e-12)
    replayer = Replayer(load_trace(tmp_path / "trace"), Cluster(hosts=HOSTS))
    assert replayer.recorded_strategy == LocalSGDStrategy(steps=3)
    with pytest.raises(UnsupportedError, match="Record the job under DDP"):
        replayer.replay()


def test_a_killed_peer_ends_the_others_with_a_word() -> None:
    ended = workers.launch(3, f"{CASES}:bereft", timeout_s=90, group_timeout_s=20)
    assert [worker.status for worker in ended] == [3, 3, -9]
    assert all("CommunicationError" in worker.output for worker in ended[:2])
    assert all("the average after step 8 failed" in worker.output for worker in ended[:2])


def test_torchs_local_sgd_averages_when_the_plan_does() -> None:
    first, second = workers.run(2, f"{CASES}:exported")
    for found in (first, second):
        for got, expected in zip(found["torch"], found["by hand"], strict=True):
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    apart = [one != other for one, other in zip(first["torch"], second["torch"], strict=True)]
    assert apart == [True, True, False, True, True, False, True]


def test_float16_is_refused_where_ranks_would_leave_out_steps_by_themselves() -> None:
    for said in workers.run(2, f"{CASES}:refused_in_float16"):
        assert "would leave out steps on single ranks" in said
