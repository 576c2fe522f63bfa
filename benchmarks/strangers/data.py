"""Models and data that the scripts share."""

import email.message
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def text():
    """Bytes of the standard library's own source."""
    folder = Path(email.message.__file__).parents[1]
    names = ("argparse.py", "typing.py", "inspect.py", "socket.py", "tarfile.py")
    return torch.frombuffer(
        bytearray(b"".join((folder / n).read_bytes() for n in names)), dtype=torch.uint8
    ).long()


class Text(torch.utils.data.Dataset):
    def __init__(self, block=64, count=4096):
        self.data, self.block, self.count = text(), block, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        start = (i * 977) % (len(self.data) - self.block - 1)
        row = self.data[start : start + self.block + 1]
        return row[:-1], row[1:]


class Images(torch.utils.data.Dataset):
    def __init__(self, count=4096, size=32, classes=10):
        make = torch.Generator().manual_seed(0)
        self.images = torch.randn(256, 3, size, size, generator=make)
        self.labels = torch.randint(classes, (256,), generator=make)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.images[i % 256], self.labels[i % 256]


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            p.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for p in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A character-level GPT; 0.8 million parameters a layer of width 256."""

    def __init__(self, width=192, layers=4, heads=4, block=64, vocabulary=256, tied=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x, targets=None):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.ln(self.blocks(h)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class ConvNet(nn.Module):
    """Convolutions with batch norm, and a classifier that holds most of the parameters."""

    def __init__(self, classes=10, wide=48):
        super().__init__()
        layers, channels = [], 3
        for out in (wide, 2 * wide, 4 * wide):
            layers += [
                nn.Conv2d(channels, out, 3, padding=1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
            channels = out
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(16 * channels, 256), nn.ReLU(), nn.Linear(256, classes))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))
