"""What ranks tell each other while they tune. Every rank calls each of these at the same point of its script."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

MOST_TEXT_BYTES = 64 * 2**20


def slowest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """The largest of all ranks' values, one by one."""
    box = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in box]


def from_each(values: Sequence[float], group: dist.ProcessGroup) -> list[list[float]]:
    """Every rank's values, by rank; each gives equally many."""
    mine = torch.tensor(values, dtype=torch.float64)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    return [theirs.tolist() for theirs in everyones]


def number_from_rank_0(value: float, group: dist.ProcessGroup) -> float:
    """The value that rank 0 of ``group`` gives."""
    box = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(box, group=group, group_src=0)
    return float(box)


def text_from_rank_0(text: str, group: dist.ProcessGroup) -> str:
    """The text that rank 0 of ``group`` gives, of at most 64 MiB."""
    data = text.encode()
    size = round(number_from_rank_0(len(data), group))
    assert size <= MOST_TEXT_BYTES
    message = torch.zeros(size, dtype=torch.uint8)
    if dist.get_rank(group) == 0:
        message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(message, group=group, group_src=0)
    return message.numpy().tobytes().decode()
