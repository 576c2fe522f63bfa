"""Profiles of JAX and TensorFlow as JSON: what JAX writes as trace.json.gz, and TensorBoard's plugin hands out.

It is the binary form (xplane.pb) without the compiled programs and the time of day, all numbers written as texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.ext import MAX_EVENTS, Companion, Document, Reading, TraceError, damaged
from headway_readers.xplane.profile import (
    DEVICE,
    FARTHEST_NS,
    LONGEST_NS,
    NUMBERS,
    TEXTS,
    UNUSED,
    Builder,
    Profile,
)
from headway_readers.xplane.ranks import ranks_of
from headway_readers.xplane.space import DERIVED, ON_TPU, QUEUE

_PLANE = re.compile(rb'"name"\s*:\s*"/(?:host|device):')
_PROCESS = b'"process_name"'
_FOREIGN = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)
_HOST = re.compile(r"plugins/profile/[^/]+/([^/]+)\.trace\.json(?:\.gz)?$")


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One of ``traceEvents``."""

    ph: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    name: Any = None
    args: Any = None


class _Whole(msgspec.Struct, frozen=True):
    events: list[Entry] = msgspec.field(name="traceEvents")


_ENTRY = msgspec.json.Decoder(Entry)
_BETWEEN = re.compile(rb'\}\s*,\s*\{(?=\s*(?:"[a-z]{1,8}"\s*:|\}))')


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is such a profile: by the names of its processes, which are those of planes."""
    return (
        head.lstrip()[:1] == b"{"
        and b'"traceEvents"' in head
        and _PROCESS in head
        and _PLANE.search(head) is not None
        and not any(word in head for word in _FOREIGN)
    )


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read a profile: a rank for each device, or for the process. Raises TraceError where it is damaged or empty."""
    return Reading(ranks=ranks_of(_profile(document)))


def _profile(document: Document) -> Profile:
    builder = Builder(document)
    entries = _entries(document, builder)
    planes, lines = _names(entries, builder)
    unused: dict[str, bool] = {}
    for entry in entries:
        if entry.ph != "X":
            continue
        arguments = entry.args if isinstance(entry.args, dict) else {}
        name = arguments.get("long_name") or entry.name
        if not isinstance(name, str):
            builder.refuse("an event without a name")
            continue
        if name not in unused:
            unused[name] = name.startswith(UNUSED)
        if unused[name]:
            continue
        place = _key(entry.pid), _key(entry.tid)
        line = lines.get(place)
        if line is None:
            line = lines[place] = builder.line_of(planes.get(place[0], ""), f"line {len(lines)}")
        if line < 0:
            continue
        start_ns, end_ns = _nanoseconds(entry.ts), _nanoseconds(entry.ts, entry.dur)
        if start_ns is None or end_ns is None or not 0 <= end_ns - start_ns < LONGEST_NS:
            builder.refuse(f"an event at {entry.ts} that takes {entry.dur}", "possible times")
            continue
        for key, value in arguments.items():
            if key in NUMBERS or key in TEXTS:
                builder.say(key, value)
        builder.add(line, builder.string(name), start_ns, end_ns)
    host = _HOST.search(document.name.replace("\\", "/"))
    return builder.build(host=host[1] if host else "")


def _names(
    entries: Sequence[Entry], builder: Builder
) -> tuple[dict[object, str], dict[tuple[object, object], int]]:
    """The planes by their process, and the lines by process and thread: -1 for those that are derived from others."""
    planes: dict[object, str] = {}
    threads: dict[tuple[object, object], str] = {}
    for entry in entries:
        if entry.ph != "M" or not isinstance(entry.args, dict) or not isinstance(entry.args.get("name"), str):
            continue
        if entry.name == "process_name":
            planes[_key(entry.pid)] = entry.args["name"]
        elif entry.name == "thread_name":
            threads[_key(entry.pid), _key(entry.tid)] = entry.args["name"]
    on_queues = {pid for (pid, _), name in threads.items() if name.startswith(QUEUE)}
    lines = {}
    for (pid, tid), name in threads.items():
        plane = planes.get(pid, "")
        of_tpu = name in ON_TPU and plane.startswith("/device:") and pid not in on_queues
        lines[pid, tid] = -1 if name in DERIVED and not of_tpu else builder.line_of(plane, name)
    builder.devices.update(plane for plane in planes.values() if DEVICE.match(plane))
    return planes, lines


def _key(number: Any) -> object:
    """A process or thread as it is written, whether as a number or as a text."""
    return number if isinstance(number, int | float | str) else None


def _nanoseconds(*microseconds: Any) -> int | None:
    """The sum of some numbers of microseconds, in nanoseconds; None where one of them is no time."""
    total = 0
    for one in microseconds:
        if not isinstance(one, int | float) or isinstance(one, bool) or not abs(one) < FARTHEST_NS / 1000:
            return None
        total += round(one * 1000)
    return total


def _entries(document: Document, builder: Builder) -> list[Entry]:
    if document.ending and not document.lenient:
        raise damaged(document, document.ending)
    try:
        entries = msgspec.json.decode(document.data, type=_Whole).events
    except _UNREADABLE as failure:
        if not document.lenient:
            raise damaged(document, failure, expected="a whole profile") from None
        entries = _salvaged(document.data, builder)
        builder.notes.append("The document is damaged: what could be read of it was kept.")
    if len(entries) > MAX_EVENTS:
        raise TraceError(
            f"{document.name} is too large", got=f"{len(entries)} events", expected=f"at most {MAX_EVENTS}"
        )
    return entries


def _salvaged(data: bytes, builder: Builder) -> list[Entry]:
    """The events that can be read one by one."""
    begin = data.find(b"[", max(data.find(b'"traceEvents"'), 0)) + 1
    rest = data[begin:].strip()
    closed = rest.removesuffix(b"}").rstrip()
    pieces = _BETWEEN.split(closed[:-1].rstrip() if closed.endswith(b"]") else rest)
    pieces[0], pieces[-1] = pieces[0].removeprefix(b"{"), pieces[-1].removesuffix(b"}")
    entries = []
    for piece in pieces:
        try:
            entries.append(_ENTRY.decode(b"{" + piece + b"}"))
        except _UNREADABLE:
            builder.dropped += 1
    return entries
