"""What ranks tell each other while they tune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

MOST_TEXT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Agreement:
    """The ranks of ``group``, which takes tensors on ``device``. Every rank calls each method at the same point."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one."""
        box = self._tensor(values)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.group)
        return box.tolist()

    def from_each(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, by rank; each gives equally many."""
        return self.tell_each(values)()

    def tell_each(self, values: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Send values without waiting for those of others; the result is called for them, as ``from_each`` has them."""
        mine = self._tensor(values)
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        sending = dist.all_gather(everyones, mine, group=self.group, async_op=True)
        assert sending is not None

        def told() -> list[list[float]]:
            sending.wait()
            return [theirs.tolist() for theirs in everyones]

        return told

    def number_from_rank_0(self, value: float) -> float:
        """The value that rank 0 gives."""
        box = self._tensor([value])
        dist.broadcast(box, group=self.group, group_src=0)
        return float(box)

    def text_from_rank_0(self, text: str) -> str:
        """The text that rank 0 gives, of at most 64 MiB."""
        data = text.encode()
        size = round(self.number_from_rank_0(len(data)))
        assert size <= MOST_TEXT_BYTES
        message = torch.zeros(size, dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(message, group=self.group, group_src=0)
        return message.cpu().numpy().tobytes().decode()

    def _tensor(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)
