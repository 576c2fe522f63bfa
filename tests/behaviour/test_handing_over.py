"""Stock DDP in the place of a decoupled model's engine, and back: nothing of either is left behind by the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import workers
from tests.behaviour import handing_over_cases, tuning_cases
from tests.behaviour.tuning_cases import STEPS, agrees, alone

from headway.strategies.decisions import read_journal

CASES = "tests.behaviour.handing_over_cases"
USUAL_INTERVAL_S = 0.005

pytestmark = pytest.mark.processes


def test_nothing_of_ours_is_left_in_the_stock_form_nor_of_stock_in_ours() -> None:
    results = workers.run(2, f"{CASES}:what_is_left")
    agrees(results, handing_over_cases.what_is_left_alone(2))
    for result in results:
        assert result["calls"] == 18  # a hook of the script stays
        assert result["reducer"]
        found = result["found"]
        for name in ("ours", "ours again", "back"):
            here = found[name]
            assert not here["stock"]
            assert here["in force"] == "decoupled"
            assert (here["hooks"] > 0, here["buckets"] > 0, here["threads"] != []) == (True, True, True)
            assert here["watched state"]
            assert here["interval"] < USUAL_INTERVAL_S
        smaller, own = found["buckets"]
        assert smaller > own
        for name in ("smaller buckets", "aside", "for good"):
            here = found[name]
            assert here["stock"]
            assert here["in force"] == "ddp"
            assert (here["hooks"], here["buckets"]) == (0, 0)
            assert not any(here[what] for what in ("watched state", "own zero_grad", "registered"))
            assert here["ordinary"]
            assert here["interval"] == USUAL_INTERVAL_S
        assert found["for good"]["threads"] == []
        assert found["for good"]["descriptors"] <= 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_servers_take_over_from_ours_and_from_stock_ddp_and_leave_nothing(world_size: int) -> None:
    results = workers.run(world_size, f"{CASES}:through_servers")
    agrees(results, handing_over_cases.through_servers_alone(world_size))
    for result in results:
        found = result["found"]
        in_force = {name: here["in force"] for name, here in found.items()}
        assert in_force == {
            "ours": "decoupled", "servers": "parameter_server", "unequal": "parameter_server", "stock": "ddp",
            "servers again": "parameter_server", "ours again": "decoupled", "for good": "ddp",
        }  # fmt: skip
        for name in ("servers", "unequal", "servers again"):
            assert found[name]["threads"] != []
            assert (found[name]["hooks"], found[name]["ordinary"]) == (0, True)
        assert found["for good"]["threads"] == []
        assert result["descriptors"] <= 1


@pytest.mark.parametrize("initial", [True, False])
def test_uneven_inputs_are_trained_through_servers_as_under_stock_ddp(initial: bool) -> None:
    """Where gradients are divided by the ranks that are left, stock DDP goes on without servers."""
    for stock, served in workers.run(2, f"{CASES}:joined_through_servers", initial):
        agrees([served], stock)
        assert served["in force"] == ("parameter_server" if initial else "ddp")


def test_servers_keep_their_connections_while_other_parameters_are_trained() -> None:
    results = workers.run(2, f"{CASES}:frozen_in_turns")
    agrees(results, handing_over_cases.frozen_in_turns_alone(2))
    assert all(result["kept"] for result in results)


@pytest.mark.parametrize(
    ("world_size", "optimizer", "best"), [(2, "adam", 1), (3, "sgd", 1), (2, "sgd", 0)], ids=str
)
def test_a_tuner_goes_over_to_stock_ddp_and_back(
    world_size: int, optimizer: str, best: int, tmp_path: Path
) -> None:
    journal = tmp_path / "decisions"
    results = workers.run(world_size, f"{CASES}:tuned_in_turns", optimizer, best, str(journal))
    reference = tuning_cases.alone(optimizer, tuning_cases.STEPS, world_size, sometimes_accumulate=True)
    agrees(results, reference)
    for result in results:
        assert result["forms"] == results[0]["forms"]
        changes = [
            form for form, before in zip(result["forms"][1:], result["forms"], strict=False) if form != before
        ]
        assert (
            changes[:6]
            == ["stock", "gradients", "stock", "parameters", "stock", "parameters"][: len(changes)]
        )
        assert changes.count("stock") == 3
        assert (result["forms"][-1] == "stock") == (best == 1)
        assert result["engine"] == (best == 0)
    (entry,) = read_journal(journal)
    assert entry.order == results[0]["strategy"]
    assert results[0]["verdict"] in entry.reason
    assert entry.switches


def test_what_stock_ddp_would_not_reduce_is_not_handed_over() -> None:
    results = workers.run(2, f"{CASES}:several_backwards")
    agrees(results, handing_over_cases.several_backwards_alone(2))
    for result in results:
        assert "stock" not in result["forms"]
        assert "stock DDP was not tried" in result["said"]


def test_backwards_are_counted_as_ours_are() -> None:
    assert workers.run(2, f"{CASES}:counted_backwards") == [[0, 1, 2, 2, 3]] * 2


def test_moments_at_which_it_is_refused() -> None:
    for result in workers.run(2, f"{CASES}:refused"):
        assert len(result) == 2, result
        assert "join()" in result[0]


def test_a_model_that_stock_ddp_refuses_stays_decoupled() -> None:
    results = workers.run(2, f"{CASES}:refused_by_stock_ddp")
    assert results[0]["digest"] == results[1]["digest"]
    for result in results:
        assert "stock" not in result["forms"]
        assert "SyncBatchNorm" in result["said"]
        assert result["hooks"] > 0


def test_where_stock_ddp_fails_on_one_rank_none_goes_over() -> None:
    first, second = workers.run(2, f"{CASES}:refused_on_one_rank")
    assert first == second
    assert list(first[:2]) == [False, True]


def test_a_single_worker_is_left_to_stock_ddp() -> None:
    (result,) = workers.run(1, f"{CASES}:alone_in_the_job")
    assert result["stock"]
    assert "a single worker does not communicate" in result["said"]
    agrees([result], alone("adam", STEPS, 1))


def test_what_the_script_hands_over_itself_stays() -> None:
    results = workers.run(2, f"{CASES}:handed_over_while_stock_is_tried")
    assert (
        results == [[True, True, "DDP, bucket_cap_mb=0.001", "the script put another schedule in force"]] * 2
    )
