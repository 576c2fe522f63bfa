"""A small GPT on the Python standard library's own sources: plain PyTorch and DDP, nothing of Headway.

torchrun --nproc-per-node 2 train_gpt.py --steps 30 --curve curve.json
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from headway.demo.step_log import StepLog

CONTEXT = 64
TEXT_BYTES = 2_000_000


class Sources(Dataset[torch.Tensor]):
    """Windows of ``CONTEXT + 1`` bytes of the standard library: item ``i`` of rank ``r`` is fixed by (i, r)."""

    def __init__(self, rank: int, count: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= TEXT_BYTES:
                break
        self._text = torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)
        self._generator_seed = 1000 + rank
        starts = torch.Generator().manual_seed(self._generator_seed)
        self._starts = torch.randint(len(self._text) - CONTEXT - 1, (count,), generator=starts)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self._starts[index])
        return self._text[start : start + CONTEXT + 1].long()


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result: (batch, time, width)."""
        batch, length, width = x.shape
        split = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return added


class GPT(nn.Module):
    """A byte-level language model."""

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (batch, time) of bytes. Returns logits: (batch, time, 256)."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    """Train, and log losses and step times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--curve", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    log = StepLog(arguments.curve)
    data = Sources(dist.get_rank(), arguments.steps * arguments.batch)
    for window in DataLoader(data, batch_size=arguments.batch):
        logits = model(window[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(loss)
    log.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
