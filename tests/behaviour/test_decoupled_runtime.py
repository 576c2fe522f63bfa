"""The decoupled runtime: overlap, order, and every way in which a job can end."""

from __future__ import annotations

import re
import signal

import pytest
from tests import workers
from tests.behaviour import decoupled_runtime_cases

from headway.rpc import trusted

CASES = "tests.behaviour.decoupled_runtime_cases"
ENDINGS = "tests.behaviour.decoupled_ending_cases"

pytestmark = pytest.mark.processes


def test_gathers_happen_under_the_next_forward() -> None:
    results = workers.run(2, f"{CASES}:overlap")
    for result in results:
        assert result["all_deferred"]
        assert result["switch_interval_s"] <= 1e-4
        inside_step = False
        waits_in_forward = updates = in_background = 0
        for kind, name, _bucket in result["events"]:
            if kind == "mark":
                inside_step = name == "step begins"
            elif kind == "background update":
                in_background += 1
            elif inside_step:
                assert kind == "done", f"{kind} of {name} inside step()"
            else:
                waits_in_forward += kind == "wait" and name == "all_gather"
                updates += kind == "update"
        assert updates == 2 * 8  # every bucket once a step
        assert in_background == (2 * 8 if result["gather"] == "parameters" else 0)
    # Rank 1 had not begun its backward when rank 0 was in its next forward, which had to wait for gathers.
    assert any(kind == "wait" and name == "all_gather" for kind, name, _ in results[0]["events"])
    assert sorted(results[0]["sequences"]) == sorted(results[1]["sequences"])
    assert sorted(s for s, _, _ in results[0]["sequences"]) == list(range(2 * 2 * 8))


def test_a_reader_on_one_rank_needs_nothing_of_the_others() -> None:
    results = workers.run(3, f"{CASES}:lone_reader")
    assert results[0] == results[1] == results[2]


def test_what_drifts_apart_under_stock_ddp_is_said_once() -> None:
    for unfrozen, second in workers.run(2, f"{CASES}:drift_under_stock_ddp"):
        assert unfrozen.startswith(
            "1.weight was unfrozen or added after the model was wrapped: this plan averages"
        )
        assert second.startswith("a second backward follows several forwards: this plan averages")


def test_destroying_the_group_finishes_the_work() -> None:
    results = workers.run(2, f"{ENDINGS}:destroyed_with_work_in_flight")
    assert results[0] == results[1]
    assert results[0]["interval_restored"]
    assert "process group" in results[0]["refused"]


def test_wrapped_models_that_go_out_of_use_leave_nothing() -> None:
    results = workers.run(2, f"{ENDINGS}:collected")
    assert results[0] == results[1]
    assert results[0]["threads"] == 0
    assert results[0]["peers"] == 1  # the last one's: another rank may still have a question


def test_a_backward_waits_for_all_buckets_that_share_a_parameter() -> None:
    expected = pytest.approx(decoupled_runtime_cases.accumulated_alone(), rel=1e-12)
    for found in workers.run(2, f"{CASES}:accumulated_over_split_parameters"):
        assert found == expected


def test_a_model_is_not_let_go_of_inside_the_collector() -> None:
    """It may run while this very thread holds a lock that letting go needs."""
    results = workers.run(2, f"{ENDINGS}:collected_while_a_lock_is_held", timeout_s=40)
    assert results[0] == results[1]


def test_a_sharded_state_outlives_its_wrapped_model() -> None:
    results = workers.run(3, f"{ENDINGS}:state_outlives_its_wrapper")
    assert results[0]["ours looked"] == pytest.approx(results[0]["stock looked"], rel=1e-12)
    for result in results:
        for ours, stock in zip(result["ours"], result["stock"], strict=True):
            assert ours == pytest.approx(stock, rel=1e-12)


def test_a_model_that_went_out_of_use_on_one_rank_does_not_hold_up_the_others() -> None:
    results = workers.run(3, f"{ENDINGS}:collected_on_one_rank", timeout_s=40)
    assert results[0] == results[1] == results[2]


def test_a_forked_process_refuses_to_wait() -> None:
    assert workers.run(2, f"{ENDINGS}:forked", timeout_s=40) == [[4, 3], [4, 3]]


def test_a_group_of_some_ranks() -> None:
    results = workers.run(3, f"{CASES}:many_wraps_of_subgroups")
    assert results[0] == results[2] != 0.0


def test_a_rank_that_ends_early_still_does_its_part() -> None:
    for worker in workers.launch(2, f"{ENDINGS}:leaves_without_a_word", timeout_s=40, finalise=True):
        assert worker.status == 0, worker.output


@pytest.mark.parametrize("how", ["the script exits", "the script returns", "the model is kept"])
def test_a_rank_that_ends_early_answers_one_that_saves(how: str) -> None:
    for worker in workers.launch(2, f"{ENDINGS}:ends_while_another_saves", how, timeout_s=40, finalise=True):
        assert worker.status == 0, worker.output


def test_an_exception_on_one_rank_ends_all() -> None:
    first, second = workers.launch(2, f"{ENDINGS}:raises", timeout_s=40, group_timeout_s=10)
    assert "a fault of the script" in second.output
    assert first.status != 0
    assert "CommunicationError: rank 0" in first.output


def test_an_update_that_fails_is_not_called_a_lost_connection() -> None:
    peer, failed = workers.run(2, f"{ENDINGS}:an_update_fails", timeout_s=60, group_timeout_s=20)
    assert (failed["error"], failed["cause"]) == ("InternalError", "TypeError")
    assert re.match(r"rank 1: the update of bucket .* internal error, .* TypeError: ", failed["message"])
    assert peer["error"] == "CommunicationError"
    assert "rank 1 failed with an internal error, TypeError" in peer["message"]
    for found in (peer, failed):
        assert set(found["parsing"]) == {"MainThread"}, "two threads that parse at once fail at times"


def test_ranks_that_will_never_agree_say_so_at_once() -> None:
    # The group's timeout is never waited for: it is longer than the test may last.
    found = workers.run(2, f"{ENDINGS}:disagreeing", timeout_s=90, group_timeout_s=900)
    for rank, said in enumerate(found):
        for gather in ("parameters", "gradients"):
            assert said[gather].startswith(f"CommunicationError: rank {rank}: "), said
            assert "rank 1 did not take optimizer step 3, which rank 0 took" in said[gather], said
    assert re.match(
        r"InternalError: rank 1: .* MemoryError: no room for another event", found[1]["observer"]
    ), found
    assert "rank 1 failed with an internal error, MemoryError" in found[0]["observer"], found


def test_what_a_rank_can_save_whose_peer_ended_before_the_step() -> None:
    saved, _ = workers.run(2, f"{ENDINGS}:interrupted", timeout_s=90, group_timeout_s=900)
    assert saved["said"].startswith("CommunicationError: rank 0: "), saved
    assert "the script of rank 1 has ended without the all_gather" in saved["said"], saved
    assert "It took 2 steps of optimizers, this rank 3" in saved["said"], saved
    assert "call recover() on the wrapped model" in saved["said"], saved
    assert (saved["missing"], saved["as before"]) == (1, True)
    assert saved["state"].startswith("UnsupportedError: an optimizer's state is spread over ranks"), saved


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_an_emergency_checkpoint_has_the_last_step_of_all_ranks(gather: str) -> None:
    saved, failed = workers.launch(
        2, f"{ENDINGS}:emergency", gather, timeout_s=60, group_timeout_s=900, finalise=True
    )
    assert "ValueError: a bad sample" in failed.output
    assert saved.result["as after three steps"], saved.output


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_killed_peer_is_reported(world_size: int) -> None:
    ended = workers.launch(world_size, f"{ENDINGS}:killed", timeout_s=40, group_timeout_s=10)
    assert ended[1].status == -signal.SIGKILL
    for worker in ended:
        if worker.rank != 1:
            assert worker.status == 0, worker.output
            # A collective breaks, or whoever asks for gradients finds nobody.
            assert re.match(rf"rank {worker.rank}: (the |rank 1 has ended)", worker.result), worker.result


def test_strangers_get_nothing_and_disturb_nobody() -> None:
    results = workers.run(2, f"{CASES}:strangers_at_the_door", timeout_s=90)
    for result in results:
        assert result["host"] == "127.0.0.1"
        assert result["threads"] <= 2
        assert result["heard"] == trusted.NONCE_BYTES
        assert result["sums"] == results[0]["sums"] != []
        assert "UntrustedError" in result["refused"]


@pytest.mark.parametrize("how", ["torch", "Accelerate"])
def test_clipping_by_norm_fetches_no_gradient(how: str) -> None:
    results = workers.run(2, f"{CASES}:clipping_asks_no_peer", how, timeout_s=120)
    assert results[0] == results[1]
    assert (results[0]["clipping"], results[0]["looking"]) == (0, 1)
    assert results[0]["norm"] == pytest.approx(results[0]["norm alone"], rel=1e-12)
    assert results[0]["norm"] > 0.1
    assert results[0]["apart"] < 1e-9


def test_accelerate_clips_dtensors_in_its_own_way() -> None:
    clipped = 3.0 / (16 + 18) ** 0.5
    for result in workers.run(2, f"{CASES}:accelerate_clips_sharded_parameters", timeout_s=120):
        assert result["mixed"] == pytest.approx((16 + 18) ** 0.5)
        assert result["plain"] == pytest.approx(2**0.5 * clipped, rel=1e-4)


def test_a_dropped_optimizers_state_is_kept_until_no_rank_can_look() -> None:
    first, second = workers.run(
        2, f"{CASES}:a_slower_rank_looks_at_a_state_that_another_has_dropped", timeout_s=120
    )
    assert first == second
    assert all(first)
