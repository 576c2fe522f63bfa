"""PowerSGD: sends matrices as products of two thin ones (Vogels et al., arXiv 1905.13727, algorithms 1 and 2).

Each n-by-m matrix M is sent as P = MQ (n by r) and, after P is averaged and made orthonormal, as Q = M'P (m by r), with
which the next step starts. Vectors, and matrices that would not shrink by half, are sent unchanged along with the Ps:
two all-reduces per bucket.
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

LEAST_GAIN = 2  # least compression of a matrix, as in torch's hook
SEED = 0x5EED


class PowerSGD(Codec):
    """Sends low-rank factors of gradient matrices, found by a power iteration that continues between steps."""

    name: ClassVar[str] = "power-sgd"

    codec: Literal["power-sgd"] = "power-sgd"
    """The codec's name."""

    rank: int = Field(default=4, ge=1, le=256)
    """How many columns the two factors of a matrix have."""

    error_feedback: Literal[True] = True
    """What the product lacks of a gradient is added to the next step's. PowerSGD does not converge without."""

    def rank_of(self, shape: Shape) -> int:
        """The rank for a gradient of this shape; 0 if it is sent unchanged."""
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
        """An all-reduce of unchanged gradients with all Ps, and one of all Qs."""
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
        """Run one power iteration on the mean of the ranks' matrices."""
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
        unchanged, product = iter(parts), iter(products)
        mean = torch.cat([next(product if rank else unchanged) for rank in low])
        kept = flat - mean
        for kept_piece, rank in zip(kept.split([piece.numel() for piece in pieces]), low, strict=True):
            if not rank:
                kept_piece.zero_()
        return Reduced(mean, kept)

    def _directions(self, gradients: Gradients, key: int, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        """The Q to start with: the previous one, with missing columns drawn at random; the same on all ranks."""
        import torch

        remembered = gradients.memory.get(key)
        if remembered is not None and (
            remembered.shape[0] != matrix.shape[1] or not bool(remembered.isfinite().all())
        ):
            remembered = None
        if remembered is not None:
            remembered = remembered[:, :rank]  # a restored state may have another rank
            if remembered.shape[1] == rank and bool(remembered.any(dim=0).all()):
                return remembered
        generator = torch.Generator().manual_seed(SEED + key)
        drawn = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix)
        if remembered is None:
            return drawn
        had = remembered.shape[1]
        return torch.cat(
            [torch.where(remembered.any(dim=0), remembered, drawn[:, :had]), drawn[:, had:]], dim=1
        )

    def describe(self) -> str:
        """Say the rank."""
        return f"PowerSGD of rank {self.rank}"

    @property
    def loses(self) -> str:
        """What is left out."""
        return f"sent as matrices of rank {self.rank}"

    @property
    def cost_name(self) -> str:
        """Depends on the rank."""
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
    """The matrix view of a gradient: its first dimension by all others."""
    return shape[0], math.prod(shape[1:])


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the span of ``columns``, completed if that has fewer dimensions."""
    import torch

    if not bool(
        columns.isfinite().all()
    ):  # decompositions reject non-finite values, and a GradScaler checks for them
        return torch.full_like(columns, torch.nan)
    basis: torch.Tensor = torch.linalg.qr(columns).Q
    return basis
