"""What ranks do for the tests of pipelines that are given what cannot be trained: say what they raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate

from headway.errors import HeadwayError
from headway.scheduling.pipeline.orders import grouped, zero_bubble
from headway.strategies.pipeline.runtime import PipelineRuntime
from headway.torch_private.pipelining import PipelineSteps

MICRO_BATCHES, ROWS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What a rank raises in the first step of pipelines that cannot be trained, by what is wrong with them."""
    cases: dict[str, Callable[[], None]] = {
        "uneven batch": lambda: step(rank, world_size, samples=MICRO_BATCHES * ROWS - 1),
        "small batch": lambda: step(rank, world_size, samples=MICRO_BATCHES - 1),
        "uneven target": lambda: step(rank, world_size, targets=MICRO_BATCHES * ROWS + 1),
        "other shapes": lambda: step(rank, world_size, declared=(WIDTH, WIDTH - 1)),
        "other types": lambda: step(rank, world_size, declared=(WIDTH, WIDTH), dtype=torch.float64),
    }
    return {name: _raised(case) for name, case in cases.items()}


def step(
    rank: int,
    world_size: int,
    *,
    samples: int = MICRO_BATCHES * ROWS,
    targets: int = MICRO_BATCHES * ROWS,
    declared: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """One step; where shapes are ``declared``, stage 1 is said to be given the second one, of ``dtype``."""
    given: dict[str, Any] = {}
    if declared is not None:
        puts_out, is_given = (torch.zeros(ROWS, width) for width in declared)
        taken = is_given.to(dtype) if rank == 1 else puts_out
        given = {"input_args": (taken.requires_grad_(),), "output_args": (puts_out.requires_grad_(),)}
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, world_size, CPU, **given)
    steps = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    PipelineRuntime(PipelineSteps(steps), grouped(world_size, MICRO_BATCHES, 2))
    _one_step(steps, rank, world_size, samples, targets)


def in_a_later_step(rank: int, world_size: int) -> str:
    """What is left at the end of an epoch makes a smaller batch: the second step of all ranks."""

    def two_steps() -> None:
        stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, world_size, CPU)
        steps = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        PipelineRuntime(PipelineSteps(steps), grouped(world_size, MICRO_BATCHES, 2))
        for samples in (MICRO_BATCHES * ROWS, MICRO_BATCHES):
            _one_step(steps, rank, world_size, samples, samples)

    return _raised(two_steps)


def hands_on(rank: int, world_size: int, what: str) -> str:
    """What ranks raise where stage 1 puts out what no message carries."""

    mesh = init_device_mesh("cpu", (world_size,))

    class Strange(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            found = super().forward(x)
            if rank != 1:
                return found
            if what == "DTensor":
                return DTensor.from_local(found, mesh, [Replicate()])
            return None if what == "None" else 3.5

    def one() -> None:
        stage = PipelineStage(Strange(WIDTH, WIDTH), rank, world_size, CPU)
        steps = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        PipelineRuntime(PipelineSteps(steps), grouped(world_size, MICRO_BATCHES, 2))
        _one_step(steps, rank, world_size, MICRO_BATCHES * ROWS, MICRO_BATCHES * ROWS)

    return _raised(one)


def views(rank: int, world_size: int) -> list[float]:
    """Gradients in halves of stages that put out views: a ``Linear`` behind three dimensions does."""
    stage = PipelineStage(viewing(rank), rank, world_size, CPU)
    steps = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    PipelineRuntime(PipelineSteps(steps), zero_bubble(world_size, MICRO_BATCHES))
    data, target = cubes()
    for _ in range(2):
        stage.submod.zero_grad()
        if rank == 0:
            steps.step(data)
        else:
            steps.step(target=target) if rank == world_size - 1 else steps.step()
    return gradients(stage.submod)


def viewing(rank: int) -> nn.Module:
    """A stage whose output is a view."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def cubes() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its target."""
    torch.manual_seed(9)
    return torch.randn(MICRO_BATCHES * ROWS, 3, WIDTH), torch.randn(MICRO_BATCHES * ROWS, 3, WIDTH)


def gradients(module: nn.Module) -> list[float]:
    """All of them."""
    found = [each.grad for each in module.parameters()]
    return torch.cat([each.flatten() for each in found if each is not None]).tolist()


def _one_step(steps: ScheduleGPipe, rank: int, world_size: int, samples: int, targets: int) -> None:
    if rank == 0:
        steps.step(torch.ones(samples, WIDTH))
    elif rank == world_size - 1:
        steps.step(target=torch.ones(targets, WIDTH), losses=[])
    else:
        steps.step()


def _raised(case: Callable[[], None]) -> str:
    try:
        case()
    except (HeadwayError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
