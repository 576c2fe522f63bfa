"""What a Kineto document's JSON holds, decoded: whole, or what can be had of a damaged one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.interop.readers.foreign import MAX_EVENTS

LONGEST_NS = 2**61  # half of what fits, so that a base time can be added
_NOT_JSON = re.compile(rb"([:\[,]\s*)-?(?:NaN|Infinity)(?=\s*[,\]}])")


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """What is looked at in an event's ``args``. Kineto is free with types, so that none is asked for here."""

    correlation: Any = None
    stream: Any = None
    record_function: Any = msgspec.field(name="Record function id", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_numel: Any = msgspec.field(name="In msg nelems", default=None)
    out_numel: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = None
    group: Any = msgspec.field(name="Process Group Name", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    sequence: Any = msgspec.field(name="Seq", default=None)
    source: Any = msgspec.field(name="Src Rank", default=None)
    target: Any = msgspec.field(name="Dst Rank", default=None)
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    concrete: Any = msgspec.field(name="Concrete Inputs", default=None)


class Correlation(msgspec.Struct, frozen=True, gc=False):
    """Only what joins a runtime call and the kernel that it launched."""

    correlation: Any = None


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One of ``traceEvents``."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class ProcessGroup(msgspec.Struct, frozen=True):
    """One of ``pg_config``."""

    name: Any = msgspec.field(name="pg_name", default=None)
    description: Any = msgspec.field(name="pg_desc", default=None)
    ranks: Any = None


class Distributed(msgspec.Struct, frozen=True):
    """``distributedInfo``."""

    backend: Any = None
    rank: Any = None
    world_size: Any = None
    pg_config: list[ProcessGroup] = []


class Head(msgspec.Struct, frozen=True):
    """What stands next to the events."""

    raw_distributed: msgspec.Raw = msgspec.field(name="distributedInfo", default=msgspec.Raw(b"null"))
    base: Any = msgspec.field(name="baseTimeNanoseconds", default=0)
    host: Any = msgspec.field(name="host_name", default="")
    raw_devices: msgspec.Raw = msgspec.field(name="deviceProperties", default=msgspec.Raw(b"null"))

    @property
    def base_ns(self) -> int:
        """What the events' times count from."""
        return self.base if isinstance(self.base, int) and abs(self.base) < LONGEST_NS else 0

    @property
    def device(self) -> str:
        """What its first device is called; "" where that is not told."""
        try:
            devices = msgspec.json.decode(self.raw_devices)
        except (ValueError, RecursionError):
            return ""
        first = devices[0] if isinstance(devices, list) and devices else None
        name = first.get("name") if isinstance(first, dict) else None
        return name if isinstance(name, str) else ""

    @property
    def distributed(self) -> Distributed:
        """Who recorded it, as far as that is told."""
        try:
            return msgspec.json.decode(self.raw_distributed, type=Distributed | None) or Distributed()
        except (ValueError, RecursionError):
            return Distributed()


class _Document(Head, frozen=True):
    events: list[Entry] = msgspec.field(name="traceEvents", default=[])


def decode(data: bytes) -> tuple[Head, Sequence[Entry]]:
    """A document is an object around its events, or a list of nothing else. NaN is not JSON, but is written."""
    try:
        return _decode_json(data)
    except msgspec.DecodeError:
        finite, count = _NOT_JSON.subn(rb"\1null", data)
        if not count:
            raise
        return _decode_json(finite)


def _decode_json(data: bytes) -> tuple[Head, Sequence[Entry]]:
    if data[:64].lstrip()[:1] == b"[":
        return Head(), msgspec.json.decode(data, type=list[Entry])
    whole = msgspec.json.decode(data, type=_Document)
    return whole, whole.events


_START = b'"traceEvents"'
_ENTRY = msgspec.json.Decoder(Entry)
# What a damaged document may cost, in characters that are looked through: so many times its length, or at least some.
_RESCANS, _LEAST_BUDGET = 8, 20_000_000
_DEEP_COST = 100_000  # of brackets in a thousand brackets
_PLACE_SHARE = 64  # to say where it failed the decoder counts lines from the beginning, this much faster


def salvage(data: bytes) -> tuple[Head, list[Entry], int]:
    """The events of a damaged document one by one; how many stretches of it could not be read."""
    begin = data.find(_START)
    if begin < 0:
        return Head(), [], 0
    text = data[begin + len(_START) :].decode(errors="replace")
    decoder = json.JSONDecoder()
    entries: list[Entry] = []
    budget = _RESCANS * len(text) + _LEAST_BUDGET
    broken, position = 0, text.find("{")
    while position >= 0 and len(entries) <= MAX_EVENTS and budget > 0:
        try:
            found, end = decoder.raw_decode(text, position)
            entries.append(_ENTRY.decode(msgspec.json.encode(found)))  # turns NaN into null
        except json.JSONDecodeError as failure:
            broken += 1
            end = position + 1
            budget -= failure.pos - position + failure.pos // _PLACE_SHARE
        except (
            ValueError,
            RecursionError,
        ):  # numbers of thousands of digits, brackets in thousands of brackets
            broken += 1
            end = position + 1
            budget -= _DEEP_COST
        position = text.find("{", end)
    return _head(data[:begin]), entries, broken


def _head(before: bytes) -> Head:
    """What stands before the events, where that is whole."""
    try:
        return msgspec.json.decode(before.rstrip().rstrip(b",") + b"}", type=Head)
    except (ValueError, RecursionError):
        return Head()
