"""Keeping replicas alike: what ranks agree on when a model is wrapped, and rank 0's tensors for everybody."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from headway.collectives.hosts import Hosts
from headway.errors import UserError
from headway.model import ModelSpec
from headway.rpc import interface
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy

MESSAGE_BYTES = 64 * 2**20


def check_agreement(
    model: ModelSpec, schedule: Schedule | Strategy, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise UserError unless every rank of ``group``, which takes tensors on ``device``, has the same parameters and
    the same schedule.
    """
    digests = [_digest(model.fingerprint), _digest(repr(schedule))]
    mine = torch.tensor(digests, dtype=torch.int64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    for index, what in enumerate(("parameters (names, shapes, dtypes, and their order)", "plan")):
        others = [rank for rank, theirs in enumerate(everyones) if theirs[index] != everyones[0][index]]
        if others:
            raise UserError(
                f"ranks do not agree on the model's {what}",
                got=f"rank {others[0]} differs from rank 0",
                expected="the same model and plan on every rank",
                fix="Build the model the same way everywhere.",
            )


def is_so_anywhere(mine: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``mine`` holds on any rank of ``group``, which takes tensors on ``device``. Collective."""
    found = torch.tensor([int(mine)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found)


def hosts_of(group: dist.ProcessGroup, device: torch.device) -> Hosts:
    """Which ranks of ``group``, which takes tensors on ``device``, share a host. Collective."""
    mine = torch.tensor([_digest(interface.host_name())], device=device)
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyones, mine, group=group)
    return Hosts.of_places([int(theirs) for theirs in everyones])


def broadcast(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, device: torch.device, source: int = 0
) -> None:
    """Overwrite ``tensors`` with those of rank ``source`` of ``group``, in as few messages as memory allows.

    They travel on ``device``, wherever they are.
    """
    batch: list[torch.Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        batch.append(tensor)
        size_bytes += tensor.numel() * tensor.element_size()
        if size_bytes >= MESSAGE_BYTES:
            _broadcast_batch(batch, group, device, source)
            batch, size_bytes = [], 0
    if size_bytes:
        _broadcast_batch(batch, group, device, source)


def _broadcast_batch(
    tensors: list[torch.Tensor], group: dist.ProcessGroup, device: torch.device, source: int
) -> None:
    with torch.no_grad():
        pieces = [tensor.detach().reshape(-1).view(torch.uint8).to(device) for tensor in tensors]
        message = torch.cat(pieces)
        dist.broadcast(message, group=group, group_src=source)
        if dist.get_rank(group) != source:
            for tensor, piece in zip(tensors, message.split([p.numel() for p in pieces]), strict=True):
                aligned = piece.clone()  # a view of another dtype must begin at a multiple of its size
                tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
