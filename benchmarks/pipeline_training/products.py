"""One rank of pipelines whose stages have replicas: one run in DDP is recorded, and every product is timed in turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import order_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.measuring.probe import probe_cluster
from headway.scheduling.buckets import GatherMode
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.runtime import PipelineRuntime
from headway.strategies.registry import plugin_of
from headway.torch_private.pipelining import PipelineSteps
from pipeline_training.measured import cpu_s

STAGES, REPLICAS, MICRO_BATCHES = 2, 2, 8
COLUMNS = 2**17  # of a boundary, half a MiB
LAYERS, LAYER_FLOATS, LAYER_S = 4, 2**19, 0.008
ROUNDS, QUICK_ROUNDS, STEPS, WARM_STEPS, RECORDED_STEPS = 5, 2, 3, 2, 6
TRACE, PROBED, FOUND = "trace", "probed.yaml", "found.json"
RECORDED = "torch-1f1b"
ORDERS = ("1f1b", "k=2", "gpipe", "eager-1f1b")
DECOUPLED_ORDERS = ("1f1b", "k=2")
FORMS: tuple[GatherMode, ...] = ("parameters", "gradients")


@dataclass(frozen=True)
class ProductCase:
    """Links of ``rate_mbit``, and buckets of ``bucket_cap_mb``."""

    name: str
    rate_mbit: float
    bucket_cap_mb: float

    @property
    def lab(self) -> dict[str, Any]:
        """The lab's spec: a host a rank."""
        hosts = [{"name": f"host{n}", "rate": f"{self.rate_mbit:g}mbit"} for n in range(STAGES * REPLICAS)]
        return {"hosts": hosts}

    def strategies(self) -> dict[str, MeshStrategy]:
        """What is timed and predicted, by the method's name."""
        data = DistributedDataParallelStrategy(bucket_cap_mb=self.bucket_cap_mb)
        found = {name: MeshStrategy(pipeline=_order(name), data=data) for name in ORDERS}
        for form in FORMS:
            apart = DecoupledStrategy(bucket_cap_bytes=round(self.bucket_cap_mb * 2**20), gather=form)
            for name in DECOUPLED_ORDERS:
                found[f"{name} x decoupled, {form}"] = MeshStrategy(pipeline=_order(name), data=apart)
        return found


CASES = {
    case.name: case
    for case in (
        ProductCase("quiet-one-bucket", 500.0, 25.0),
        ProductCase("quiet-small-buckets", 500.0, 2.0),
        ProductCase("steady-one-bucket", 200.0, 25.0),
        ProductCase("steady-small-buckets", 200.0, 2.0),
    )
}


def _order(name: str) -> PipelineStrategy:
    if name.startswith("k="):
        return PipelineStrategy(order="kfkb", group_size=int(name[2:]), micro_batches=MICRO_BATCHES)
    return PipelineStrategy.model_validate({"order": name, "micro_batches": MICRO_BATCHES})


class _Layer(torch.autograd.Function):
    """Hands on what it is given after a sleep; its weight's gradient is real."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.size = weight.shape
        time.sleep(LAYER_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * LAYER_S)
        return gradients[0].clone(), torch.ones(ctx.size)


class Layer(nn.Module):
    """A layer that sleeps, with a weight of two MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LAYER_FLOATS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Layer.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


def work(case_name: str, folder: Path, *, quick: bool) -> None:
    """Record torch's 1F1B, probe, and time every method, interleaved; rank 0 writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = CASES[case_name]
    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("data", "pipeline"))
    with headway.record(folder / TRACE, first_step=WARM_STEPS, stop_step=WARM_STEPS + RECORDED_STEPS):
        step = _method(case, mesh, None)
        for _ in range(WARM_STEPS + RECORDED_STEPS):
            step()
    cluster = probe_cluster(busy_cores=False)
    if dist.get_rank() == 0:
        cluster.save(folder / PROBED)
    methods = {RECORDED: step}
    methods |= {name: _method(case, mesh, strategy) for name, strategy in case.strategies().items()}
    for method in methods.values():
        for _ in range(WARM_STEPS):
            method()
    taken_ms: dict[str, list[float]] = {name: [] for name in methods}
    begun, used, names = time.monotonic(), cpu_s(), list(methods)
    for number in range(QUICK_ROUNDS if quick else ROUNDS):
        for name in (names[each] for each in order_of(number, len(names))):
            taken_ms[name].append(_block_ms(methods[name]))
    cpu = (cpu_s() - used) * dist.get_world_size() / (time.monotonic() - begun) / (os.cpu_count() or 1)
    if dist.get_rank() == 0:
        (folder / FOUND).write_text(json.dumps({"taken_ms": taken_ms, "cpu": cpu}))
    dist.barrier()
    os._exit(0)  # torch's groups wait for each other at length otherwise


def _block_ms(step: Callable[[], None]) -> float:
    """The mean of some consecutive steps, over all ranks."""
    dist.barrier()
    begun = time.monotonic()
    for _ in range(STEPS):
        step()
    taken = torch.tensor([(time.monotonic() - begun) * 1e3 / STEPS], dtype=torch.float64)
    dist.all_reduce(taken)
    return float(taken) / dist.get_world_size()


def _method(case: ProductCase, mesh: Any, strategy: MeshStrategy | None) -> Callable[[], None]:
    """A step of an order, or of torch's own schedule, on a stage of its own."""
    index, group = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    replicas, module = mesh.get_group("data"), nn.Sequential(*(Layer() for _ in range(LAYERS)))
    wrapped: nn.Module
    if strategy is not None and isinstance(strategy.data, DecoupledStrategy):
        wrapped = plugin_of(strategy.data).wrap(module, strategy.data, process_group=replicas)
    else:
        wrapped = DistributedDataParallel(module, process_group=replicas, bucket_cap_mb=case.bucket_cap_mb)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, foreach=True)
    stage = PipelineStage(wrapped, index, STAGES, torch.device("cpu"), group=group)
    torchs = Schedule1F1B if strategy is None else ScheduleGPipe
    steps = torchs(stage, MICRO_BATCHES, loss_fn=lambda out, target: (out * target).mean())
    if strategy is not None:
        PipelineRuntime(PipelineSteps(steps), strategy.pipeline.schedule_of(STAGES))
    batch, target = torch.ones(MICRO_BATCHES, COLUMNS), torch.ones(MICRO_BATCHES, 1)

    def step() -> None:
        optimizer.zero_grad()
        if index == 0:
            steps.step(batch)
        else:
            steps.step(target=target, losses=[], return_outputs=False)
        optimizer.step()

    return step
