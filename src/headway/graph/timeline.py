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
    READ = "read"  # gradients are clipped, unscaled or looked at, or values are; ``name`` says which
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


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's step without its waits, in order.

    ``beside_ns`` is the optimizer's work that ranks shared and did beside their main threads, over all of them, without
    what every bucket's update costs by itself; None where they did it themselves.
    """

    rank: int
    step: int
    items: tuple[Item, ...]
    beside_ns: int | None = None

    @property
    def optimizer_ns(self) -> int:
        """What the optimizer's whole update of all parameters takes one rank.

        Where ranks shared it beside their main threads, these only asked for it and took over its results.
        """
        if self.beside_ns is not None:
            return self.beside_ns
        return sum(item.duration_ns for item in self.items if item.kind == Part.OPTIMIZER)

    def scaled(self, compute: float) -> Timeline:
        """The same step with computation taking ``compute`` times as long; input waits stay."""
        items = tuple(
            item if item.kind == Part.INPUT else item._replace(duration_ns=round(item.duration_ns * compute))
            for item in self.items
        )
        beside_ns = None if self.beside_ns is None else round(self.beside_ns * compute)
        return Timeline(self.rank, self.step, items, beside_ns)

    def undisturbed(self, slowdown: float) -> Timeline:
        """The same step as if no communication had slowed its computation down, by ``slowdown`` while under way."""
        items = tuple(
            item._replace(duration_ns=round(item.duration_ns / (1 + slowdown * item.overlap)))
            if item.overlap
            else item
            for item in self.items
        )
        return Timeline(self.rank, self.step, items, self.beside_ns)
