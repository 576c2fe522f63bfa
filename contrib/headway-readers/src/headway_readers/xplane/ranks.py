"""Who is who in a profile: each device's rank, and what is said of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway import intervals
from headway.ext import ForeignRank, Kind, TraceError
from headway.intervals import Spans
from headway.trace.format import MAX_WORLD_SIZE
from headway_readers.xplane.devices import Device, find_devices, main_module
from headway_readers.xplane.host import clock_of, host_rank, is_tensorflow, lacks, worker_of
from headway_readers.xplane.launch_steps import LaunchSteps
from headway_readers.xplane.names import kernel_of
from headway_readers.xplane.operations import Operations
from headway_readers.xplane.profile import Profile
from headway_readers.xplane.steps import Marks, find_marks
from headway_readers.xplane.timeline import device_events

_LOCAL = re.compile(r"^\[(\d{1,6})\] ")


def ranks_of(profile: Profile) -> list[ForeignRank]:
    """The ranks that a profile tells of: one a device, or the process where TensorFlow computed on the host.

    Raises TraceError where nothing was computed.
    """
    devices = find_devices(profile)
    tensorflow = is_tensorflow(profile)
    if tensorflow and (not devices or devices[0].of_job):
        rank = host_rank(profile)
        if set(rank.events.kind.tolist()) <= {Kind.STEP}:
            raise _nothing(profile)
        return [rank]
    if not devices:
        raise _nothing(profile)
    world, numbers = _numbers(profile, devices, main_module(profile, devices))
    worker = worker_of(profile) if tensorflow else None
    if worker is not None:
        numbers = {at: worker * profile.devices + one.number for at, one in enumerate(devices)}
    for marks in (find_marks(profile), None):
        reading = Operations(profile, marks).reading() if tensorflow else intervals.EMPTY
        process = _Process(
            profile, marks, LaunchSteps(profile, marks), world, reading, tensorflow, _backend(profile)
        )
        ranks = [_rank(process, device, numbers.get(at)) for at, device in enumerate(devices)]
        busy = [rank for rank in ranks if (rank.events.kind == Kind.STEP).any()]
        if busy:
            break
    else:
        raise _nothing(profile)
    if len(busy) < len(ranks):
        busy[0].notes.append(f"{len(ranks) - len(busy)} devices did nothing in the steps and were left out.")
    return busy


@dataclass(frozen=True, eq=False)
class _Process:
    """What all devices of a process share."""

    profile: Profile
    marks: Marks | None
    asked: LaunchSteps
    world: int | None
    reading: Spans
    tensorflow: bool
    backend: str


def _nothing(profile: Profile) -> TraceError:
    return TraceError(
        f"{profile.source} holds no computation",
        got=f"{len(profile)} events of the host",
        expected="operations of TensorFlow, or programs of JAX",
        fix="Record with a host_tracer_level of 2 and the device tracer on.",
    )


def _rank(process: _Process, device: Device, rank: int | None) -> ForeignRank:
    profile, marks = process.profile, process.marks
    events, groups, notes = device_events(
        profile, device, process.asked, rank, process.world, process.reading
    )
    if rank is None:
        notes.append("The profile does not say which of the job's devices this is.")
    return ForeignRank(
        source=profile.source,
        framework="tensorflow" if process.tensorflow else "jax",
        events=events,
        rank=rank,
        world_size=process.world,
        host=profile.host,
        backend=process.backend,
        version=profile.version,
        clock=clock_of(profile),
        absolute=profile.absolute,
        groups=groups,
        dropped_events=profile.dropped,
        notes=[
            *profile.notes,
            *(marks.notes if marks and device.steps is None else ()),
            *([device.note] if device.note else []),
            *notes,
            *lacks(profile, process.tensorflow),
        ],
    )


def _backend(profile: Profile) -> str:
    """What carries collectives: NCCL or RCCL where kernels of theirs ran, else what XLA has for it."""
    return next((text[:4].lower() for text in profile.strings if kernel_of(text)), "xla")


def _numbers(profile: Profile, devices: Sequence[Device], module: str) -> tuple[int | None, dict[int, int]]:
    """How many devices the job's program runs on, and each device's logical number, by its place in ``devices``."""
    wide, world = 1, profile.programs.worlds.get(module)
    named, says_name = profile.value("name")
    called = np.array([text == module for text in profile.strings], dtype=bool)
    of_module = ~says_name | called[named] | (module == "")
    partitions, asks = profile.value("num_partitions")
    replicas, _ = profile.value("num_replicas")
    asked = np.flatnonzero(asks & of_module)
    if len(asked):
        wide = max(int(partitions[asked[0]]), 1)
        count = wide * max(int(replicas[asked[0]]), 1)
        world = count if count <= MAX_WORLD_SIZE else None
    number: dict[tuple[bool, int], int] = {}
    (partition, known), (replica, _), (device, told) = (
        profile.value(key) for key in ("partition", "replica", "global_device_id")
    )
    for event in np.flatnonzero(known & told & of_module).tolist():
        logical = int(replica[event]) * wide + int(partition[event])
        number[True, int(device[event])] = logical
        if local := _LOCAL.match(profile.strings[int(profile.name[event])]):
            number[False, int(local[1])] = logical
    keys = [(device.of_job, device.number) for device in devices]
    found = {at: number[key] for at, key in enumerate(keys) if key in number}
    within = range(world or MAX_WORLD_SIZE)
    if len(set(found.values())) == len(devices) and all(one in within for one in found.values()):
        return world, found
    if world == len(devices):
        return world, {at: at for at in range(len(devices))}
    return world, {at: one.number for at, one in enumerate(devices)} if world == profile.devices else {}
