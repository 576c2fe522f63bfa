"""Top-k: sends only the largest elements of a bucket, with their indices (Lin et al., arXiv 1712.01887)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from headway.collectives.algorithms import ALL_GATHER
from headway.compression.codec import (
    Exchange,
    FedBack,
    Gradients,
    Reduced,
    Reduction,
    Sent,
    Shape,
    element_bytes,
    passes_us,
)

INDEX_BYTES = 4


class TopK(FedBack):
    """Sends the largest elements of a bucket by absolute value; ranks gather and sum them."""

    name: ClassVar[str] = "top-k"

    codec: Literal["top-k"] = "top-k"
    """The codec's name."""

    share: float = Field(default=0.01, gt=0, le=1, allow_inf_nan=False)
    """The share of a bucket's elements that is sent, at least one."""

    error_feedback: bool = True
    """Whether what is not sent is added to the next step's gradients. Without it most of them are lost."""

    def count(self, numel: int) -> int:
        """How many of ``numel`` elements are sent."""
        return min(numel, max(1, math.ceil(self.share * numel)))

    @classmethod
    def proposed(cls) -> tuple[TopK, ...]:
        """Its defaults."""
        return (cls(),)

    def exchanges(self, shapes: Sequence[Shape], dtype: str, world_size: int) -> tuple[Exchange, ...]:
        """One all-gather of values and indices."""
        count = self.count(sum(map(math.prod, shapes)))
        return (Exchange(ALL_GATHER, world_size * count * (element_bytes(dtype) + INDEX_BYTES)),)

    def reduce(self, gradients: Gradients) -> Reduction:
        """Select, gather, and sum in rank order."""
        import torch

        flat = gradients.flat
        assert flat.numel() < 2**31, "places are 32-bit integers"
        count = self.count(flat.numel())
        places = flat.abs().topk(count, sorted=False).indices
        values = flat[places]
        kept = flat[:0]
        if self.error_feedback:
            kept = flat.clone()
            kept[places] = 0
        sent = torch.cat([values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)])
        rows = yield Sent(ALL_GATHER, sent)
        mean = torch.zeros_like(flat)
        split = count * flat.element_size()
        for row in rows:
            theirs = row[:split].clone().view(flat.dtype)
            mean.index_add_(0, row[split:].clone().view(torch.int32), theirs)
        return Reduced(mean.div_(gradients.world_size), kept)

    def describe(self) -> str:
        """Say the share."""
        return f"the largest {self.share:.3g} of elements{self._feedback_note}"

    @property
    def loses(self) -> str:
        """What is left out."""
        return f"left out of a step unless they are among the largest {self.share:.3g} of their bucket"

    def default_us(self, size_bytes: int, world_size: int) -> tuple[float, ...]:
        """Selection takes as long as many passes; the sum depends on the sent share."""
        select = passes_us(size_bytes, 20.0 + self.error_feedback)
        return select, passes_us(size_bytes, 2.0 + 4 * self.share * world_size)
