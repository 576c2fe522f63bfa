"""Profiles of TensorFlow and JAX for tests: those that make.py recorded, and small ones put together by hand."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.interop.readers.foreign import Document, ForeignRank
from headway.trace.events import Events, Kind, Stream
from headway_readers import jax_json
from headway_readers.xplane import reader
from headway_readers.xplane.messages import program_class, space_class

FIXTURES = Path(__file__).parent / "fixtures"


def unpacked(name: str) -> bytes:
    data = (FIXTURES / name).read_bytes()
    return gzip.decompress(data) if name.endswith(".gz") else data


def ranks_of(
    data: bytes, name: str = "x.xplane.pb", *, lenient: bool = False, ending: str = ""
) -> list[ForeignRank]:
    """The ranks of a document in either form, checked for what must hold of any."""
    read = jax_json.read if "json" in name else reader.read
    reading = read(Document(name, data, ending, lenient))
    assert reading.ranks
    assert not reading.companions
    for rank in reading.ranks:
        check(rank)
    return list(reading.ranks)


def recorded(name: str) -> list[ForeignRank]:
    return ranks_of(unpacked(name), name)


def check(rank: ForeignRank) -> None:
    events = rank.events
    assert (events.duration_ns >= 0).all()
    assert (np.diff(events.start_ns) >= 0).all()
    steps = events.of_kind(Kind.STEP)
    assert len(steps)
    assert (steps.end_ns[:-1] <= steps.start_ns[1:]).all()
    assert len(set(steps.step.tolist())) == len(steps)
    assert set(events.step.tolist()) == set(steps.step.tolist())
    communication = events.where(events.stream == Stream.COMMUNICATION)
    assert set(communication.kind.tolist()) <= {Kind.COLLECTIVE}
    assert (communication.enqueue_ns <= communication.start_ns).all()
    assert (communication.sequence >= 0).all()
    bounds = {step.step: (step.start_ns, step.end_ns) for step in steps}
    for wait in events.of_kind(Kind.WAIT, Kind.INPUT):
        assert bounds[wait.step][0] <= wait.start_ns <= wait.end_ns <= bounds[wait.step][1]
    for column in (events.kind, events.name, events.stream, events.group, events.algorithm):
        for text in column.tolist():
            text.encode()
    assert rank.rank is None or rank.rank >= 0
    assert rank.source
    assert rank.clock


def steps_of(events: Events) -> list[int]:
    return [int(step) for step in events.of_kind(Kind.STEP).step]


class Happened(NamedTuple):
    """An event of a profile that is put together by hand; times are nanoseconds."""

    name: str
    start_ns: int
    duration_ns: int
    said: Mapping[str, int | str] = {}


def space_of(
    planes: Mapping[str, Mapping[str, Sequence[Happened]]],
    *,
    timestamp_ns: int = 0,
    began_ns: int = 0,
    programs: Mapping[str, Any] | None = None,
) -> Any:
    """An XSpace of these planes, lines and events. ``programs`` are compiled programs by name."""
    space = space_class("Space")()
    space.hostnames.append(b"node0")
    for plane_name, lines in planes.items():
        plane = space.planes.add(name=plane_name.encode())
        table = _Table(plane)
        for line_name, events in lines.items():
            line = plane.lines.add(name=line_name.encode(), timestamp_ns=timestamp_ns)
            for happened in events:
                event = line.events.add(
                    metadata_id=table.event(happened.name),
                    offset_ps=happened.start_ns * 1000,
                    duration_ps=happened.duration_ns * 1000,
                )
                for key, value in happened.said.items():
                    table.say(event, key, value)
    if programs:
        plane = space.planes.add(name=b"/host:metadata")
        table = _Table(plane)
        for number, (name, program) in enumerate(programs.items(), 1):
            entry = plane.event_metadata.add(key=number)
            entry.value.name = f"{name}({number})".encode()
            entry.value.stats.add(
                metadata_id=table.stat("Hlo Proto"), bytes_value=program.SerializeToString()
            )
    if began_ns:
        plane = space.planes.add(name=b"Task Environment")
        plane.stats.add(metadata_id=_Table(plane).stat("profile_start_time"), uint64_value=began_ns)
    return space


class _Table:
    """A plane's tables of names."""

    def __init__(self, plane: Any) -> None:
        self._plane = plane
        self._events: dict[str, int] = {}
        self._stats: dict[str, int] = {}

    def event(self, name: str) -> int:
        if name not in self._events:
            self._events[name] = len(self._events) + 1
            self._plane.event_metadata.add(key=self._events[name]).value.name = name.encode()
        return self._events[name]

    def stat(self, name: str) -> int:
        if name not in self._stats:
            self._stats[name] = len(self._stats) + 1
            self._plane.stat_metadata.add(key=self._stats[name]).value.name = name.encode()
        return self._stats[name]

    def say(self, event: Any, key: str, value: int | str) -> None:
        stat = event.stats.add(metadata_id=self.stat(key))
        if isinstance(value, str):
            stat.ref_value = self.stat(value)
        else:
            stat.int64_value = value


def program_of(name: str, instructions: Sequence[Mapping[str, Any]], devices: int = 1) -> Any:
    """A compiled program whose one computation has ``instructions``, given as their fields."""
    program = program_class()()
    program.module.name = name.encode()
    program.module.device_assignment.replica_count = 1
    program.module.device_assignment.computation_count = devices
    computation = program.module.computations.add(id=1)
    for number, fields in enumerate(instructions, 1):
        computation.instructions.add(id=number, **fields)
    return program
