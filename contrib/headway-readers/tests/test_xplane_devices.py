"""Kernels, programs, replicas and steps in profiles that are made up."""

from typing import Any

import pytest

from headway.trace.events import Kind
from profiles import (
    Happened,
    program_of,
    ranks_of,
    space_of,
    steps_of,
)

BEGAN_NS = 1_790_000_000_000_000_000


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
