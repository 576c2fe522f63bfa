"""What tables say that a forward keeps, against torch's own modules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headway.models.bert import bert_base
from headway.models.resnet import resnet50
from headway.prediction.memory import on_fake_tensors, pass_memory_of


def norm(channels: int, *, activation: bool = True) -> nn.Sequential:
    parts: list[nn.Module] = [nn.BatchNorm2d(channels)]
    return nn.Sequential(*parts, *([nn.ReLU(inplace=True)] if activation else []))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), norm(width),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width),
            nn.Conv2d(width, 4 * width, 1, bias=False), norm(4 * width, activation=False),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, norm(4 * width, activation=False))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        activated: torch.Tensor = self.activation(out)
        return activated


def residual_net() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inputs = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            layers.append(Bottleneck(inputs, 64 << stage, 2 if stage and not block else 1))
            inputs = 4 * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_convolutional_table_keeps_what_torch_keeps(dtype: torch.dtype | None) -> None:
    samples = 8
    built = on_fake_tensors("net", lambda: (residual_net(), torch.zeros(samples, 3, 224, 224)))
    built.autocast(dtype)
    found = pass_memory_of(built)
    layers = resnet50(samples) if dtype is None else resnet50(samples).halved()
    table = layers.spec.pass_memory
    assert found is not None
    assert table is not None
    assert table.forward_bytes == pytest.approx(found.forward_bytes, rel=0.05)
    assert max(size for _, size in table.backward) == pytest.approx(
        max(size for _, size in found.backward), rel=0.05
    )


class EncoderLayer(nn.Module):
    """As in BERT, with the scores of attention in full."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
            for part in (self.query, self.key, self.value)
        )
        scores = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]), -1)
        mixed = (self.dropout(scores) @ value).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.dropout(self.output(mixed)))
        narrow = self.dropout(self.narrow(nn.functional.gelu(self.wide(x))))
        out: torch.Tensor = self.norms[1](x + narrow)
        return out


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_transformer_table_keeps_what_torch_keeps(dtype: torch.dtype | None) -> None:
    samples, length, depth = 16, 128, 3

    def make() -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(*(EncoderLayer() for _ in range(depth))), torch.zeros(samples, length, 768)

    built = on_fake_tensors("net", make)
    built.autocast(dtype)
    found = pass_memory_of(built)
    assert found is not None
    table = bert_base(samples, length) if dtype is None else bert_base(samples, length).halved()
    layers = [x for x in table.layers if x.name.startswith("bert.encoder.layer.")]
    kept = sum(layer.work.kept_bytes for layer in layers) / 12 * depth
    masked = depth * samples * (12 * length**2 + 2 * length * 768)
    kept += 3 * masked  # on the CPU a mask has the size of what it masks, on accelerators a byte
    assert kept == pytest.approx(found.forward_bytes, rel=0.05 if dtype is None else 0.1)
