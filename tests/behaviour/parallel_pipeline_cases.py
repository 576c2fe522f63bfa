"""What ranks do for the tests of pipelines whose stages have replicas: two pipelines of two stages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from headway.scheduling.pipeline.orders import ORDERS
from headway.strategies.pipeline.runtime import PipelineRuntime
from headway.torch_private import default_store
from headway.torch_private.pipelining import PipelineSteps

STAGES, PIPELINES = 2, 2
MICRO_BATCHES, ROWS, WIDTH, STEPS = 4, 2, 8, 2
ARRIVED, LIMIT = "the last gradient has arrived", timedelta(seconds=30)


def part(stage: int) -> nn.Module:
    """One stage of the model: the same wherever it is built."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One step's input and target, of both pipelines."""
    torch.manual_seed(1000 + step)
    rows = PIPELINES * MICRO_BATCHES * ROWS
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def held_back(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    """Gradients of every step, by order; the last stage's replicas add up theirs after what its pipeline waits for.

    The replica in the second pipeline begins its all-reduce when stage 0 of the first pipeline has the gradient of the
    last micro-batch. So that in the first pipeline must have been sent before DDP waited for the all-reduce.
    """
    mesh = init_device_mesh("cpu", (PIPELINES, world_size // PIPELINES), mesh_dim_names=("data", "pipeline"))
    pipeline, stage_index = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    found = {}
    for order in ("1f1b", "gpipe"):
        wrapped = DistributedDataParallel(part(stage_index), process_group=mesh.get_group("data"))
        stage = PipelineStage(
            wrapped, stage_index, STAGES, torch.device("cpu"), group=mesh.get_group("pipeline")
        )
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        steps = PipelineSteps(schedule)
        PipelineRuntime(steps, ORDERS[order](STAGES, MICRO_BATCHES))
        now = [f"{order} {number}" for number in range(STEPS)]
        if (pipeline, stage_index) == (1, STAGES - 1):
            wrapped.register_comm_hook((mesh.get_group("data"), iter(now)), _when_arrived)
        if (pipeline, stage_index) == (0, 0):
            _say_when_last(steps, iter(now))
        gradients = []
        for number in range(STEPS):
            wrapped.zero_grad()
            data, target = (each.chunk(PIPELINES)[pipeline] for each in batch(number))
            if stage_index == 0:
                schedule.step(data)
            else:
                schedule.step(target=target)
            gradients.append(gradients_of(wrapped))
        found[order] = gradients
    return found


def alone() -> list[list[list[float]]]:
    """The gradients of every stage in every step, in one process."""
    parts = nn.ModuleList(part(stage) for stage in range(STAGES))
    found = []
    for number in range(STEPS):
        data, target = batch(number)
        parts.zero_grad()
        for own in parts:
            data = own(data)
        nn.functional.mse_loss(data, target).backward()
        found.append([gradients_of(own) for own in parts])
    return found


def gradients_of(module: nn.Module) -> list[float]:
    """All of them."""
    found = [each.grad for each in module.parameters()]
    return torch.cat([each.flatten() for each in found if each is not None]).tolist()


def _say_when_last(steps: PipelineSteps, names: Iterator[str]) -> None:
    """Say so when the backward of the last micro-batch begins: its gradient has been waited for."""
    original = steps.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        if kwargs["last"]:
            default_store().set(f"{ARRIVED} {next(names)}", "")
        original(*args, **kwargs)

    steps.backward = backward  # type: ignore[method-assign]


def _when_arrived(
    state: tuple[dist.ProcessGroup, Iterator[str]], bucket: Any
) -> torch.futures.Future[torch.Tensor]:
    group, names = state
    default_store().wait([f"{ARRIVED} {next(names)}"], LIMIT)
    work = dist.all_reduce(bucket.buffer().div_(PIPELINES), group=group, async_op=True)
    assert work is not None
    future: Any = work.get_future()
    reduced: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return reduced


_when_arrived.__annotations__.clear()  # DDP compares them with types, and here they are names
