"""XLA's compiled programs: where instructions come from, what collectives carry and among whom."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Any

from headway_readers.xplane import groups
from headway_readers.xplane.messages import program_class

_ITEM_BITS = {
    1: 8, 2: 8, 3: 16, 4: 32, 5: 64, 6: 8, 7: 16, 8: 32, 9: 64, 10: 16, 11: 32, 12: 64, 15: 64, 16: 16, 18: 128,
    19: 8, 20: 8, 21: 4, 22: 4, 23: 8, 24: 8, 25: 8, 26: 2, 27: 2, 28: 8, 29: 8, 30: 1, 31: 1, 32: 4, 33: 8,
}  # fmt: skip
MAX_DIMENSIONS = 64
LONGEST_NAME = 200
LONGEST_PATH = 400  # characters that are kept of an instruction's path and name
_NUMBER_IN_NAME = re.compile(r"\((\d{1,19})\)$")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. ``operand_bytes`` is what a collective is given on one device, -1 where that is not known.

    ``groups`` are the devices that a collective joins, by their logical numbers; none stands for all of them.
    """

    opcode: str
    path: str  # in the program that the user wrote: "jit(step)/jvp(layer)/dot_general"
    operand_bytes: int = -1
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(eq=False)
class Programs:
    """The programs of a profile, by the numbers that its events call them by, or else by their names."""

    by_number: dict[int, Mapping[str, Instruction]] = field(default_factory=dict)
    by_name: dict[str, Mapping[str, Instruction]] = field(default_factory=dict)
    worlds: dict[str, int] = field(default_factory=dict)  # devices that a program runs on, by its name
    unreadable: int = 0
    _groups: groups.Groups = field(default_factory=groups.Groups)

    def __bool__(self) -> bool:
        return bool(self.by_number)

    def add(self, packed: bytes, name: str, number: int | None) -> None:
        """Read one program. One that cannot be read is counted: a profile is of use without it."""
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        try:
            module = program_class().FromString(packed).module
        except DecodeError:
            self.unreadable += 1
            return
        own_name = _text(module.name)
        stated = _NUMBER_IN_NAME.search(name)
        if number is None and stated:
            number = int(stated[1])
        replicas, partitions = (
            module.device_assignment.replica_count,
            module.device_assignment.computation_count,
        )
        if replicas <= 0 or partitions <= 0 or replicas * partitions > groups.MAX_DEVICES:
            replicas = partitions = 1
        else:
            self.worlds[own_name] = replicas * partitions
        instructions = self._instructions(module, replicas, partitions)
        if number is not None:
            self.by_number[number] = instructions
        self.by_name[own_name] = instructions

    def find(self, number: int | None, module: str, instruction: str) -> Instruction | None:
        """What is known of an instruction of a program."""
        program = self.by_number.get(number) if number is not None else None
        if program is None:
            program = self.by_name.get(module)
        return None if program is None else program.get(instruction)

    def _instructions(self, module: Any, replicas: int, partitions: int) -> dict[str, Instruction]:
        shapes = {
            one.id: one.shape for computation in module.computations for one in computation.instructions
        }
        roots = {
            computation.id: _text(one.opcode)
            for computation in module.computations
            for one in computation.instructions
            if one.id == computation.root_id
        }
        found: dict[str, Instruction] = {}
        for computation in module.computations:
            for one in computation.instructions:
                opcode, path = _text(one.opcode), _text(one.metadata.op_name)[:LONGEST_PATH]
                if opcode == "async-start" and one.called_computation_ids:
                    opcode = f"{roots.get(one.called_computation_ids[0], 'async')}-start"
                instruction = Instruction(opcode, path)
                if groups.is_collective(opcode):
                    given = _total(
                        _bytes_of(shapes[operand]) if operand in shapes else -1 for operand in one.operand_ids
                    )
                    instruction = Instruction(
                        opcode, path, given, self._groups.of(one, opcode, replicas, partitions)
                    )
                found[_text(one.name)[:LONGEST_PATH]] = instruction
        return found


def _bytes_of(shape: Any, depth: int = 0) -> int:
    """What a tensor, or a tuple of them, takes; -1 where it is of no known kind."""
    if shape.tuple_shapes:
        return _total(_bytes_of(one, depth + 1) for one in shape.tuple_shapes) if depth < 8 else -1
    bits = _ITEM_BITS.get(shape.element_type)
    if bits is None or len(shape.dimensions) > MAX_DIMENSIONS or any(size < 0 for size in shape.dimensions):
        return -1
    size = math.prod(shape.dimensions) * bits // 8
    return size if size < 2**62 else -1


def _total(parts: Iterable[int]) -> int:
    sizes = list(parts)
    return sum(sizes) if min(sizes, default=-1) >= 0 and sum(sizes) < 2**62 else -1


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def whole_bytes(kind: str, operand_bytes: int, members: int) -> int:
    """The whole tensor's size, of what one member gives to a collective of ``members``; -1 where it is not known."""
    if kind != "all_gather" or operand_bytes < 0:
        return operand_bytes
    return operand_bytes * members if members else -1


def group_name(members: Sequence[int], world: int) -> str:
    """What a group is called: by its members, or "world" where these are all."""
    if len(members) == world:
        return "world"
    ordered = sorted(members)
    apart = ordered[1] - ordered[0] if len(ordered) > 1 else 1
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1, max(apart, 1))):
        return f"{ordered[0]}-{ordered[-1]}" + (f" by {apart}" if apart > 1 else "")
    named = ",".join(map(str, ordered))
    return (
        named if len(named) <= LONGEST_NAME else f"{len(ordered)} of {sha1(named.encode()).hexdigest()[:12]}"
    )
