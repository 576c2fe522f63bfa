"""What goes into a reader, a document, and what comes out: one rank's recording, in Headway's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.errors import TraceError
from headway.trace.events import Events

MAX_EVENTS = 50_000_000  # of one document


@dataclass(frozen=True)
class Document:
    """One file of another tool, unpacked. ``ending`` says what is wrong with its end, if something is."""

    name: str  # as it is shown: a path, and the member's name inside an archive
    data: bytes
    ending: str = ""
    lenient: bool = False


@dataclass(eq=False)
class ForeignRank:
    """One process's recording, on the clock of whoever timed it. ``notes`` say what is missing or was dropped.

    A server is a process that holds parameters for workers; ``rank`` then counts servers. ``clock`` names the clock
    that the times are of: what has the same name was timed by the same clock. Where it is empty nothing is known.
    """

    source: str  # the document's name
    framework: str  # in small letters, such as "pytorch"
    events: Events
    rank: int | None = None
    world_size: int | None = None
    role: Literal["worker", "server"] = "worker"
    host: str = ""
    backend: str = ""
    version: str = ""  # the framework's
    clock: str = ""
    absolute: bool = False  # whether times are wall-clock time, which hosts keep more or less alike
    on_device: bool = False  # whether its collectives are kernels on a device
    device: str = ""  # what it computes on, where that is told
    groups: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # process groups' ranks, where they are told
    dropped_events: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Companion:
    """A document that says of a rank what its recording of times leaves out."""

    source: str
    kind: Literal["flight_recorder", "execution_trace"]
    rank: int | None
    content: Any


@dataclass(frozen=True)
class Reading:
    """What one document held."""

    ranks: Sequence[ForeignRank] = ()
    companions: Sequence[Companion] = ()


def damaged(document: Document, got: object, *, expected: str = "") -> TraceError:
    """What to raise of a document that is damaged, unless it is read leniently."""
    return TraceError(
        f"{document.name} is damaged",
        got=got,
        expected=expected,
        fix="Copy or record it again, or pass --lenient to salvage what is readable.",
    )
