"""Which devices an instruction of XLA joins, by their logical numbers: replica · partitions + partition."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_DEVICES = 100_000
MAX_AXES = 10
MAX_LISTED = 5_000_000  # devices in all lists of a profile
_Groups = tuple[tuple[int, ...], ...]

_KINDS = {
    "all-reduce": "all_reduce", "psum": "all_reduce", "pmean": "all_reduce", "pmax": "all_reduce",
    "pmin": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter",
    "psum-scatter": "reduce_scatter", "all-to-all": "all_to_all", "ragged-all-to-all": "all_to_all",
    "collective-broadcast": "broadcast", "pbroadcast": "broadcast", "collective-permute": "permute",
    "ppermute": "permute",
}  # fmt: skip
# What JAX names an instruction by, where a program's own words for it are not known.
_INSTRUCTION = re.compile(
    r"^(all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:broadcast|permute)"
    r"|psum-scatter|psum|pmean|pmax|pmin|pbroadcast|ppermute)(?:-invariant)?(-start|-done)?(?:[.\d]*)$"
)


def is_collective(opcode: str) -> bool:
    """Whether an instruction of this opcode communicates, and is not only the end of one that does."""
    return opcode.removesuffix("-start") in _KINDS


def kind_of(instruction: str) -> tuple[str, str]:
    """What an instruction does by its opcode or name ("" if it does not communicate), and "-start", "-done" or ""."""
    found = _INSTRUCTION.match(instruction.replace("_", "-"))
    return (_KINDS[found[1]], found[2] or "") if found else ("", "")


class Groups:
    """The groups of a profile's collectives. Few lists occur, many times each; how much they may come to is bounded."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Groups] = {}
        self._devices = 0

    def of(self, instruction: Any, opcode: str, replicas: int, partitions: int) -> _Groups:
        """The groups of a collective; none where it joins all devices, or does not say whom."""
        lists = [getattr(instruction, name) for name in ("device_list", "iota_list", "mesh_list")]
        plain = [one.SerializeToString() for one in (*instruction.replica_groups, *lists)]
        mode = (instruction.use_global_device_ids, bool(instruction.channel_id), _between_partitions(opcode))
        key = (*plain, *mode, replicas, partitions)
        if key not in self._known:
            found = _expanded(instruction, opcode, replicas, partitions) if self._devices < MAX_LISTED else ()
            self._devices += sum(map(len, found))
            self._known[key] = found
        return self._known[key]


def _between_partitions(opcode: str) -> bool:
    return opcode.startswith(("all-to-all", "ragged-all-to-all", "collective-"))


def _expanded(instruction: Any, opcode: str, replicas: int, partitions: int) -> _Groups:
    listed = _listed(instruction)
    if instruction.use_global_device_ids or partitions == 1 or not listed:
        return listed
    if sum(map(len, listed)) * max(replicas, partitions) > MAX_DEVICES:
        return ()
    if not instruction.channel_id:  # replicas, each partition by itself
        return tuple(
            tuple(replica * partitions + partition for replica in group)
            for group in listed
            for partition in range(partitions)
        )
    if _between_partitions(opcode):  # each replica by itself
        return tuple(
            tuple(replica * partitions + partition for partition in group)
            for replica in range(replicas)
            for group in listed
        )
    return tuple(
        tuple(replica * partitions + partition for replica in group for partition in range(partitions))
        for group in listed
    )


def _listed(instruction: Any) -> _Groups:
    """The groups as they are listed, in each of the four ways that there have been."""
    if instruction.HasField("mesh_list"):
        return _of_mesh(instruction.mesh_list)
    if instruction.HasField("iota_list"):
        return _of_iota(instruction.iota_list)
    if instruction.HasField("device_list") and instruction.device_list.HasField("iota"):
        return _of_iota(instruction.device_list.iota)
    listed = instruction.device_list.replica_groups or instruction.replica_groups
    groups = tuple(tuple(group.replica_ids) for group in listed)
    return groups if all(groups) else ()


def _of_iota(listed: Any) -> _Groups:
    """Devices counted from 0, laid out as a box, turned, and cut into equal groups."""
    dimensions, order = list(listed.dimensions), list(listed.order)
    count = _devices(dimensions)
    if not count or listed.groups <= 0 or listed.groups * listed.devices_a_group != count:
        return ()
    if sorted(order) != list(range(len(dimensions))):
        order = list(range(len(dimensions)))
    devices = np.arange(count).reshape(dimensions).transpose(order)
    return _rows(devices.reshape(listed.groups, listed.devices_a_group))


def _of_mesh(listed: Any) -> _Groups:
    """Devices of a mesh that differ along some of its axes only, or along parts of axes."""
    sizes = [axis.size for axis in listed.mesh.axes]
    count = _devices(sizes)
    if not count:
        return ()
    devices = np.array(listed.mesh.device_ids if len(listed.mesh.device_ids) == count else range(count))
    dimensions: list[int] = []
    along: list[int] = []
    for index, size in enumerate(sizes):
        part = next((axis for axis in listed.axes if axis.index == index), None)
        pieces = [size]
        if part is not None and part.HasField("part"):
            before, own = part.part.before, part.part.size
            if before <= 0 or own <= 0 or size % (before * own):
                return ()
            pieces = [before, own, size // (before * own)]
        if part is not None:
            along.append(len(dimensions) + (len(pieces) > 1))
        dimensions += pieces
    across = [place for place in range(len(dimensions)) if place not in along]
    members = math.prod(dimensions[place] for place in along)
    return _rows(devices.reshape(dimensions).transpose([*across, *along]).reshape(-1, members))


def _devices(sizes: Sequence[int]) -> int:
    """How many devices a box of these sizes has; 0 where there is no such box."""
    if not 0 < len(sizes) <= MAX_AXES or min(sizes) <= 0:
        return 0
    count = math.prod(sizes)
    return count if count <= MAX_DEVICES else 0


def _rows(devices: Any) -> _Groups:
    rows: Sequence[Sequence[int]] = devices.tolist()
    return tuple(tuple(row) for row in rows)
