"""Timelines: what one rank's main thread does in a step once every wait for communication is taken out.

A timeline is what stays when the communication plan changes: stretches of computation, and between them the
points at which a strategy acts. Replay lays a strategy over it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Part:
    """What a stretch of computation is part of."""

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    FINALIZE = "finalize"  # after the wait for gradients: DDP copies buckets back
    READ = "read"  # gradients are clipped, unscaled or read, or parameters are read; ``name`` says which
    OPTIMIZER = "optimizer"
    REST = "rest"


class Point:
    """Where a strategy acts."""

    USE = "use"  # forward is about to need the parameters of the module ``name``
    READY = "ready"  # the gradient of the parameter ``name`` is complete on this rank
    UNUSED = "unused"  # a backward begins that leaves the parameter ``name`` without a gradient on this rank
    BACKWARD_END = "backward_end"  # the computation of a backward that synchronises is done
    BLOCKING = "blocking"  # a collective that the main thread waits for, not of gradients
    STEP = "step"  # the optimizer is about to step
    MESSAGE = "message"  # a message of a pipeline is about to be sent, or its receive posted
    ARRIVED = "arrived"  # the rank has waited for the end of such a message


class MessageEnd(NamedTuple):
    """One end of a message: who is at the other one, and which it is of those of its group to that rank."""

    sends: bool
    peer: int
    group: str
    sequence: int


class Item(NamedTuple):
    """A stretch of computation (``duration_ns`` of part ``kind``) or a point (of no duration).

    A read lasts as long as one rank needs for all that it reads, and may last no time. ``stage`` and ``micro_batch``
    say of what it is computed: of the only stage, and of the whole batch (-1), where the job has no pipeline.
    """

    kind: str
    name: str = ""
    duration_ns: int = 0
    size_bytes: int = 0
    parameters: tuple[str, ...] = ()  # of a read: those that are read; all where there are none
    overlap: float = 0.0  # the share of the stretch during which a collective was in flight on this rank
    stage: int = 0
    micro_batch: int = -1
    message: MessageEnd | None = None  # of the points of messages
    members: tuple[int, ...] = ()  # of a blocking collective: who takes part, where that is not every rank


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's step without its waits, in order.

    ``background_ns`` is the optimizer's work that ranks shared and did off their main threads, over all of them,
    without what every bucket's update costs by itself; None where they did it on their main threads.
    """

    rank: int
    step: int
    items: tuple[Item, ...]
    background_ns: int | None = None

    @property
    def optimizer_ns(self) -> int:
        """What the optimizer's whole update of all parameters takes one rank.

        Where ranks shared it off their main threads, these only asked for it and took over its results.
        """
        if self.background_ns is not None:
            return self.background_ns
        return sum(item.duration_ns for item in self.items if item.kind == Part.OPTIMIZER)

    def scaled(self, compute: float) -> Timeline:
        """The same step with computation taking ``compute`` times as long; input waits stay."""
        items = tuple(
            item if item.kind == Part.INPUT else item._replace(duration_ns=round(item.duration_ns * compute))
            for item in self.items
        )
        background_ns = None if self.background_ns is None else round(self.background_ns * compute)
        return Timeline(self.rank, self.step, items, background_ns)

    def undisturbed(self, slowdown: float) -> Timeline:
        """The same step as if no communication had slowed its computation down, by ``slowdown`` while in flight."""
        items = tuple(
            item._replace(duration_ns=round(item.duration_ns / (1 + slowdown * item.overlap)))
            if item.overlap
            else item
            for item in self.items
        )
        return Timeline(self.rank, self.step, items, self.background_ns)
