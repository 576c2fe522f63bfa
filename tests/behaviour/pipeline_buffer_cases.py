"""What ranks do for the test of buffers: train a pipeline whose stages have statistics of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import headway

MICRO_BATCHES, ROWS, WIDTH, STEPS = 3, 4, 5, 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(2)
        )
    ).double()


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(MICRO_BATCHES * ROWS, WIDTH, dtype=torch.float64) for _ in range(STEPS)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).mean()


def trained(rank: int, world_size: int) -> dict[str, list[float]]:
    """The whole model's state after some steps."""
    del world_size
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    order = headway.strategy("pipeline", order="1f1b", micro_batches=MICRO_BATCHES)
    pipeline: Any = headway.parallelize(own, optimizer, order, loss_fn=loss)
    given = batches()
    torch.manual_seed(10 + rank)
    for batch in given:
        optimizer.zero_grad()
        pipeline.train_step(batch, batch)
        optimizer.step()
    return {name: value.double().flatten().tolist() for name, value in pipeline.full_state_dict().items()}


def alone() -> dict[str, list[float]]:
    """The same in one process: each stage draws from a generator of its own, micro-batch by micro-batch."""
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    torch.manual_seed(10)
    drawn = [torch.get_rng_state()]
    torch.manual_seed(11)
    drawn.append(torch.get_rng_state())
    for batch in batches():
        optimizer.zero_grad()
        for part in batch.chunk(MICRO_BATCHES):
            x = part
            for stage, layer in enumerate(own.children()):
                torch.set_rng_state(drawn[stage])
                x = layer(x)
                drawn[stage] = torch.get_rng_state()
            (loss(x, part) / MICRO_BATCHES).backward()
        optimizer.step()
    return {name: value.double().flatten().tolist() for name, value in own.state_dict().items()}
