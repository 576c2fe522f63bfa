"""Decodes Chrome trace-event lists, including truncated and damaged ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headway.arrays import Ints
from headway.ext import MAX_EVENTS, Document, TraceError, damaged

LATEST_US = 2**52  # microseconds since 1970: in the year 2112
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One trace event; fields that Headway does not use are not decoded."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: int | float | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    id: int | float | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"")


class _Whole(msgspec.Struct, frozen=True):
    events: list[Entry] = msgspec.field(name="traceEvents")


@dataclass(frozen=True, eq=False)
class Listing:
    """A document's events in file order; ``dropped`` counts unreadable stretches."""

    entries: list[Entry]
    dropped: int = 0
    notes: tuple[str, ...] = ()


def read_listing(document: Document) -> Listing:
    """Decode the document's events: a bare list, or ``traceEvents``.

    A list without its closing bracket is accepted: tools leave it when their process ends early.
    Raises TraceError if the document is damaged, unless it is read leniently.
    """
    if document.ending and not document.lenient:
        raise damaged(document, document.ending)
    listing = _decoded(document)
    if len(listing.entries) > MAX_EVENTS:
        raise TraceError(
            f"{document.name} is too large", got=f"{len(listing.entries)} events", expected=f"at most {MAX_EVENTS}"
        )  # fmt: skip
    return listing


def _decoded(document: Document) -> Listing:
    plain = document.data[:4096].lstrip().startswith(b"[")
    try:
        return Listing(_entries(document.data, plain))
    except _UNREADABLE as failure:
        why = f"{failure}" or type(failure).__name__
    try:
        closed = document.data.rstrip().rstrip(b",") + (b"]" if plain else b"]}")
        return Listing(
            _entries(closed, plain), notes=("The recording is not closed: its process ended early.",)
        )
    except _UNREADABLE:
        pass
    if not document.lenient:
        raise damaged(document, why, expected="a JSON list of trace events")
    entries, dropped = _salvaged(document.data, plain)
    return Listing(entries, dropped, (f"The document is damaged: {dropped} stretches could not be read.",))


def _entries(data: bytes, plain: bool) -> list[Entry]:
    return (
        msgspec.json.decode(data, type=list[Entry])
        if plain
        else msgspec.json.decode(data, type=_Whole).events
    )


_FLAT = re.compile(rb"\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}")  # an object that holds objects, which hold none
_ENTRY = msgspec.json.Decoder(Entry)


def _salvaged(data: bytes, plain: bool) -> tuple[list[Entry], int]:
    """Decode event by event, in one pass; also counts unreadable stretches."""
    begin = data.find(b"[", 0 if plain else max(data.find(b'"traceEvents"'), 0)) + 1
    entries = []
    dropped = 0
    for match in _FLAT.finditer(data, begin):
        dropped += bool(data[begin : match.start()].strip(b" \t\r\n,"))
        begin = match.end()
        try:
            entries.append(_ENTRY.decode(match[0]))
        except _UNREADABLE:
            dropped += 1
    rest = data[begin:].strip(b" \t\r\n,")
    return entries, dropped + bool(rest and not rest.startswith(b"]"))


def arguments(entry: Entry) -> dict[str, Any]:
    """An event's ``args``; empty if absent or unreadable."""
    if not entry.args:
        return {}
    try:
        decoded = msgspec.json.decode(entry.args)
    except _UNREADABLE:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def nanoseconds(microseconds: Sequence[int | float | None]) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Convert to integer nanoseconds without losing digits; also a mask of valid times (0 to LATEST_US)."""
    try:
        values = np.array(microseconds, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.array([_number(value) for value in microseconds], dtype=np.float64)
    fits = (values >= 0) & (values < LATEST_US)  # False of NaN
    values = np.where(fits, values, 0.0)
    whole_us = np.floor(values)
    return whole_us.astype(np.int64) * 1000 + np.rint((values - whole_us) * 1000).astype(np.int64), fits


def _number(value: int | float | None) -> float:
    try:
        return float("nan") if value is None else float(value)
    except (OverflowError, ValueError):
        return float("nan")
