"""One rank of a pipeline: it says when all that is not the model's is there, is let go, and trains in a given order."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy, mse_loss

import headway
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.runtime import PipelineRuntime
from headway.torch_private.pipelining import PipelineSteps, ReceiveBuffers
from memory.job import GO, POLL_S, TRACE

STEPS, FIRST_RECORDED = 3, 2
MICRO_BATCHES = 8
STOCK = "torch 1f1b"
ORDERS: dict[str, PipelineStrategy | None] = {
    STOCK: None,
    "1f1b": PipelineStrategy(micro_batches=MICRO_BATCHES),
    "2f2b": PipelineStrategy(micro_batches=MICRO_BATCHES, order="kfkb", group_size=2),
    "4f4b": PipelineStrategy(micro_batches=MICRO_BATCHES, order="kfkb", group_size=4),
    "gpipe": PipelineStrategy(micro_batches=MICRO_BATCHES, order="gpipe"),
    "eager-1f1b": PipelineStrategy(micro_batches=MICRO_BATCHES, order="eager-1f1b"),
    "zero-bubble": PipelineStrategy(micro_batches=MICRO_BATCHES, order="zero-bubble"),
}


@dataclass(frozen=True)
class Subject:
    """``stage(index, count)`` is one of ``count`` stages; ``batch()`` is what goes in and what should come out."""

    stage: Callable[[int, int], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


VOCABULARY, CONTEXT, WIDTH, SEQUENCES, DEPTH = 2048, 256, 256, 4, 8


class Block(nn.Module):
    """Attention and a layer of four times its width, as GPT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, context, width)."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.wide(self.norms[1](x))
        return out


def transformer(index: int, count: int) -> nn.Module:
    """A share of a language model's blocks, with its embedding or its head at the ends."""
    layers: list[nn.Module] = [nn.Embedding(VOCABULARY, WIDTH)] if index == 0 else []
    layers += [Block() for _ in range(DEPTH // count)]
    layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)] if index == count - 1 else []
    return nn.Sequential(*layers)


def _sentences() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(MICRO_BATCHES * SEQUENCES, CONTEXT, dtype=torch.long)
    return tokens, tokens


def _likelihood(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, -2), target.flatten())


CHANNELS, SIDE, IMAGES = 24, 96, 6


def _convolved(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU(inplace=True))


class Hourglass(nn.Module):
    """Down to a quarter of the pixels and up again, with a shortcut, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.deep = _convolved(CHANNELS, CHANNELS), _convolved(CHANNELS, 2 * CHANNELS)
        self.down, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 2, stride=2)
        self.after = _convolved(2 * CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, channels, height, width)."""
        x = self.before(x)
        out: torch.Tensor = self.after(torch.cat([x, self.up(self.deep(self.down(x)))], dim=1))
        return out


def convolutional(index: int, count: int) -> nn.Module:
    """A share of four hourglasses, from three channels and to three."""
    layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1)] if index == 0 else []
    layers += [Hourglass() for _ in range(4 // count)]
    layers += [nn.Conv2d(CHANNELS, 3, 1)] if index == count - 1 else []
    return nn.Sequential(*layers)


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.zeros(MICRO_BATCHES * IMAGES, 3, SIDE, SIDE)
    return images, images


SUBJECTS = {
    "transformer": Subject(transformer, _sentences, _likelihood),
    "convolutional": Subject(convolutional, _images, mse_loss),
}


def work(subject_name: str, order: str, folder: Path, *, record: bool, count: int) -> None:
    """Train as one rank of the process group in the environment, in ``count`` micro-batches.

    Where not ``record``, wait to be let go.
    """
    torch.set_num_threads(1)
    _write_to_buffers()
    dist.init_process_group("gloo")
    subject = SUBJECTS[subject_name]
    if record:
        with headway.record(folder / TRACE, first_step=FIRST_RECORDED, stop_step=STEPS):
            _train(subject, ORDERS[order], count)
    else:
        _warm_up(ORDERS[order])
        gc.collect()
        (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
        while not (folder / GO).exists():
            time.sleep(POLL_S)
        _train(subject, ORDERS[order], count)
    dist.barrier()
    dist.destroy_process_group()


def _write_to_buffers() -> None:
    """Have the system count a buffer from when it is allocated, not only from when a message has come."""
    original = ReceiveBuffers.allocate

    def allocate(self: ReceiveBuffers, templates: Sequence[Any], device: torch.device) -> None:
        original(self, templates, device)
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.zero_()

    ReceiveBuffers.allocate = allocate  # type: ignore[method-assign]


def _warm_up(order: PipelineStrategy | None) -> None:
    """Load every library that training will need, on a small stage with each kind of layer."""

    def stage(_index: int, _count: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 3, 2, stride=2), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(),
        )  # fmt: skip

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(MICRO_BATCHES, 3, 8, 8), torch.zeros(MICRO_BATCHES, 3, 8, 8)

    _train(Subject(stage, batch, mse_loss), order, MICRO_BATCHES)


def _train(subject: Subject, order: PipelineStrategy | None, count: int) -> None:
    rank, stages = dist.get_rank(), dist.get_world_size()
    module = subject.stage(rank, stages)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    kind = Schedule1F1B if order is None else ScheduleGPipe
    steps: Any = kind(stage, count, loss_fn=subject.loss)
    if order is not None:
        PipelineRuntime(PipelineSteps(steps), order.schedule_of(stages))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-5, foreach=True)
    inputs, targets = subject.batch()
    for _ in range(STEPS):
        if rank == 0:
            steps.step(inputs)
        elif rank == stages - 1:
            steps.step(target=targets, losses=[])
        else:
            steps.step()
        optimizer.step()
        optimizer.zero_grad()
