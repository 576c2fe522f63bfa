"""Blocks: what a step computes, in pieces that a strategy may lay out in another order, again, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from headway.graph.timeline import Item, Part, Point, Timeline

COMPUTED = frozenset(value for name, value in vars(Part).items() if name.isupper())


@dataclass(frozen=True, slots=True)
class ComputeBlock:
    """Computation of one kind (``Part``) of one micro-batch through one stage.

    ``items`` are the stretches and points that it is made of, in their order; ``micro_batch`` is -1 for the whole
    batch.
    """

    stage: int
    kind: str
    micro_batch: int
    items: tuple[Item, ...]

    @property
    def duration_ns(self) -> int:
        """What it takes by itself."""
        return sum(item.duration_ns for item in self.items)

    def scaled(self, factor: float) -> ComputeBlock:
        """The same computation in ``factor`` times the time, as of a micro-batch of another size."""
        items = tuple(item._replace(duration_ns=round(item.duration_ns * factor)) for item in self.items)
        return ComputeBlock(self.stage, self.kind, self.micro_batch, items)

    def of_micro_batch(self, micro_batch: int) -> ComputeBlock:
        """The same computation of another micro-batch."""
        items = tuple(item._replace(micro_batch=micro_batch) for item in self.items)
        return ComputeBlock(self.stage, self.kind, micro_batch, items)


def blocks_of(timeline: Timeline) -> tuple[ComputeBlock, ...]:
    """The blocks of a step, in its order: joined they are its items.

    A point belongs to the block that it ends (a gradient is ready when it has been computed), but for a use, which
    begins what comes after it.
    """
    return tuple(
        ComputeBlock(stage, kind, micro_batch, tuple(item for _, item in own))
        for (stage, kind, micro_batch), own in groupby(_with_keys(timeline), key=lambda pair: pair[0])
    )


def timeline_of(blocks: tuple[ComputeBlock, ...], like: Timeline) -> Timeline:
    """The step of the same rank that computes ``blocks``, in their order."""
    items = tuple(item for block in blocks for item in block.items)
    return Timeline(like.rank, like.step, items, like.background_ns)


def _with_keys(timeline: Timeline) -> Iterator[tuple[tuple[int, str, int], Item]]:
    """Each item with the stage, kind and micro-batch of its block."""
    items = timeline.items
    following = [""] * len(items)
    kind = ""
    for index in range(len(items) - 1, -1, -1):
        kind = items[index].kind if items[index].kind in COMPUTED else kind
        following[index] = kind
    before = ""
    for index, item in enumerate(items):
        if item.kind in COMPUTED:
            before = item.kind
        of = following[index] if item.kind == Point.USE or not before else before
        yield (item.stage, of or before, item.micro_batch), item
