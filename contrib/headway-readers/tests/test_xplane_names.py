"""What names, instructions and groups of XLA tell."""

from typing import Any

import pytest

from headway.trace.events import Kind
from headway_readers.xplane.groups import Groups, kind_of
from headway_readers.xplane.messages import program_class
from headway_readers.xplane.names import phase_of, scope_of
from headway_readers.xplane.programs import group_name

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
