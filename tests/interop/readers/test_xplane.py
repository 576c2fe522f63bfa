import math
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interop.readers.damaging import damaged_bytes, refused
from tests.interop.readers.profiles import (
    FIXTURES,
    Happened,
    check,
    program_of,
    ranks_of,
    recorded,
    space_of,
    steps_of,
    unpacked,
)

from headway.errors import TraceError
from headway.interop.readers.foreign import ForeignRank
from headway.interop.readers.formats import FORMATS, SNIFFED_BYTES
from headway.interop.readers.xplane import reader
from headway.interop.readers.xplane.groups import Groups, kind_of
from headway.interop.readers.xplane.messages import program_class, space_class
from headway.interop.readers.xplane.names import phase_of, scope_of
from headway.interop.readers.xplane.programs import group_name
from headway.trace.events import Kind

# What is known of the jobs stands in fixtures/tensorflow/make.py and fixtures/jax/make.py.
TENSORFLOW = ("loop0", "loop1", "bare0", "fit0", "fit1")
JAX = ("single", "bare", "pair0", "pair1")
WORLD = (0, 1, 2, 3)
GRADIENTS_AND_LOSS_BYTES = (64 * 128 + 128 + 128 * 10 + 10 + 1) * 4
PADDED_BYTES = 9612 * 4
BEGAN_NS = 1_790_000_000_000_000_000
MS = 1_000_000


def one(name: str) -> ForeignRank:
    (rank,) = recorded(name)
    return rank


def spent_ms(rank: ForeignRank, kind: str, step: int) -> float:
    return float(rank.events.of_kind(kind).of_step(step).duration_ns.sum()) / MS


@pytest.mark.parametrize(
    "name", [f"tensorflow/{name}" for name in TENSORFLOW] + [f"jax/{name}" for name in JAX]
)
def test_each_recording_is_known_and_whole(name: str) -> None:
    data = unpacked(f"{name}.xplane.pb")
    assert next(one.name for one in FORMATS if one.recognises("x", data[:SNIFFED_BYTES])) == "xplane"
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
        for one in rank.events.of_kind(Kind.COLLECTIVE):
            spans.setdefault((one.name, one.sequence), []).append((one.enqueue_ns, one.end_ns))
    assert len(spans) == 9
    for members in spans.values():
        assert len(members) == 4
        assert max(start for start, _ in members) < min(end for _, end in members)


# Put together by hand: devices that were not at hand -----------------------------------------------------------


def gpu_space(**others: Any) -> Any:
    """Two steps of a GPU: the second one's kernels run long after they were launched."""
    host = [
        Happened("train", 1000, 900, {"step_num": 7}),
        Happened("train", 2000, 900, {"step_num": 8}),
    ]
    launches = [Happened("cuLaunchKernel", 1100 + 50 * at, 10, {"correlation_id": at}) for at in range(3)]
    launches += [
        Happened("cuLaunchKernel", 2100 + 50 * at, 10, {"correlation_id": 10 + at}) for at in range(3)
    ]
    computing, reducing = [], []
    for step, base in enumerate((1500, 5000)):
        named: dict[str, int | str] = {"hlo_module": "jit_step", "program_id": 1}
        computing += [
            Happened("fusion_1", base, 100, named | {"hlo_op": "fusion.1", "correlation_id": 10 * step}),
            Happened(
                "fusion_2", base + 400, 100, named | {"hlo_op": "fusion.2", "correlation_id": 10 * step + 2}
            ),
        ]
        reducing.append(
            Happened(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclKernelComm*)", base + 50, 300,
                named | {"hlo_op": "all-reduce-start.1", "correlation_id": 10 * step + 1},
            )
        )  # fmt: skip
    return space_of(
        {
            "/device:GPU:0": {
                "Stream #1(Compute)": computing,
                "Stream #2(Compute)": reducing,
                "Stream #3(MemcpyH2D)": [Happened("MemcpyH2D", 1200, 50, {"correlation_id": 0})],
                "XLA Ops": computing,
            },
            "/device:GPU:1": {},
            "/host:CPU": {"python": host, "Host Threads/1": launches},
        },
        **others,
    )


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    (rank,) = ranks_of(gpu_space().SerializeToString())
    assert rank.framework == "jax"
    assert rank.backend == "nccl"
    assert rank.rank is None
    events = rank.events
    assert [(one.step, one.start_ns, one.end_ns) for one in events.of_kind(Kind.STEP)] == [
        (7, 1500, 5000),
        (8, 5000, 5500),
    ]
    assert [(one.step, one.name, one.start_ns) for one in events.of_kind(Kind.COLLECTIVE)] == [
        (7, "all_reduce", 1550), (8, "all_reduce", 5050),
    ]  # fmt: skip
    assert [(one.start_ns, one.duration_ns) for one in events.of_kind(Kind.WAIT)] == [
        (1600, 250),
        (5100, 250),
    ]
    assert len(events.of_kind(Kind.FORWARD)) == 4  # not what TensorBoard derived from them, nor copies


def test_a_program_tells_the_size_and_the_group_of_a_collective() -> None:
    shape = {"element_type": 16, "dimensions": [10, 20]}
    started = {
        "name": b"all-reduce-start.1",
        "opcode": b"all-reduce-start",
        "shape": shape,
        "operand_ids": [1],
    }
    groups = {"replica_groups": [{"replica_ids": [0, 2]}, {"replica_ids": [1, 3]}]}
    program = program_of(
        "jit_step",
        [
            {
                "name": b"fusion.1", "opcode": b"fusion", "shape": shape,
                "metadata": {"op_name": b"jit(step)/jvp(mlp)/dot"},
            },
            started | {"device_list": groups, "use_global_device_ids": True, "channel_id": 1},
            {
                "name": b"fusion.2", "opcode": b"fusion", "shape": shape,
                "metadata": {"op_name": b"jit(step)/transpose(jvp(mlp))/dot"},
            },
        ],
        devices=4,
    )  # fmt: skip
    space = gpu_space(programs={"jit_step": program})
    execute = Happened(
        "[0] PjRtStreamExecutorLoadedExecutable::Execute (jit_step)", 1050, 40,
        {"name": "jit_step", "replica": 0, "partition": 3, "global_device_id": 9},
    )  # fmt: skip
    space.planes.add().CopyFrom(space_of({"/host:CPU": {"executes": [execute]}}).planes[0])
    (rank,) = ranks_of(space.SerializeToString())
    assert (rank.rank, rank.world_size) == (3, 4)
    collectives = rank.events.of_kind(Kind.COLLECTIVE)
    assert set(collectives.size_bytes.tolist()) == {10 * 20 * 2}
    assert set(collectives.group.tolist()) == {"1,3"}
    assert rank.groups == {"1,3": (1, 3)}
    assert set(rank.events.of_kind(Kind.FORWARD).name.tolist()) == {"mlp"}
    assert set(rank.events.of_kind(Kind.BACKWARD).name.tolist()) == {"mlp"}


def test_a_tpu_tells_its_own_steps_and_the_ends_of_collectives() -> None:
    operations = []
    for base in (0, 1000):
        operations += [
            Happened("%fusion.1 = f32[8] fusion(...)", base, 100),
            Happened("%all-reduce-start.1 = f32[8] all-reduce-start(...)", base + 100, 5),
            Happened("%fusion.2 = f32[8] fusion(...)", base + 105, 195),
            Happened("%all-reduce-done.1 = f32[8] all-reduce-done(...)", base + 300, 200),
        ]
    marks = [Happened("3", 0, 900), Happened("4", 1000, 900)]
    space = space_of(
        {
            "/device:TPU:0": {
                "Steps": marks,
                "XLA Ops": operations,
                "XLA Modules": [Happened("jit_step", 0, 900)],
            },
            "/host:CPU": {"python": [Happened("PjitFunction(step)", 0, 10)]},
        }
    )
    for plane in space.planes:
        for entry in plane.event_metadata:
            if entry.value.name.startswith(b"%"):
                entry.value.display_name = entry.value.name[1:].split(b" ")[0]
    (rank,) = ranks_of(space.SerializeToString())
    assert steps_of(rank.events) == [3, 4]
    assert [(one.start_ns, one.end_ns) for one in rank.events.of_kind(Kind.COLLECTIVE)] == [
        (100, 500),
        (1100, 1500),
    ]
    assert [(one.start_ns, one.duration_ns) for one in rank.events.of_kind(Kind.WAIT)] == [
        (100, 5), (300, 200), (1100, 5), (1300, 200),
    ]  # fmt: skip


def tensorflow_space() -> Any:
    """Two steps of a worker, each with two replicas' parts in one all-reduce."""
    shape = "(float[10,20];int32[])"
    main, compute, network = [], [], []
    for step, base in enumerate((1000, 2000)):
        run: dict[str, int | str] = {"step_id": 50 + step, "group_key": 1, "instance_key": 3, "shape": shape}
        main += [
            Happened("train", base, 900, {"step_num": 4 + step}),
            Happened("FunctionRun", base + 10, 5, {"id": 50 + step}),
        ]
        compute += [
            Happened("ExecutorState::Process", base + 20, 100, {"id": 50 + step}),
            Happened("model/dense/MatMul:MatMul", base + 30, 50),
            Happened("gradient_tape/model/dense/MatMul:MatMul", base + 85, 30),
            Happened("ExecutorState::Process", base + 130, 10, {"id": 99}),
            Happened("Iterator/Ahead:Mul", base + 131, 5),
        ]
        for replica in range(2):
            start_ns = base + 200 + 10 * replica
            network.append(Happened(f"CollectiveReduce_{replica}:CollectiveReduce", start_ns, 100, run))
    lines = {"python": main, "tf_Compute": compute, "collective_ops": network}
    return space_of({"/host:CPU": lines}, timestamp_ns=500, began_ns=BEGAN_NS)


def test_replicas_are_one_member_and_repeated_instances_are_told_apart() -> None:
    (rank,) = ranks_of(tensorflow_space().SerializeToString())
    assert rank.absolute
    assert steps_of(rank.events) == [4, 5]
    found = list(rank.events.of_kind(Kind.COLLECTIVE))
    assert [one.start_ns - BEGAN_NS for one in found] == [1700, 2700]
    assert [one.duration_ns for one in found] == [110, 110]
    assert [one.size_bytes for one in found] == [800, 800]
    assert found[0].sequence != found[1].sequence
    assert any("2 replicas" in note for note in rank.notes)
    assert rank.events.of_kind(Kind.FORWARD).name.tolist() == ["model/dense"] * 2  # not what reads ahead


def test_times_since_1970_are_taken_as_they_are() -> None:
    space = tensorflow_space()
    for plane in space.planes:
        for line in plane.lines:
            line.timestamp_ns = BEGAN_NS + 7
    (rank,) = ranks_of(space.SerializeToString())
    assert rank.absolute
    assert int(rank.events.start_ns.min()) == BEGAN_NS + 1007


def test_without_the_begin_times_count_from_nothing() -> None:
    space = tensorflow_space()
    del space.planes[-1]
    (rank,) = ranks_of(space.SerializeToString(), "run/worker.xplane.pb")
    assert not rank.absolute
    assert rank.clock == "run/worker.xplane.pb"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((1, 2, 3), [1, 2, 3]), ((0, 0, 0), [0, 1, 2]), ((-5, 1, 2), [0, 1, 2]), ((2**50, 1, 2), [0, 1, 2])],
)
def test_numbers_of_steps_that_cannot_be_are_counted(numbers: tuple[int, ...], expected: list[int]) -> None:
    main, compute = [], []
    for at, number in enumerate(numbers):
        main.append(Happened("train", 1000 * at, 900, {"step_num": number}))
        main.append(Happened("FunctionRun", 1000 * at + 1, 5, {"id": at}))
        compute.append(Happened("ExecutorState::Process", 1000 * at + 10, 100, {"id": at}))
        compute.append(Happened("a/MatMul:MatMul", 1000 * at + 20, 50))
    (rank,) = ranks_of(space_of({"/host:CPU": {"python": main, "tf": compute}}).SerializeToString())
    assert steps_of(rank.events) == expected
    assert any("counted" in note for note in rank.notes) == (expected != list(numbers))


def test_steps_follow_each_other_but_not_over_a_long_pause() -> None:
    main, compute = [], []
    for number, base in enumerate((0, 1000, 2000, 50_000, 51_000)):
        main.append(Happened("train", base, 400, {"step_num": number}))
        main.append(Happened("FunctionRun", base + 1, 5, {"id": number}))
        compute.append(Happened("ExecutorState::Process", base + 10, 100, {"id": number}))
        compute.append(Happened("a/MatMul:MatMul", base + 20, 50))
    (rank,) = ranks_of(space_of({"/host:CPU": {"python": main, "tf": compute}}).SerializeToString())
    assert rank.events.of_kind(Kind.STEP).duration_ns.tolist() == [1000, 1000, 400, 1000, 400]


# Parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "phase", "scope"),
    [
        ("jit(step)/shard_map/jvp(layer1)/dot_general", Kind.FORWARD, "layer1"),
        ("jit(step)/transpose(jvp(Model))/Dense_0/dot_general", Kind.BACKWARD, "Model/Dense_0"),
        ("jit(step)/jvp(jit(log_softmax))/sub;jvp()/x", Kind.FORWARD, "log_softmax"),
        ("jit(step)/optimizer/sub", Kind.OPTIMIZER, "optimizer"),
        ("jit(step)/while/body/add", "", "add"),
        ("model/dense/MatMul:MatMul", "", "model/dense"),
        ("gradient_tape/model/dense/MatMul:MatMul", Kind.BACKWARD, "model/dense"),
        ("replica_3/model/dense/BiasAdd:BiasAdd", "", "model/dense"),
        ("Adam/Adam/update/ResourceApplyAdam:ResourceApplyAdam", Kind.OPTIMIZER, "Adam/Adam/update"),
        ("SGD/update_0/AssignSubVariableOp:AssignSubVariableOp", Kind.OPTIMIZER, "SGD/update_0"),
        ("x:ResourceApplyGradientDescent", Kind.OPTIMIZER, "x"),
        ("sgdlike/MatMul:MatMul", "", "sgdlike"),
    ],
)
def test_names_tell_the_part_of_the_step_and_of_the_model(path: str, phase: str, scope: str) -> None:
    assert phase_of(path) == phase
    assert scope_of(path) == scope


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [
        ("all-reduce.12", "all_reduce", ""),
        ("psum_invariant.7", "all_reduce", ""),
        ("all_gather.3", "all_gather", ""),
        ("reduce-scatter-start.1", "reduce_scatter", "-start"),
        ("all-to-all-done", "all_to_all", "-done"),
        ("collective-permute.2", "permute", ""),
        ("all-reduce-scatter-fusion.1", "", ""),
        ("wrapped_reduce.1", "", ""),
        ("fusion.3", "", ""),
    ],
)
def test_instructions_that_communicate(name: str, kind: str, part: str) -> None:
    assert kind_of(name) == (kind, part)


def groups_of(partitions: int = 1, replicas: int = 1, opcode: str = "all-reduce", **fields: Any) -> Any:
    instruction = program_class()().module.computations.add().instructions.add(**fields)
    return Groups().of(instruction, opcode, replicas, partitions)


def test_groups_in_all_the_ways_they_are_written() -> None:
    listed = [{"replica_ids": [0, 1]}, {"replica_ids": [2, 3]}]
    turned = {"groups": 2, "devices_a_group": 4, "dimensions": [4, 2], "order": [1, 0]}
    mesh = {"axes": [{"size": 2}, {"size": 4}]}
    assert groups_of(partitions=4, use_global_device_ids=True, replica_groups=listed) == ((0, 1), (2, 3))
    assert groups_of(partitions=4, use_global_device_ids=True, device_list={"iota": turned}) == (
        (0, 2, 4, 6), (1, 3, 5, 7),
    )  # fmt: skip
    assert groups_of(iota_list=turned) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups_of(mesh_list={"mesh": mesh, "axes": [{"index": 0}]}) == ((0, 4), (1, 5), (2, 6), (3, 7))
    half = {"mesh": mesh, "axes": [{"index": 1, "part": {"before": 1, "size": 2}}]}
    assert groups_of(mesh_list=half) == ((0, 2), (1, 3), (4, 6), (5, 7))
    # Of replicas, each partition by itself; of replicas with all their partitions; of partitions within a replica.
    assert groups_of(partitions=2, replicas=4, replica_groups=listed) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups_of(partitions=2, replicas=4, replica_groups=listed, channel_id=1) == (
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    )
    assert groups_of(partitions=4, replicas=1, replica_groups=listed, channel_id=1, opcode="all-to-all") == (
        (0, 1), (2, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"replica_groups": [{"replica_ids": []}]},
        {"iota_list": {"groups": 2**62, "devices_a_group": 4, "dimensions": [2**40, 2**40]}},
        {"iota_list": {"groups": -1, "devices_a_group": -4, "dimensions": [-2, -2]}},
        {"mesh_list": {"mesh": {"axes": [{"size": 2**50}] * 9}, "axes": [{"index": 3}]}},
        {
            "mesh_list": {
                "mesh": {"axes": [{"size": 4}]},
                "axes": [{"index": 0, "part": {"before": 3, "size": 2}}],
            }
        },
        {
            "mesh_list": {
                "mesh": {"axes": [{"size": 4}]},
                "axes": [{"index": 0, "part": {"before": 0, "size": 0}}],
            }
        },
    ],
)
def test_groups_that_cannot_be_are_none(fields: dict[str, Any]) -> None:
    assert groups_of(**fields) == ()


def test_groups_are_called_by_their_members() -> None:
    assert group_name((3, 1, 2, 0), 4) == "world"
    assert group_name((4, 5, 6), 8) == "4-6"
    assert group_name((0, 8, 16), 32) == "0-16 by 8"
    assert group_name((7,), 8) == "7"
    assert group_name((1, 5), 8) == "1,5"
    many = [2**place % 100_003 for place in range(400)]
    assert group_name(many, 100_000) != group_name([*many[:-1], 99_999], 100_000)


# Damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00", b"\xff" * 100, b"{}", b"\x0a\x00", b"\x0a\xff\xff\xff\xff\x7f", b"\x1a" * 50,
        space_class("Space")().SerializeToString(), space_of({"/host:CPU": {"python": []}}).SerializeToString(),
        space_of({"/host:CPU": {"python": [Happened("main", 0, 5)]}}).SerializeToString(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lenient", [False, True])
def test_what_holds_nothing_is_refused_in_one_line(data: bytes, lenient: bool) -> None:
    with pytest.raises(TraceError) as caught:
        ranks_of(data, lenient=lenient)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused() -> None:
    data = unpacked("jax/single.xplane.pb")
    assert "damaged" in refused(lambda: ranks_of(data[: len(data) // 2]))
    assert "damaged" in refused(lambda: ranks_of(data, ending="the compressed file is truncated"))
    assert not refused(lambda: ranks_of(data, ending="the compressed file is truncated", lenient=True))


def test_leniently_a_broken_event_costs_only_itself() -> None:
    data = unpacked("tensorflow/loop0.xplane.pb")
    whole = ranks_of(data)[0]
    space = space_class("Space").FromString(data)
    written = {
        event.SerializeToString() for plane in space.planes for line in plane.lines for event in line.events
    }
    text = max((text for text in written if text in data), key=len)
    at = data.index(text)
    broken = data[:at] + b"\xff" * len(text) + data[at + len(text) :]
    assert "damaged" in refused(lambda: ranks_of(broken))
    (kept,) = ranks_of(broken, lenient=True)
    assert kept.dropped_events >= 1
    assert any("damaged" in note for note in kept.notes)
    assert len(kept.events) >= 0.9 * len(whole.events)


@pytest.mark.parametrize(
    ("field", "value"),
    [("duration_ps", -1), ("duration_ps", 2**63 - 1), ("timestamp_ns", 2**62), ("metadata_id", 12345)],
)
def test_events_that_cannot_be_are_refused_or_left_out(field: str, value: int) -> None:
    space = space_class("Space").FromString(unpacked("jax/single.xplane.pb"))
    plane = next(plane for plane in space.planes if plane.name == b"/host:CPU")
    setattr(plane.lines[1] if field == "timestamp_ns" else plane.lines[1].events[20], field, value)
    data = space.SerializeToString()
    assert "damaged" in refused(lambda: ranks_of(data))
    for rank in ranks_of(data, lenient=True):
        assert rank.dropped_events >= 1
        assert any("left out" in note for note in rank.notes)


def test_names_that_are_no_text_do_no_harm() -> None:
    space = space_class("Space").FromString(unpacked("jax/single.xplane.pb"))
    for plane in space.planes:
        for entry in plane.event_metadata:
            entry.value.name = b"\xff\xfe<script>\x00\x1b[31m" + entry.value.name
        for line in plane.lines:
            line.name = b"\xff" * 100_000
    for rank in ranks_of(space.SerializeToString()):
        check(rank)


def test_many_devices_are_refused_at_once() -> None:
    events = [Happened("fusion.1", at, 1, {"hlo_op": "fusion.1", "device_ordinal": at}) for at in range(6000)]
    space = space_of({"/host:CPU": {"threads": events}})
    assert "too many devices" in refused(lambda: ranks_of(space.SerializeToString()))


def test_deep_nesting_and_many_steps_take_no_long() -> None:
    deep = [Happened("ExecutorState::Process", at, 10**6 - 2 * at, {"id": at}) for at in range(20_000)]
    main = [Happened("train", 100 * at, 90, {"step_num": at}) for at in range(20_000)]
    main += [Happened("FunctionRun", 100 * at + 1, 5, {"id": at}) for at in range(20_000)]
    compute = [Happened("a/MatMul:MatMul", 50 * at, 7) for at in range(20_000)]
    space = space_of({"/host:CPU": {"python": main, "tf": [*deep, *compute]}})
    (rank,) = ranks_of(space.SerializeToString())
    assert len(steps_of(rank.events)) == 20_000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), name=st.sampled_from([*TENSORFLOW, *JAX]), lenient=st.booleans())
def test_damaged_bytes_raise_trace_errors_only(draw: st.DataObject, name: str, lenient: bool) -> None:
    folder = "tensorflow" if name in TENSORFLOW else "jax"
    data = damaged_bytes(draw, unpacked(f"{folder}/{name}.xplane.pb"))
    refused(lambda: ranks_of(data, lenient=lenient))


_ODD_NUMBERS = (0, 1, -1, 2**31, 2**61, 2**62, 2**63 - 1, -(2**63), 10**17, 10**18)
_ODD_TEXTS = (
    b"", b"\xff", b"9" * 10**5, b"<script>\x00\x1b[31m", b"/device:GPU:1", b"Steps", b"Stream #1(Kernel)", b"hlo_op",
    b"step_num", b"run_id", b"ncclKernel_AllReduce", b"all-reduce-start.1", b"all-reduce-done.1", b"while.1", b"a/b:C",
)  # fmt: skip


def harmed(draw: st.DataObject, message: Any) -> None:
    """Change one field somewhere inside ``message``, or take one of its parts away, or repeat one."""
    while True:
        field = draw.draw(st.sampled_from([one.name for one in message.DESCRIPTOR.fields]))
        value = getattr(message, field)
        if hasattr(value, "add") or hasattr(value, "append"):
            if not len(value):
                return
            at = draw.draw(st.integers(0, len(value) - 1))
            what = draw.draw(st.sampled_from(["within"] * 8 + ["remove", "repeat"]))
            if what == "remove":
                del value[at]
            elif what == "repeat":
                value.append(value[at])
            if what != "within" or not hasattr(value, "add"):
                return
            message = value[at]
        elif hasattr(value, "DESCRIPTOR"):
            message = value
        else:
            odd = (
                _ODD_TEXTS
                if isinstance(value, bytes)
                else (math.nan,)
                if isinstance(value, float)
                else _ODD_NUMBERS
            )
            with suppress(ValueError, TypeError):  # protobuf refuses what its field cannot hold
                setattr(message, field, draw.draw(st.sampled_from(odd)))
            return


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), name=st.sampled_from(["loop1", "pair0", "single"]), lenient=st.booleans())
def test_messages_with_odd_values_raise_trace_errors_only(
    draw: st.DataObject, name: str, lenient: bool
) -> None:
    folder = "tensorflow" if name in TENSORFLOW else "jax"
    space = space_class("Space").FromString(unpacked(f"{folder}/{name}.xplane.pb"))
    for _ in range(draw.draw(st.integers(1, 30))):
        harmed(draw, space)
    refused(lambda: ranks_of(space.SerializeToString(), lenient=lenient))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), lenient=st.booleans())
def test_damaged_programs_cost_no_more_than_what_they_tell(draw: st.DataObject, lenient: bool) -> None:
    space = space_class("Space").FromString(unpacked("jax/single.xplane.pb"))
    plane = next(plane for plane in space.planes if plane.name == b"/host:metadata")
    for entry in plane.event_metadata:
        for stat in entry.value.stats:
            if stat.bytes_value:
                program = program_class().FromString(stat.bytes_value)
                for _ in range(draw.draw(st.integers(0, 10))):
                    harmed(draw, program)
                stat.bytes_value = damaged_bytes(draw, program.SerializeToString() or b"\x00")
    ranks = ranks_of(space.SerializeToString(), lenient=lenient)
    assert len(ranks) == 4
    assert all(np.isin([5, 6, 7], rank.events.step).all() for rank in ranks)


# Who reads what ----------------------------------------------------------------------------------------------


def test_other_tools_documents_are_left_alone() -> None:
    others = [
        path
        for path in FIXTURES.rglob("*")
        if path.is_file()
        and path.suffix != ".py"
        and path.relative_to(FIXTURES).parts[0] not in ("tensorflow", "jax")
    ]
    for path in others:
        head = unpacked(str(path.relative_to(FIXTURES)))[:SNIFFED_BYTES]
        assert not reader.recognises(path.name, head), path


def test_a_name_helps_where_the_head_does_not_tell() -> None:
    space = space_of({"unheard of": {"line": [Happened("x", 0, 1)]}})
    head = space.SerializeToString()
    assert not reader.recognises("x.pb", head)
    assert reader.recognises("run/host.xplane.pb", head)
    assert not reader.recognises("run/host.xplane.pb", b'{"traceEvents": []}')
    assert not reader.recognises("x", b"")
