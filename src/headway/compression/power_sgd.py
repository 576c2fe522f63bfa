"""PowerSGD: matrices as products of two thin ones (Vogels et al., arXiv 1905.13727, algorithms 1 and 2).

Each matrix M of n by m is sent as P = MQ (n by r), and after P was averaged and made orthonormal, as Q = M'P (m by r),
which the next step begins with. Vectors, and matrices that would not get smaller by half, are sent as they are, along
with the Ps: two all-reduces a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from headway.collectives.algorithms import ALL_REDUCE
from headway.compression.codec import (
    Codec,
    Exchange,
    Gradients,
    Reduced,
    Reduction,
    Sent,
    Shape,
    element_bytes,
    passes_us,
)

if TYPE_CHECKING:
    import torch

LEAST_GAIN = 2  # times as small, as torch's hook has it
SEED = 0x5EED


class PowerSGD(Codec):
    """Gradients of matrices as their best directions, found by a power iteration that goes on from step to step."""

    name: ClassVar[str] = "power-sgd"

    codec: Literal["power-sgd"] = "power-sgd"
    """The codec's name."""

    rank: int = Field(default=4, ge=1, le=256)
    """How many columns the two factors of a matrix have."""

    error_feedback: Literal[True] = True
    """What the product lacks of a gradient is added to the next step's. PowerSGD does not converge without."""

    def rank_of(self, shape: Shape) -> int:
        """How many columns the factors of a gradient of this shape have; 0 where it is sent as it is."""
        if len(shape) < 2 or not math.prod(shape):
            return 0
        rows, columns = matrix_shape(shape)
        rank = min(self.rank, rows, columns)
        return rank if (rows + columns) * rank * LEAST_GAIN < rows * columns else 0

    @classmethod
    def proposed(cls) -> tuple[PowerSGD, ...]:
        """Its defaults."""
        return (cls(),)

    def exchanges(self, shapes: Sequence[Shape], dtype: str, world_size: int) -> tuple[Exchange, ...]:
        """All-reduces of what is sent as it is with all Ps, and of all Qs."""
        del world_size
        first = second = 0
        for shape in shapes:
            rank = self.rank_of(shape)
            rows, columns = matrix_shape(shape) if rank else (0, 0)
            first += rows * rank if rank else math.prod(shape)
            second += columns * rank
        sizes = [first, second] if second else [first]
        return tuple(Exchange(ALL_REDUCE, size * element_bytes(dtype)) for size in sizes)

    def reduce(self, gradients: Gradients) -> Reduction:
        """One power iteration on the mean of the ranks' matrices."""
        import torch

        flat, ranks = gradients.flat, gradients.world_size
        pieces = flat.split([math.prod(shape) for shape in gradients.shapes])
        low = [self.rank_of(shape) for shape in gradients.shapes]
        matrices = [
            (key, piece.view(matrix_shape(shape)), rank)
            for key, piece, shape, rank in zip(gradients.keys, pieces, gradients.shapes, low, strict=True)
            if rank
        ]
        directions = [self._directions(gradients, key, matrix, rank) for key, matrix, rank in matrices]
        plain = [piece for piece, rank in zip(pieces, low, strict=True) if not rank]
        projected = [matrix @ q for (_, matrix, _), q in zip(matrices, directions, strict=True)]
        total = yield Sent(ALL_REDUCE, torch.cat([*plain, *(p.view(-1) for p in projected)]).div_(ranks))
        sizes = [piece.numel() for piece in plain]
        parts = list(total.split([*sizes, *(p.numel() for p in projected)]))
        products: list[torch.Tensor] = []
        if matrices:
            bases = [
                orthonormal(part.view(p.shape))
                for part, p in zip(parts[len(plain) :], projected, strict=True)
            ]
            seconds = [matrix.T @ basis for (_, matrix, _), basis in zip(matrices, bases, strict=True)]
            total = yield Sent(ALL_REDUCE, torch.cat([q.reshape(-1) for q in seconds]).div_(ranks))
            for (key, _, _), basis, part, second in zip(
                matrices, bases, total.split([q.numel() for q in seconds]), seconds, strict=True
            ):
                q = gradients.memory[key] = part.view(second.shape).clone()
                products.append((basis @ q.T).view(-1))
        whole, product = iter(parts), iter(products)
        mean = torch.cat([next(product if rank else whole) for rank in low])
        kept = flat - mean
        for own, rank in zip(kept.split([piece.numel() for piece in pieces]), low, strict=True):
            if not rank:
                own.zero_()
        return Reduced(mean, kept)

    def _directions(self, gradients: Gradients, key: int, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        """The Q to begin with: the last one, with columns drawn anew where it has none left; the same on all ranks."""
        import torch

        known = gradients.memory.get(key)
        if known is not None and (known.shape[0] != matrix.shape[1] or not bool(known.isfinite().all())):
            known = None
        if known is not None:
            known = known[:, :rank]  # of a state that was saved under another rank
            if known.shape[1] == rank and bool(known.any(dim=0).all()):
                return known
        generator = torch.Generator().manual_seed(SEED + key)
        drawn = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix)
        if known is None:
            return drawn
        had = known.shape[1]
        return torch.cat([torch.where(known.any(dim=0), known, drawn[:, :had]), drawn[:, had:]], dim=1)

    def describe(self) -> str:
        """Say the rank."""
        return f"PowerSGD of rank {self.rank}"

    @property
    def loses(self) -> str:
        """What is left out."""
        return f"sent as matrices of rank {self.rank}"

    @property
    def cost_name(self) -> str:
        """By its rank."""
        return f"{self.name}-{self.rank}"

    def default_us(self, size_bytes: int, world_size: int) -> tuple[float, ...]:
        """Each product reads the matrix once, or is bound by its arithmetic: 8 multiply-adds for a byte read."""
        del world_size
        product = max(1.0, self.rank / 8)
        return (
            passes_us(size_bytes, 1.0 + product),
            passes_us(size_bytes, product),
            passes_us(size_bytes, 3.0 + product),
        )


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """The matrix that a gradient of two or more dimensions is taken for: its first dimension by all others."""
    return shape[0], math.prod(shape[1:])


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the space of ``columns``, filled up where that has fewer dimensions."""
    import torch

    if not bool(columns.isfinite().all()):  # decompositions refuse it, and a GradScaler looks for it
        return torch.full_like(columns, torch.nan)
    basis: torch.Tensor = torch.linalg.qr(columns).Q
    return basis
