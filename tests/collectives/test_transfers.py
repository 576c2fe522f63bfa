"""The messages that the live executor tells of are those that were sent, and telling changes nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests import workers

from headway.collectives import executor
from headway.collectives.algorithms import ALL_REDUCE, RING, sent_bytes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

CASES = "tests.collectives.transfer_cases"
ITEM_BYTES = 8  # rings are of doubles


RUN_BY = {
    1: ("rings",),
    2: ("rings", "nobody_wants_them", "concurrent"),
    3: ("rings", "rings_without_torchscript", "nobody_wants_them", "inside_each_other"),
    4: ("rings", "subgroups"),
}


@cache
def run(world_size: int) -> dict[str, list[Any]]:
    """What each rank returned, by case; processes are started once for all cases of a size."""
    ranks = workers.run(world_size, f"{CASES}:in_turn", RUN_BY[world_size], timeout_s=100)
    return {name: [rank[name] for rank in ranks] for name in RUN_BY[world_size]}


@pytest.mark.parametrize(
    ("world_size", "name"), [(2, "rings"), (3, "rings"), (4, "rings"), (3, "rings_without_torchscript")]
)
def test_every_message_of_a_ring_has_its_other_end(world_size: int, name: str) -> None:
    for ranks in zip(*run(world_size)[name], strict=True):
        case = {key: ranks[0][key] for key in ("kind", "numel", "pieces")}
        assert all(one["same"] for one in ranks), f"numbers changed: {case}"
        for wrong in _wrong(case, list(ranks)):
            pytest.fail(f"{wrong}: {case}")


def _wrong(case: dict[str, Any], ranks: list[dict[str, Any]]) -> list[str]:
    """What contradicts itself in the messages of one collective, as its ranks saw them on one clock."""
    world_size, kind, size_bytes = len(ranks), case["kind"], case["numel"] * ITEM_BYTES
    wrong, sent = [], []
    for rank, one in enumerate(ranks):
        begin_ns, end_ns = one["span"]
        if any(not begin_ns <= posted <= done <= end_ns for *_, posted, done in one["messages"]):
            wrong.append(f"rank {rank} has messages outside of the collective")
        sends = _of(one, True)
        right = (rank + 1) % world_size
        if {peer for peer, *_ in sends} - {right}:
            wrong.append(f"rank {rank} sends to others than its neighbour")
        receives = [rest for peer, *rest in _of(ranks[right], False) if peer == rank]
        if [size for _, size, *_ in sends] != [size for size, *_ in receives]:
            wrong.append(f"what rank {rank} sends is not what rank {right} receives")
        elif any(done < posted for (*_, posted, _), (*_, done) in zip(sends, receives, strict=True)):
            wrong.append(f"something came from rank {rank} before it was sent")
        sent.append(sum(size for _, size, *_ in sends))
    # Chunks differ by one element, of which a rank sends as many as there are rounds.
    expected = sent_bytes(RING, kind, world_size, size_bytes)
    rounds = (world_size - 1) * (2 if kind == ALL_REDUCE else 1)
    if any(abs(own - expected) > rounds * ITEM_BYTES for own in sent):
        wrong.append(f"ranks send {sent}, not {expected}")
    if sum(sent) != world_size * expected:
        wrong.append(f"all ranks send {sum(sent)}, not {world_size * expected}")
    return wrong


def _of(rank: dict[str, Any], sends: bool) -> list[list[int]]:
    """Peer, bytes, posted and done of one rank's sends or receives, in the order in which it asked for them."""
    rows = [rest for is_send, *rest in rank["messages"] if is_send == sends]
    return sorted(rows, key=lambda row: row[2])


def test_the_loop_with_its_times_runs_without_the_interpreter() -> None:
    assert isinstance(executor.compiled(), torch.jit.ScriptFunction)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_timed_where_nobody_asks(world_size: int) -> None:
    steps = 2 * 2 * (world_size - 1)
    for seen in run(world_size)["nobody_wants_them"]:
        assert seen == {"lengths": [0, 4 * steps, 0], "wanted": False}


def test_a_lone_rank_sends_nothing() -> None:
    assert all(case["messages"] == [] for case in run(1)["rings"][0])


def test_messages_go_to_the_innermost_who_asked() -> None:
    for seen in run(3)["inside_each_other"]:
        assert seen == {"outer": [4] * 2 * 2, "inner": [8] * 2, "failed": [4] * 2}


def test_threads_see_their_own_messages() -> None:
    for seen in run(2)["concurrent"]:
        # 20 collectives, a send and a receive of each of 4 half chunks.
        assert seen == [[200] * 160, [400] * 160, []]


def test_peers_are_ranks_of_the_job_in_a_subgroup() -> None:
    for rank, messages in enumerate(run(4)["subgroups"]):
        assert {peer for _, peer, *_ in messages} == {(rank + 2) % 4}
        assert [size for _, _, size, *_ in messages] == [16] * 4


def test_a_collective_that_fails_tells_of_nothing() -> None:
    *here, _gone = workers.run(3, f"{CASES}:a_peer_is_gone", group_timeout_s=5)
    for seen in here:
        assert seen["error"]
        assert seen["messages"] == []
