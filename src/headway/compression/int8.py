"""Int8: sends blocks of elements as 8-bit integers with one scale per block.

Integers with different scales cannot be summed on the way, so ranks exchange integers and sum the decoded values in the
type of the gradients. Up to two ranks use an all-gather. With more, each rank gets its share of the bucket from every
other rank (all-to-all) and sums it, and the shares of the mean are gathered, again as integers: 2N(P - 1)/P bytes per
rank for N elements and P ranks instead of N(P - 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from headway.collectives.algorithms import ALL_GATHER, ALL_TO_ALL
from headway.compression.codec import (
    Exchange,
    FedBack,
    Gradients,
    Reduced,
    Reduction,
    Sent,
    Shape,
    passes_us,
)

if TYPE_CHECKING:
    import torch

SCALE_BYTES = 4
LARGEST = 127
GATHERED_UP_TO = 2  # ranks; with more, an all-gather sends more bytes


class Int8(FedBack):
    """Sends gradients as 8-bit integers (rounded to nearest), with a scale for every block."""

    name: ClassVar[str] = "int8"

    codec: Literal["int8"] = "int8"
    """The codec's name."""

    block: int = Field(default=1024, ge=16, le=2**20)
    """The number of elements that share a scale, the largest of them divided by 127."""

    error_feedback: bool = True
    """Whether what rounding loses is added to the next step's gradients."""

    @classmethod
    def proposed(cls) -> tuple[Int8, ...]:
        """Its defaults."""
        return (cls(),)

    def exchanges(self, shapes: Sequence[Shape], dtype: str, world_size: int) -> tuple[Exchange, ...]:
        """An all-gather for up to two ranks, an all-to-all and an all-gather for more."""
        del dtype
        numel = sum(map(math.prod, shapes))
        if world_size <= GATHERED_UP_TO:
            return (Exchange(ALL_GATHER, world_size * self.sent_bytes(numel)),)
        size_bytes = world_size * self.sent_bytes(self.share_numel(numel, world_size))
        return Exchange(ALL_TO_ALL, size_bytes), Exchange(ALL_GATHER, size_bytes)

    def share_numel(self, numel: int, world_size: int) -> int:
        """The elements of each rank's share, in full blocks."""
        return -(-numel // (world_size * self.block)) * self.block

    def sent_bytes(self, numel: int) -> int:
        """The size of ``numel`` elements with their scales, padded to full blocks."""
        blocks = -(-numel // self.block)
        return blocks * (self.block + SCALE_BYTES)

    def reduce(self, gradients: Gradients) -> Reduction:
        """Exchange integers, and sum the decoded values in rank order."""
        if gradients.world_size <= GATHERED_UP_TO:
            return (yield from self._gathered(gradients))
        return (yield from self._in_shares(gradients))

    def _gathered(self, gradients: Gradients) -> Reduction:
        flat = gradients.flat
        numel = flat.numel()
        sent = self.encode(flat)
        kept = flat - self.decode(sent, flat)[:numel] if self.error_feedback else flat[:0]
        rows = yield Sent(ALL_GATHER, sent)
        return Reduced(self._mean(rows, flat)[:numel], kept)

    def _in_shares(self, gradients: Gradients) -> Reduction:
        import torch

        flat, ranks = gradients.flat, gradients.world_size
        numel = flat.numel()
        share = self.share_numel(numel, ranks)
        shares = torch.nn.functional.pad(flat, (0, ranks * share - numel)).view(ranks, share)
        sent = torch.stack([self.encode(rank_share) for rank_share in shares])
        kept = flat[:0]
        if self.error_feedback:
            kept = shares.clone()
            for row, error in zip(sent, kept, strict=True):
                error.sub_(self.decode(row, flat))
        rows = yield Sent(ALL_TO_ALL, sent)
        mean = self._mean(rows, flat)
        summed = self.encode(mean)
        if self.error_feedback:  # this rank compensates the rounding of its share of the sum
            kept[gradients.rank].add_(mean.sub_(self.decode(summed, flat)), alpha=ranks)
            kept = kept.view(-1)[:numel]
        rows = yield Sent(ALL_GATHER, summed)
        return Reduced(torch.cat([self.decode(row, flat) for row in rows])[:numel], kept)

    def _mean(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        total = self.decode(rows[0], like)
        for row in rows[1:]:
            total.add_(self.decode(row, like))
        return total.div_(len(rows))

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """Encode ``flat`` in full blocks: all scales (float32), then all integers. Non-finite values stay non-finite."""
        import torch

        blocks = -(-flat.numel() // self.block)
        padded = torch.nn.functional.pad(flat, (0, blocks * self.block - flat.numel())).view(
            blocks, self.block
        )
        scales = (padded.abs().amax(dim=1) / LARGEST).float()
        steps = torch.where(scales > 0, scales, 1.0).to(flat.dtype)
        integers = (padded / steps.unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
        scales = torch.where(
            scales.isfinite(), scales, torch.nan
        )  # a GradScaler checks for non-finite values
        return torch.cat(
            [scales.view(torch.uint8), integers.nan_to_num_().to(torch.int8).view(-1).view(torch.uint8)]
        )

    def decode(self, sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Decode the output of ``encode`` in full blocks, in the type of ``like``."""
        import torch

        blocks = sent.numel() // (self.block + SCALE_BYTES)
        scales = sent[: blocks * SCALE_BYTES].clone().view(torch.float32)
        integers = sent[blocks * SCALE_BYTES :].view(torch.int8).view(blocks, self.block)
        return integers.to(like.dtype).mul_(scales.to(like.dtype).unsqueeze(1)).view(-1)

    def describe(self) -> str:
        """Say the type."""
        return "int8" + self._feedback_note

    @property
    def loses(self) -> str:
        """What rounding does."""
        return f"rounded to 8 bits, each run of {self.block} with a scale of its own"

    def default_us(self, size_bytes: int, world_size: int) -> tuple[float, ...]:
        """Some passes over the gradients to encode, fewer to decode."""
        encode = passes_us(size_bytes, 5.0 + 3.0 * self.error_feedback)
        decode = passes_us(size_bytes, 2.0)
        if world_size <= GATHERED_UP_TO:
            return encode, decode * world_size
        return encode, decode + encode / world_size, decode
