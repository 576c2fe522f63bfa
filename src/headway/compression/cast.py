"""Cast: rounds every element to a type of fewer bits, and sums in that type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from headway.collectives.algorithms import ALL_REDUCE
from headway.compression.codec import (
    Codec,
    Exchange,
    Gradients,
    Reduced,
    Reduction,
    Sent,
    Shape,
    passes_us,
)
from headway.model import DTYPE_BYTES


class Cast(Codec):
    """Sends gradients as elements of another type, with one all-reduce per bucket."""

    name: ClassVar[str] = "cast"

    codec: Literal["cast"] = "cast"
    """The codec's name; it may be left out."""

    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    """The type of the elements that are sent, and of their sum."""

    error_feedback: bool = False
    """Whether what rounding loses is added to the next step's gradients. What sums lose by rounding is not."""

    @classmethod
    def proposed(cls) -> tuple[Cast, ...]:
        """Both 2-byte types."""
        return cls(dtype="bfloat16"), cls(dtype="float16")

    def exchanges(self, shapes: Sequence[Shape], dtype: str, world_size: int) -> tuple[Exchange, ...]:
        """One all-reduce of all elements."""
        del dtype, world_size
        return (Exchange(ALL_REDUCE, sum(map(math.prod, shapes)) * DTYPE_BYTES[self.dtype]),)

    def reduce(self, gradients: Gradients) -> Reduction:
        """Divide before rounding and summing, so that no sum overflows."""
        import torch

        flat, ranks = gradients.flat, gradients.world_size
        sent = (flat / ranks).to(getattr(torch, self.dtype))
        kept = flat - sent.to(flat.dtype) * ranks if self.error_feedback else flat[:0]
        total = yield Sent(ALL_REDUCE, sent)
        return Reduced(total.to(flat.dtype), kept)

    def describe(self) -> str:
        """Say the type."""
        return self.dtype + (" with error feedback" if self.error_feedback else "")

    @property
    def loses(self) -> str:
        """What rounding does."""
        return f"rounded to {self.dtype} and added up as such"

    @property
    def cost_name(self) -> str:
        """Types cost differently."""
        return self.dtype + "-fed-back" * self.error_feedback

    def default_us(self, size_bytes: int, world_size: int) -> tuple[float, ...]:
        """Passes to round and to copy the mean; two more for error feedback."""
        del world_size
        return passes_us(size_bytes, 2.0 + 2.0 * self.error_feedback), passes_us(size_bytes, 1.0)


def is_only_cast(codec: Codec) -> bool:
    """Whether the codec is a plain cast, the only codec that runs on devices."""
    return isinstance(codec, Cast) and not codec.error_feedback
