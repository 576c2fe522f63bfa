"""Profiles of TensorFlow and JAX that were recorded."""

from collections import Counter

import pytest

from headway.interop.readers.foreign import ForeignRank
from headway.interop.readers.formats import SNIFFED_BYTES, readers, recognised
from headway.trace.events import Kind
from profiles import (
    recorded,
    steps_of,
    unpacked,
)
from xplane_files import JAX, TENSORFLOW, one

WORLD = (0, 1, 2, 3)


GRADIENTS_AND_LOSS_BYTES = (64 * 128 + 128 + 128 * 10 + 10 + 1) * 4


PADDED_BYTES = 9612 * 4


MS = 1_000_000


def spent_ms(rank: ForeignRank, kind: str, step: int) -> float:
    return float(rank.events.of_kind(kind).of_step(step).duration_ns.sum()) / MS


@pytest.mark.parametrize(
    "name", [f"tensorflow/{name}" for name in TENSORFLOW] + [f"jax/{name}" for name in JAX]
)
def test_each_recording_is_known_and_whole(name: str) -> None:
    data = unpacked(f"{name}.xplane.pb")
    assert recognised("x", data[:SNIFFED_BYTES]) is readers()["xplane"]
    for rank in recorded(f"{name}.xplane.pb"):
        assert rank.absolute
        assert rank.host == "node0"
        assert rank.clock == "host node0"
        assert rank.dropped_events == 0
        assert len(steps_of(rank.events)) == 3


# TensorFlow --------------------------------------------------------------------------------------------------


def test_tensorflow_workers_tell_their_steps_and_collectives() -> None:
    ranks = [one(f"tensorflow/loop{worker}.xplane.pb") for worker in range(2)]
    assert [rank.rank for rank in ranks] == [0, 1]
    assert {(rank.framework, rank.backend) for rank in ranks} == {("tensorflow", "grpc")}
    assert ranks[0].groups == {"1": (0, 1)}  # which only the leader records
    for rank in ranks:
        assert steps_of(rank.events) == [10, 11, 12]
        collectives = rank.events.of_kind(Kind.COLLECTIVE)
        assert Counter(collectives.step.tolist()) == {10: 3, 11: 3, 12: 3}
        assert set(collectives.name.tolist()) == {"all_reduce"}
        assert set(collectives.group.tolist()) == {"1"}
        assert (collectives.size_bytes == -1).all()
        assert any("how much" in note for note in rank.notes)
    members = [{one.sequence: one for one in rank.events.of_kind(Kind.COLLECTIVE)} for rank in ranks]
    assert members[0].keys() == members[1].keys()
    for sequence, here in members[0].items():  # timed by one clock, so that they must overlap
        there = members[1][sequence]
        assert here.step == there.step
        assert here.enqueue_ns < there.end_ns
        assert there.enqueue_ns < here.end_ns


def test_tensorflow_tells_who_waits_for_input_and_who_for_the_other() -> None:
    quick, slow = (one(f"tensorflow/loop{worker}.xplane.pb") for worker in range(2))
    for step in (10, 11, 12):
        assert spent_ms(slow, Kind.INPUT, step) > 5
        assert spent_ms(quick, Kind.INPUT, step) < 1
        assert spent_ms(quick, Kind.WAIT, step) > spent_ms(slow, Kind.WAIT, step)


def test_tensorflow_operations_tell_the_parts_of_a_step() -> None:
    events = one("tensorflow/loop0.xplane.pb").events
    forward, backward, optimizer = (
        set(events.of_kind(kind).name.tolist()) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
    )
    assert {"sequential/dense", "sequential/dense_1"} <= forward
    assert {"sequential/dense", "sequential/dense_1/MatMul"} <= backward
    assert {"SGD/update_0", "SGD_1/update_0"} <= optimizer
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER):
        assert set(events.of_kind(kind).step.tolist()) == {10, 11, 12}


def test_keras_marks_its_steps_itself() -> None:
    for worker in range(2):
        rank = one(f"tensorflow/fit{worker}.xplane.pb")
        assert rank.rank == worker
        assert steps_of(rank.events) == [0, 1, 2]
        # The gradients, two parts of the loss's mean, and how many samples it is of.
        assert Counter(rank.events.of_kind(Kind.COLLECTIVE).step.tolist()) == {0: 4, 1: 4, 2: 4}
        assert any(note.startswith("4 collectives outside of the steps") for note in rank.notes)


def test_without_marks_each_call_of_the_function_is_a_step() -> None:
    rank = one("tensorflow/bare0.xplane.pb")
    assert steps_of(rank.events) == [0, 1, 2]
    assert Counter(rank.events.of_kind(Kind.COLLECTIVE).step.tolist()) == {0: 3, 1: 3, 2: 3}
    assert "Steps are not marked: each call of train is taken for one." in rank.notes


# JAX ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "first"), [("single", 5), ("bare", 0)])
def test_jax_devices_of_one_process_are_ranks(name: str, first: int) -> None:
    ranks = recorded(f"jax/{name}.xplane.pb")
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    for rank in ranks:
        assert (rank.framework, rank.version, rank.world_size) == ("jax", "0.10.2", 4)
        assert rank.groups == {"world": WORLD}
        assert steps_of(rank.events) == [first, first + 1, first + 2]
        collectives = list(rank.events.of_kind(Kind.COLLECTIVE))
        assert [(one.step, one.name, one.group, one.size_bytes) for one in collectives] == [
            (step, "all_reduce", "world", GRADIENTS_AND_LOSS_BYTES) for step in range(first, first + 3)
        ]
        assert Counter(rank.events.kind.tolist()) == {
            Kind.STEP: 3, Kind.COLLECTIVE: 3, Kind.WAIT: 3, Kind.FORWARD: 24, Kind.BACKWARD: 24, Kind.OPTIMIZER: 15,
        }  # fmt: skip
        assert {"hidden", "output"} <= set(rank.events.of_kind(Kind.FORWARD).name.tolist())
        assert {"hidden", "output"} <= set(rank.events.of_kind(Kind.BACKWARD).name.tolist())
        assert "optimizer" in rank.events.of_kind(Kind.OPTIMIZER).name.tolist()
    assert any("not marked" in note for note in ranks[0].notes) == (name == "bare")


def test_jax_processes_share_one_world() -> None:
    ranks = recorded("jax/pair0.xplane.pb") + recorded("jax/pair1.xplane.pb")
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    described = []
    for rank in ranks:
        assert rank.world_size == 4
        assert steps_of(rank.events) == [0, 1, 2]
        collectives = rank.events.of_kind(Kind.COLLECTIVE)
        assert Counter(zip(collectives.name.tolist(), collectives.size_bytes.tolist(), strict=True)) == {
            ("all_gather", PADDED_BYTES): 3, ("reduce_scatter", PADDED_BYTES): 3, ("all_reduce", 4): 3,
        }  # fmt: skip
        described.append({(one.name, one.group, one.sequence, one.step) for one in collectives})
        # The momentum's update stands under no scope that tells: it is what follows the last of the backward.
        assert set(rank.events.of_kind(Kind.OPTIMIZER).name.tolist()) == {"add", "sub"}
    assert described[1:] == described[:1] * 3


def test_jax_collectives_of_all_ranks_overlap() -> None:
    spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rank in recorded("jax/pair0.xplane.pb") + recorded("jax/pair1.xplane.pb"):
        for event in rank.events.of_kind(Kind.COLLECTIVE):
            spans.setdefault((event.name, event.sequence), []).append((event.enqueue_ns, event.end_ns))
    assert len(spans) == 9
    for members in spans.values():
        assert len(members) == 4
        assert max(start for start, _ in members) < min(end for _, end in members)
