"""What ran on a device: each event's instruction, what that is part of, and whether it computes or communicates."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from headway.arrays import Flags, Ints, Texts
from headway.ext import Kind, texts
from headway_readers.xplane.groups import kind_of
from headway_readers.xplane.names import kernel_of, phase_of, scope_of
from headway_readers.xplane.profile import Profile
from headway_readers.xplane.programs import Instruction

_CONTAINER = re.compile(r"^(?:while|conditional|call|async-call)(?:[.\d]*)$")
_COPY = re.compile(r"^(?:Mem(?:cpy|set)|Copy(?:Device|Host)|__amd_rocclr_(?:copy|fill))", re.IGNORECASE)
# What begins a copy that goes on by itself, and what waits for it.
_ASYNCHRONOUS = re.compile(
    r"^(?:copy|slice|dynamic-slice|dynamic-update-slice|async)-(?:start|update|done)(?:[.\d]*)$"
)
COMPUTES, COMMUNICATES, ENDS, NOTHING = range(4)


@dataclass(frozen=True, slots=True)
class What:
    """What events of one name are. ``begins``: the instruction only begins what another one ends."""

    role: int
    name: str
    instruction: str
    phase: str = ""  # "" where the instruction's path does not say
    known: Instruction | None = None
    begins: bool = False


@dataclass(frozen=True, eq=False)
class ExecutedInstructions:
    """Events of devices, by their places in the profile, in order of their start."""

    event: Ints
    what: Ints  # places in ``kinds``
    kinds: list[What]

    def where(self, mask: Flags) -> ExecutedInstructions:
        """The events that ``mask`` picks."""
        return ExecutedInstructions(self.event[mask], self.what[mask], self.kinds)

    def role(self, role: int) -> Flags:
        """Which events have this role."""
        fits = np.array([what.role == role for what in self.kinds], dtype=bool)
        return fits[self.what] if len(fits) else np.zeros(len(self.what), dtype=bool)

    def names(self) -> Texts:
        """The events' names."""
        return texts([what.name for what in self.kinds])[self.what]

    def phases(self) -> Texts:
        """The parts of the step that the events' own paths tell, "" where they do not."""
        return texts([what.phase for what in self.kinds])[self.what]


def executed(profile: Profile, events: Ints) -> ExecutedInstructions:
    """Look up what ``events`` of devices are."""
    ordered = events[np.argsort(profile.start_ns[events], kind="stable")]
    keys = np.empty((len(ordered), 7), dtype=np.int64)
    keys[:, 0] = profile.name[ordered]
    for column, key in enumerate(("program_id", "hlo_module", "hlo_op", "name", "tf_op", "annotation"), 1):
        values, known = profile.value(key)
        keys[:, column] = np.where(known[ordered], values[ordered], -1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    return ExecutedInstructions(
        ordered, inverse.reshape(-1), [_what(profile, row) for row in unique.tolist()]
    )


def _what(profile: Profile, row: list[int]) -> What:
    kernel = profile.strings[row[0]]
    program = row[1] if row[1] >= 0 else None
    module, instruction, named, operation, annotation = (
        profile.strings[at] if at >= 0 else "" for at in row[2:]
    )
    instruction = instruction or kernel
    known = profile.programs.find(program, module, instruction)
    if known is not None:
        kind, part = kind_of(known.opcode)
        path = known.path
    else:
        kind, part = kind_of(instruction)
        path = ""
    by_kernel = kernel_of(kernel)
    if part == "-done":
        return What(ENDS, kind, instruction)
    if kind or by_kernel:
        return What(
            COMMUNICATES,
            kind or by_kernel,
            instruction,
            known=known,
            begins=part == "-start" and not by_kernel,
        )
    opcode = known.opcode if known else instruction
    if _CONTAINER.match(opcode) or _ASYNCHRONOUS.match(opcode) or (_COPY.match(kernel) and row[3] < 0):
        return What(NOTHING, instruction, instruction)
    path = path or named or (operation if operation != "XlaModule:" else "") or annotation.partition("#")[0]
    return What(COMPUTES, scope_of(path)[:200] if path else instruction, instruction, phase_of(path), known)


def phases(profile: Profile, work: ExecutedInstructions, step: Ints) -> Texts:
    """The part of its step that each computation belongs to.

    What the paths do not tell is forward, unless it begins after the last of the step's backward: then it updates.
    """
    found = work.phases()
    starts, ends = profile.start_ns[work.event], profile.end_ns[work.event]
    backward = (found == Kind.BACKWARD) & (step >= 0)
    last = np.full(int(step.max(initial=-1)) + 2, np.iinfo(np.int64).max)
    if backward.any():
        latest = np.full(len(last), np.iinfo(np.int64).min)
        np.maximum.at(latest, step[backward], ends[backward])
        last = np.where(latest > np.iinfo(np.int64).min, latest, last)
    untold = found == ""
    found[untold] = np.where(starts[untold] >= last[step[untold]], Kind.OPTIMIZER, Kind.FORWARD)
    return found
