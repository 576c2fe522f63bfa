"""Parameter shards: which server holds which parameters, and how far ahead of the slowest a worker may run."""

from __future__ import annotations

from dataclasses import dataclass

from headway.ext import HorizonSchedule
from headway.model import DTYPE_BYTES, ModelSpec
from headway.scheduling.buckets import Part


@dataclass(frozen=True)
class ShardSchedule(HorizonSchedule):
    """Rank ``k`` serves the parts ``shards[k]`` of parameters, which have ``sizes_bytes[k]``.

    A worker may be up to ``staleness`` iterations ahead of the slowest one; None means unbounded.
    """

    world_size: int
    shards: tuple[tuple[Part, ...], ...]
    sizes_bytes: tuple[int, ...]
    staleness: int | None = None

    @property
    def parts(self) -> str:
        """The parts of the model, in words."""
        return f"{self.world_size} shards"

    @property
    def collectives(self) -> int:
        """The number of exchanges between a worker and servers per iteration."""
        return self.world_size


def even_shards(model: ModelSpec, count: int) -> tuple[tuple[tuple[Part, ...], ...], tuple[int, ...]]:
    """Split the parameters of ``model``, in order, into ``count`` shards of equal bytes; returns shards and sizes."""
    total_bytes = model.size_bytes
    ends = [total_bytes * (number + 1) // count for number in range(count)]
    shards: list[list[Part]] = [[] for _ in range(count)]
    sizes_bytes = [0] * count
    number = place = 0
    for parameter in model.parameters:
        element_bytes = DTYPE_BYTES[parameter.dtype]
        numel, start = parameter.size_bytes // element_bytes, 0
        while start < numel:
            while number < count - 1 and ends[number] - place < element_bytes:
                number += 1
            room = numel if number == count - 1 else (ends[number] - place) // element_bytes
            end = min(numel, start + room)
            shards[number].append(Part(parameter.name, start, end))
            sizes_bytes[number] += (end - start) * element_bytes
            place += (end - start) * element_bytes
            start = end
    return tuple(map(tuple, shards)), tuple(sizes_bytes)
