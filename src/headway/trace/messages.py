"""Messages in a trace: those that collectives are made of, and those that a script sends by itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headway.arrays import Flags, Indices
from headway.trace.events import Events, Kind


def is_message(events: Events) -> Flags:
    """Which of one rank's events are sends and receives."""
    found: Flags = np.isin(events.kind, [Kind.SEND, Kind.RECEIVE])
    return found


def inner_messages(events: Events) -> Flags:
    """Which of one rank's events are messages of a collective that it recorded: of its group, name and sequence."""
    inner = is_message(events) & (events.sequence >= 0)
    if inner.any():
        collectives = set(_keys(events, np.flatnonzero(events.kind == Kind.COLLECTIVE)))
        found = np.flatnonzero(inner)
        inner[found] = [key in collectives for key in _keys(events, found)]
    return inner


def _keys(events: Events, rows: Indices) -> Iterator[tuple[str, str, int]]:
    columns = events.group[rows], events.name[rows], events.sequence[rows]
    return zip(*(column.tolist() for column in columns), strict=True)
