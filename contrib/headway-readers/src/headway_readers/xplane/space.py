"""XSpace in bytes: planes of lines of events, whose names and statistics stand in tables next to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headway.ext import Document, damaged
from headway_readers.xplane.messages import space_class
from headway_readers.xplane.profile import (
    DEVICE,
    FARTHEST_NS,
    INT64,
    LONGEST_NS,
    LONGEST_TEXT,
    NUMBERS,
    TEXTS,
    UNUSED,
    Builder,
    Profile,
    whole,
)
from headway_readers.xplane.programs import Programs
from headway_readers.xplane.salvage import salvaged

EPOCH_NS = 10**17  # times that are later count from 1970, earlier ones from when the recording began
PROGRAM = "Hlo Proto"
# Lines that TensorBoard derives from others when it opens a profile, and keeps in the file.
DERIVED = frozenset(
    {
        "Steps", "XLA Modules", "XLA Ops", "XLA TraceMe", "TensorFlow Ops", "TensorFlow Name Scope", "Framework Ops",
        "Framework Name Scope", "Source code", "Launch Stats", "Async XLA Ops",
    }
)  # fmt: skip
QUEUE = "Stream #"
ON_TPU = ("XLA Ops", "Async XLA Ops", "XLA Modules", "Steps")


def read_space(document: Document) -> Profile:
    """Read an XSpace. Raises TraceError where it is damaged, unless it is read leniently."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    builder = Builder(document)
    if document.ending and not document.lenient:
        raise damaged(document, document.ending)
    try:
        space = space_class("Space").FromString(document.data)
    except DecodeError:
        if not document.lenient:
            raise damaged(document, "bytes that are no XSpace", expected="a whole xplane.pb") from None
        packed, builder.dropped = salvaged(document.data)
        space = space_class("Space").FromString(packed)
        builder.notes.append("The document is damaged: what could be read of it was kept.")
    programs, said = Programs(), _Said()
    tables = [_statistics(plane) for plane in space.planes]
    for plane, statistics in zip(space.planes, tables, strict=True):
        _read_tables(plane, statistics, programs, said)
        if DEVICE.match(text(plane.name)):
            builder.devices.add(text(plane.name))
    for plane, statistics in zip(space.planes, tables, strict=True):
        if plane.lines:
            _read_lines(plane, builder, statistics, said)
    if programs.unreadable:
        builder.notes.append(f"{programs.unreadable} compiled programs could not be read.")
    return builder.build(
        programs=programs,
        host=text(space.hostnames[0])[:LONGEST_TEXT] if space.hostnames else "",
        version=said.version,
        absolute=said.absolute,
    )


class _Said:
    """What planes say of the whole recording."""

    began_ns = 0  # since 1970; 0 where it is not said
    absolute = True  # whether all times are known since 1970
    version = ""


def _read_tables(plane: Any, statistics: Mapping[int, str], programs: Programs, said: _Said) -> None:
    for stat in plane.stats:
        name = statistics.get(stat.metadata_id)
        if name == "profile_start_time":
            began_ns = stat.uint64_value or stat.int64_value
            said.began_ns = began_ns if EPOCH_NS <= began_ns < FARTHEST_NS else 0
        elif name == "jax_version":
            said.version = said_text(stat, statistics)[:40]
    for entry in plane.event_metadata:
        found = {statistics.get(stat.metadata_id): stat for stat in entry.value.stats}
        if PROGRAM in found:
            number = found["program_id"].uint64_value if "program_id" in found else None
            programs.add(found[PROGRAM].bytes_value, text(entry.value.name), number)


def _statistics(plane: Any) -> Mapping[int, str]:
    return {entry.key: text(entry.value.name) for entry in plane.stat_metadata}


def _read_lines(plane: Any, builder: Builder, statistics: Mapping[int, str], said: _Said) -> None:
    name = text(plane.name)
    names: dict[int, int] = {}  # the names' numbers, -1 for what is not looked at
    shared: dict[int, list[Any]] = {}  # statistics that all events of one name share
    for entry in plane.event_metadata:
        own = _event_name(entry.value)
        names[entry.key] = -1 if own.startswith(UNUSED) else builder.string(own)
        if entry.value.stats:
            shared[entry.key] = list(entry.value.stats)
    reader = _Reader(builder, statistics, names, shared)
    lines = [(text(line.display_name or line.name), line) for line in plane.lines]
    on_queues = any(own.startswith(QUEUE) for own, _ in lines)
    for own, line in lines:
        if own in DERIVED and (on_queues or own not in ON_TPU or not name.startswith("/device:")):
            continue
        counted = line.timestamp_ns < EPOCH_NS
        said.absolute &= said.began_ns > 0 or not counted
        reader.read(line, builder.line_of(name, own), line.timestamp_ns + (said.began_ns if counted else 0))


class _Reader:
    """Reads the lines of one plane."""

    def __init__(
        self,
        builder: Builder,
        statistics: Mapping[int, str],
        names: Mapping[int, int],
        shared: Mapping[int, list[Any]],
    ) -> None:
        self._builder = builder
        self._statistics = statistics
        self._names = names
        self._of_names = shared
        self._columns = {key: builder.sparse[name] for key, name in statistics.items() if name in NUMBERS}
        self._texts = {key: builder.sparse[name] for key, name in statistics.items() if name in TEXTS}
        self._shared: dict[int, int] = {}  # texts that stand in the table of statistics

    def read(self, line: Any, place: int, begin_ns: int) -> None:
        """Read one line, whose times count from ``begin_ns``."""
        builder, names, shared = self._builder, self._names, self._of_names
        begin_ps, farthest_ps, longest_ps = begin_ns * 1000, FARTHEST_NS * 1000, LONGEST_NS * 1000
        for event in line.events:
            key = event.metadata_id
            name = names.get(key)
            if name is None:
                builder.refuse(f"an event whose name, number {key}, is missing")
            elif name >= 0 and not event.num_occurrences:
                start_ps, duration_ps = begin_ps + event.offset_ps, event.duration_ps
                if not (-farthest_ps < start_ps < farthest_ps and 0 <= duration_ps < longest_ps):
                    builder.refuse(
                        f"an event at {start_ps} ps that takes {duration_ps} ps", "times that can be"
                    )
                    continue
                self._say(event.stats)
                if key in shared:
                    self._say(shared[key])
                builder.add(place, name, start_ps // 1000, (start_ps + duration_ps) // 1000)

    def _say(self, stats: Iterable[Any]) -> None:
        index = len(self._builder.start_ns)
        for stat in stats:
            which = stat.metadata_id
            if which in self._columns:
                number = stat.int64_value or stat.uint64_value
                if not number and (stat.ref_value or stat.str_value):
                    number = whole(said_text(stat, self._statistics))
                column, value = self._columns[which], number if number is None or number < INT64 else None
            elif which in self._texts:
                column, value = self._texts[which], self._text(stat)
            else:
                continue
            if value is not None:
                column[0].append(index)
                column[1].append(value)

    def _text(self, stat: Any) -> int:
        shared = stat.ref_value
        if not shared:
            return self._builder.string(said_text(stat, self._statistics))
        if shared not in self._shared:
            self._shared[shared] = self._builder.string(self._statistics.get(shared, ""))
        return self._shared[shared]


def _event_name(metadata: Any) -> str:
    """An event's name; of an instruction of a TPU, whose name is its whole text, only what it is called."""
    name = text(metadata.name)
    if name.startswith("%"):
        return name[1:].partition(" ")[0]
    return name or text(metadata.display_name)


def said_text(stat: Any, statistics: Mapping[int, str]) -> str:
    """A statistic that should be a text: its own, or the name of another statistic."""
    return text(stat.str_value) or statistics.get(stat.ref_value, "")


def text(raw: bytes) -> str:
    """A text, whatever its bytes are."""
    return raw.decode("utf-8", "replace")
