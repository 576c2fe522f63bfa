"""What PyTorch has: DistributedDataParallel in four configurations, ZeroRedundancyOptimizer, fully_shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from paced_training.jobs import LEARNING_RATE, MOMENTUM, PacedJob, optimizer_of
from paced_training.trainer import Trainer, held_bytes

DEFAULT_CAP_MB, DEFAULT_FIRST_CAP_MB = 25.0, 1.0
_ONE_BYTE_MB = 2**-20


class Ddp(Trainer):
    """DDP with the given bucket sizes in MiB: one for all, or a list of which the last stays in force."""

    name = "ddp"
    bound = "all-reduce"

    def __init__(
        self,
        job: PacedJob,
        caps_mb: Sequence[float],
        *,
        views: bool,
        zero: bool = False,
        static_graph: bool = False,
    ) -> None:
        inner = job.make()
        # The stubs want whole MiB, the code takes fractions, which scaled sizes need.
        wrapped = DistributedDataParallel(
            inner,
            bucket_cap_mb_list=list(caps_mb),  # type: ignore[arg-type]
            gradient_as_bucket_view=views,
            static_graph=static_graph,
        )
        parameters = list(inner.parameters())
        optimizer = (
            ZeroRedundancyOptimizer(
                parameters,
                SGD,
                parameters_as_bucket_view=True,
                lr=LEARNING_RATE,
                momentum=MOMENTUM,
                foreach=True,
            )
            if zero
            else optimizer_of(parameters)
        )
        super().__init__(job, wrapped, inner, optimizer)
        self._views = views

    def buffer_bytes(self) -> int:
        return 0 if self._views else held_bytes(self.inner.parameters())

    def optimizer_bytes(self) -> int:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            return held_bytes(
                value
                for state in self.optimizer.optim.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            )
        return super().optimizer_bytes()


DEFAULT_CAPS_MB = (DEFAULT_FIRST_CAP_MB, DEFAULT_CAP_MB)


def ddp_default(job: PacedJob) -> Ddp:
    """As stock DDP comes: 25 MiB, a first bucket of 1 MiB; both scaled as the model is."""
    trainer = Ddp(job, [cap * job.scale for cap in DEFAULT_CAPS_MB], views=False)
    trainer.note = "25 MiB, first 1 MiB, scaled"
    return trainer


def ddp_capped(job: PacedJob, caps_mb: Sequence[float]) -> Ddp:
    """``caps_mb`` of the unscaled model, the last for all further buckets; gradients are views of buckets."""
    trainer = Ddp(job, [cap * job.scale for cap in caps_mb], views=True)
    trainer.note = f"{' then '.join(f'{cap:g}' for cap in caps_mb)} MiB scaled, gradients are views"
    return trainer


def wfbp(job: PacedJob) -> Ddp:
    """Wait-free back-propagation: an all-reduce for every tensor, launched when its gradient is ready."""
    return Ddp(job, [_ONE_BYTE_MB], views=True)


def merged(job: PacedJob, caps_mb: Sequence[float]) -> Ddp:
    """Buckets of exactly these sizes (MiB), in the order in which gradients become ready."""
    trainer = Ddp(job, caps_mb, views=True)
    trainer.note = f"{len(caps_mb)} buckets, from measured alpha and beta"
    return trainer


def zero_redundancy(job: PacedJob) -> Ddp:
    trainer = Ddp(job, [DEFAULT_FIRST_CAP_MB * job.scale, DEFAULT_CAP_MB * job.scale], views=True, zero=True)
    trainer.note = "DDP's default buckets; parameters broadcast in buckets after the step"
    return trainer


class FullyShard(Trainer):
    """FSDP2 that keeps parameters whole between forward and backward, in groups of neighbouring modules."""

    name = "fsdp2"
    bound = "decoupled"

    def __init__(self, job: PacedJob, cap_mb: float) -> None:
        inner = job.make()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        groups = _neighbours(inner, cap_mb * job.scale * 2**20)
        for group in groups:
            fully_shard(group, mesh=mesh, reshard_after_forward=False)
        fully_shard(inner, mesh=mesh, reshard_after_forward=False)
        assert isinstance(inner, FSDPModule)
        super().__init__(job, inner, inner, optimizer_of(inner.parameters()))
        self._whole_bytes = 0
        self.note = f"{len(groups)} groups of about {cap_mb:g} MiB scaled"

    def values(self) -> torch.Tensor:
        whole = [p.full_tensor() for p in self.inner.parameters()]  # type: ignore[attr-defined]
        self._whole_bytes = held_bytes(whole)
        return torch.cat([w.detach().flatten() for w in whole])

    def buffer_bytes(self) -> int:
        """Gathered parameters stay for backward, and so do whole gradients until their group is reduced."""
        return 2 * self._whole_bytes


def _neighbours(model: nn.Module, cap_bytes: float) -> list[list[nn.Module]]:
    """Modules in order of registration, in groups of at least ``cap_bytes``; tied ones stay with the root."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    groups: list[list[nn.Module]] = []
    size = cap_bytes
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if not own or any(uses[id(p)] > 1 for p in own):
            continue
        if size >= cap_bytes:
            groups.append([])
            size = 0
        groups[-1].append(module)
        size += held_bytes(own)
    return groups
