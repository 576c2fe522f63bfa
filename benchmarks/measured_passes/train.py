"""A training script whose model and data are of one of several kinds. It knows nothing of Headway.

train.py KIND STEPS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, mse_loss, silu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Pointwise(nn.Module):
    """Many operations that read and write as many numbers as they compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + gelu(y * self.scale) * torch.sigmoid(y) + silu(y - 1) * torch.tanh(y + 1)


class Halting(nn.Module):
    """Looks at its numbers over and over, so that no code can be made of it as a whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            x = x * self.scale
            if x.detach()[0, 0].item() > 1e9:
                x = x * 0.5
        return x


def stack(count: int, width: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


class Rows(Dataset[torch.Tensor]):
    """Numbers that are drawn once; of each sample, reading takes as long as is said."""

    def __init__(self, width: int, *, count: int = 512, read_s: float = 0.0) -> None:
        self.rows, self.read_s = torch.randn(count, width), read_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.read_s:
            time.sleep(self.read_s)
        return self.rows[index]


KINDS: dict[str, tuple[Callable[[], list[nn.Module]], int, int, float]] = {
    # the layers, how wide they are, a batch's samples, and seconds to read one
    "pointwise": (lambda: [Pointwise(2048) for _ in range(4)], 2048, 512, 0.0),
    "halting": (lambda: [Halting(64) for _ in range(16)], 64, 8, 0.0),
    "products": (lambda: stack(4, 1024), 1024, 256, 0.0),
    "many-small": (lambda: stack(120, 32), 32, 8, 0.0),
    "few-large": (lambda: stack(8, 512), 512, 8, 0.0),
    "slow-reading": (lambda: stack(4, 512), 512, 32, 0.002),
    "wide-samples": (lambda: [nn.Linear(65536, 4)], 65536, 32, 0.0),
}


def main(kind: str, steps: int) -> None:
    make, width, batch, read_s = KINDS[kind]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*make()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Rows(width, read_s=read_s), batch_size=batch, shuffle=True, drop_last=True)
    left = steps
    while left:
        for x in loader:
            y = model(x)
            optimizer.zero_grad()
            mse_loss(y, x[:, : y.shape[1]] * 0.5).backward()
            optimizer.step()
            left -= 1
            if not left:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
