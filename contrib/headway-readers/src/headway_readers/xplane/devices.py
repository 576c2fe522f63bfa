"""Devices that XLA runs programs on: GPUs, TPUs, and the parts that JAX divides a processor into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.arrays import Ints
from headway.ext import TraceError
from headway_readers.xplane.instructions import NOTHING, executed
from headway_readers.xplane.profile import DEVICE, Profile
from headway_readers.xplane.steps import LARGEST_NUMBER, Steps, following

MAX_DEVICES = 4096  # of one process
_OWN_STEPS = "Steps"
_OWN_RUNS = "XLA Modules"  # each a run of one program


@dataclass(frozen=True, eq=False)
class Device:
    """A device: its number among those of its process, or of the job where ``of_job``, and what it did."""

    number: int
    of_job: bool
    events: Ints
    steps: Steps | None = None  # its own, where it recorded any
    note: str = ""  # what they are, where nobody marked them


def find_devices(profile: Profile) -> list[Device]:
    """The devices that did something, in the order of their numbers. Raises TraceError where these are too many."""
    planes: dict[int, list[int]] = {}
    for place, line in enumerate(profile.lines):
        if found := DEVICE.match(line.plane):
            planes.setdefault(int(found[1]), []).append(place)
    _check(profile, len(planes))
    devices = [_of_plane(profile, number, lines) for number, lines in sorted(planes.items())]
    devices = [device for device in devices if len(device.events) and _works(profile, device)]
    return devices or _of_host(profile)


def _check(profile: Profile, count: int) -> None:
    if count > MAX_DEVICES:
        raise TraceError(
            f"{profile.source} names too many devices", got=count, expected=f"at most {MAX_DEVICES}"
        )


def _of_host(profile: Profile) -> list[Device]:
    """Devices that are threads of the host: what they run says on which of them it runs."""
    _, instructions = profile.value("hlo_op")
    ordinal, known = profile.value("device_ordinal")
    told = np.flatnonzero(instructions & known)
    if not len(told):
        return [Device(0, False, np.flatnonzero(instructions))] if instructions.any() else []
    told = told[np.argsort(ordinal[told], kind="stable")]
    numbers, first = np.unique(ordinal[told], return_index=True)
    _check(profile, len(numbers))
    parts = np.split(told, first[1:])
    return [Device(number, True, np.sort(part)) for number, part in zip(numbers.tolist(), parts, strict=True)]


def _works(profile: Profile, device: Device) -> bool:
    """Whether a device does more than to copy."""
    return not bool(executed(profile, device.events).role(NOTHING).all())


def _of_plane(profile: Profile, number: int, lines: Sequence[int]) -> Device:
    marks = [place for place in lines if profile.lines[place].name == _OWN_STEPS]
    runs = [place for place in lines if profile.lines[place].name == _OWN_RUNS]
    events = profile.of_lines([place for place in lines if place not in (*marks, *runs)])
    steps = _own_steps(profile, profile.of_lines(marks))
    if steps is not None or not runs:
        return Device(number, False, events, steps)
    return Device(number, False, events, *_own_runs(profile, profile.of_lines(runs)))


def _own_runs(profile: Profile, runs: Ints) -> tuple[Steps | None, str]:
    """The runs of the program that takes most of a device's time, where it recorded some.

    A host may ask for many runs before the first is done: the device's own times are those of steps.
    """
    if not len(runs):
        return None, ""
    names, which = np.unique(profile.name[runs], return_inverse=True)
    longest = int(np.argmax(np.bincount(which, profile.duration_ns[runs].astype(np.float64), len(names))))
    own = runs[which == longest]
    own = own[np.argsort(profile.start_ns[own], kind="stable")]
    if len(own) < 2 or not (profile.start_ns[own][1:] >= profile.end_ns[own][:-1]).all():
        return None, ""
    steps = following(np.arange(len(own)), profile.start_ns[own], profile.end_ns[own])
    program = profile.strings[int(names[longest])].partition("(")[0]
    return steps, f"Steps are not marked: each run of {program} on the device is taken for one."


def _own_steps(profile: Profile, marks: Ints) -> Steps | None:
    """A TPU's line of steps, each of which is called by its number."""
    names = [profile.strings[name] for name in profile.name[marks].tolist()]
    if not names or not all(name.isdecimal() and len(name) <= len(str(LARGEST_NUMBER)) for name in names):
        return None
    number, starts = np.array([int(name) for name in names]), profile.start_ns[marks]
    if not (np.diff(number) > 0).all() or not (starts[1:] >= profile.end_ns[marks][:-1]).all():
        return None
    return following(number, starts, profile.end_ns[marks]) if number[-1] < LARGEST_NUMBER else None


def main_module(profile: Profile, devices: Sequence[Device]) -> str:
    """The program that takes most of the devices' time; "" where they do not say which they run."""
    module, known = profile.value("hlo_module")
    events = np.concatenate([device.events for device in devices])
    events = events[known[events]]
    if not len(events):
        return ""
    taken = np.bincount(module[events], profile.duration_ns[events].astype(np.float64))
    return profile.strings[int(np.argmax(taken))]
