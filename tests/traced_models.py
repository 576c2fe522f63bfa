"""Models as people write them, small: a GPT in the manner of nanoGPT, and a ResNet in that of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import pipe_split
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH = 13, 6, 8


@dataclass
class GPTConfig:
    block_size: int = 8
    layers: int = 4
    heads: int = 2
    dropout: float = 0.0
    checkpoints: bool = False
    splits: bool = False


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, width = x.size()
        q, k, v = (
            each.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=mask is None
        )
        y = y.transpose(1, 2).contiguous().view(rows, length, width)
        found: torch.Tensor = self.resid_dropout(self.c_proj(y))
        return found


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(config.dropout)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        found: torch.Tensor = x + self.mlp(self.ln_2(x))
        return found


class GPT(nn.Module):
    """``lm_head`` has the weight of ``transformer.wte``."""

    transformer: Any

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(config.block_size, WIDTH),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config) for _ in range(config.layers)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        rows, length = idx.size()
        assert length <= self.config.block_size, f"{length} tokens are more than {self.config.block_size}"
        pos = torch.arange(0, length, dtype=torch.long, device=idx.device)
        mask = None
        if attention_mask is not None:
            causal = torch.ones(length, length, dtype=torch.bool, device=idx.device).tril()
            mask = causal & attention_mask[:, None, None, :]
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for number, block in enumerate(self.transformer.h):
            if self.config.splits and number in (1, 3):
                pipe_split()
            if self.config.checkpoints and self.training:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        x = self.transformer.ln_f(x)
        found: torch.Tensor = self.lm_head(x).view(rows, length, -1)
        return found


class BasicBlock(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        found: torch.Tensor = self.relu(out)
        return found


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 6, 2))
        self.layer3 = nn.Sequential(BasicBlock(6, 8, 2))
        self.layer4 = nn.Sequential(BasicBlock(8, 8, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        found: torch.Tensor = self.fc(x)
        return found


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model of double floats."""
    torch.manual_seed(seed)
    return make().double()


def tokens(rows: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def images(rows: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 12, 12, generator=generator, dtype=torch.float64)
