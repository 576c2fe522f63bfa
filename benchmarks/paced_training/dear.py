"""DeAR as published (arXiv 2302.12445), on the ring of sends and receives that Headway uses itself.

Groups are cut in the order of registration, each before it would exceed the threshold, and gradients are gathered.
Either half has connections of its own. ``update`` stands still until every reduce-scatter is done and launches the
first gather; the pre-hook of a group's first layer waits for its gather and launches the next. Nothing of the authors'
code is used. Their collectives are NCCL's; Gloo's own reduce-scatter would cost them an all-reduce, so they get the
better ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paced_training.jobs import PacedJob
from paced_training.layered import Lane, Layered
from paced_training.ring import ring


@dataclass
class _Group:
    layers: list[int]
    buffer: torch.Tensor
    scatter: Callable[[], None]
    gather: Callable[[], None]
    scratch_bytes: int
    missing: int
    views: dict[tuple[int, int], torch.Tensor]
    tensors: int
    scattered: threading.Event | None = None
    gathered: threading.Event | None = None
    arrived: bool = True


class Dear(Layered):
    name = "dear"
    bound = "decoupled"

    def __init__(self, job: PacedJob, threshold_mb: float) -> None:
        super().__init__(job)
        self._world_size = dist.get_world_size()
        self._process_groups = [dist.new_group(backend="gloo") for _ in range(2)]
        self._groups = self._cut(threshold_mb * job.scale * 2**20)
        self._group_of = {layer: g for g, group in enumerate(self._groups) for layer in group.layers}
        self._scatters, self._gathers = Lane(), Lane()
        self.note = f"{len(self._groups)} groups of {threshold_mb:.3g} MiB scaled"

    def ready(self, index: int, position: int, parameter: torch.Tensor) -> None:
        group = self._groups[self._group_of[index]]
        gradient = parameter.grad
        assert gradient is not None
        group.views[index, position].copy_(gradient)
        group.missing -= 1
        if group.missing == 0:
            group.missing = group.tensors
            group.scattered = self._scatters.submit(group.scatter)

    def update(self) -> None:
        super().update()
        for group in self._groups:
            assert group.scattered is not None
            self._scatters.wait(group.scattered)
            group.gathered, group.arrived = None, False
        for layer in self.layers:
            layer.due = True
        self._gather(0)

    def arrive(self, index: int) -> None:
        number = self._group_of[index]
        group = self._groups[number]
        if not group.arrived:
            self._gather(number)
            assert group.gathered is not None
            self._gathers.wait(group.gathered)
            group.arrived = True
            self._gather(number + 1)
            group.buffer.div_(self._world_size)
        layer = self.layers[index]
        layer.gradients = [group.views[index, position] for position in range(len(layer.parameters))]

    def buffer_bytes(self) -> int:
        return sum(4 * group.buffer.numel() + group.scratch_bytes for group in self._groups)

    def close(self) -> None:
        for lane in (self._scatters, self._gathers):
            lane.stop()
        for group in self._process_groups:
            dist.destroy_process_group(group)

    def _gather(self, number: int) -> None:
        if number < len(self._groups) and self._groups[number].gathered is None:
            group = self._groups[number]
            group.gathered = self._gathers.submit(group.gather)

    def _cut(self, threshold_bytes: float) -> list[_Group]:
        cut: list[list[int]] = []
        size = 0
        for index, layer in enumerate(self.layers):
            own = 4 * sum(p.numel() for p in layer.parameters)
            if not cut or size + own > threshold_bytes:
                cut.append([])
                size = 0
            cut[-1].append(index)
            size += own
        return [self._group(layers) for layers in cut]

    def _group(self, layers: list[int]) -> _Group:
        owned = [(i, n, p) for i in layers for n, p in enumerate(self.layers[i].parameters)]
        numel = sum(p.numel() for _, _, p in owned)
        padded = -(-numel // self._world_size) * self._world_size
        buffer = torch.zeros(padded)
        views, start = {}, 0
        for index, position, parameter in owned:
            views[index, position] = buffer[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        scatter, gather, scratch_bytes = ring(buffer, *self._process_groups)
        return _Group(layers, buffer, scatter, gather, scratch_bytes, len(owned), views, tensors=len(owned))
