"""Uneven inputs: what a rank does under ``join()`` while others still train.

While a join lasts, gradients are gathered rather than parameters: a rank that has run out of inputs takes part in every
collective with zeros, but its script steps no optimizer, so it cannot update a shard for the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from headway.scheduling.buckets import BucketSchedule
from headway.strategies.decoupled.engine import Engine
from headway.strategies.live import replicas


class Uneven:
    """One ``join()``: who is still training, for the ranks that are."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        schedule: BucketSchedule,
        device: torch.device,
        *,
        divide_by_initial: bool,
    ) -> None:
        self.group = group
        self.device = device  # where the group takes small tensors
        self.schedule = schedule  # what was in force before, and will be again
        self.divide_by_initial = divide_by_initial

    def divisor(self, *, reduces: bool) -> float:
        """Before a forward: tell every rank whether its backward reduces; what sums are to be divided by."""
        count = self.how_many(reduces)
        return float(dist.get_world_size(self.group)) if self.divide_by_initial or not count else float(count)

    def how_many(self, here: bool) -> int:
        """The number of ranks on which ``here`` is true."""
        count = torch.tensor([int(here)], device=self.device)
        dist.all_reduce(count, group=self.group)
        return int(count)

    def source(self, *, still_training: bool) -> int:
        """The rank of the group whose buffers or parameters everybody takes: the last that is still training."""
        here = dist.get_rank(self.group) if still_training else -1
        rank = torch.tensor([here], device=self.device)
        dist.all_reduce(rank, dist.ReduceOp.MAX, group=self.group)
        assert int(rank) >= 0, "every rank believes that it has joined"
        return int(rank)


class Joining(Protocol):
    """A wrapped model that can be joined."""

    module: nn.Module
    process_group: dist.ProcessGroup
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    uneven: Uneven | None

    @property
    def engine(self) -> Engine | None:
        """What runs the model."""

    def share_buffers(self, *, still_training: bool = True) -> None:
        """Give every rank the buffers of a rank that still trains."""

    def reschedule(self, schedule: BucketSchedule) -> None:
        """Put another schedule in force."""

    def join_ends(self) -> None:
        """Go on as before it."""


class DecoupledJoinHook(JoinHook):
    """Shadows the collectives of the ranks that still train."""

    def __init__(self, wrapped: Joining, uneven: Uneven) -> None:
        self._wrapped = wrapped
        self._uneven = uneven
        wrapped.uneven = uneven
        wrapped.reschedule(replace(uneven.schedule, gather="gradients"))
        if wrapped.engine is not None:
            wrapped.engine.transport.counts_steps = False

    def main_hook(self) -> None:
        """One iteration of the others."""
        wrapped, engine = self._wrapped, self._wrapped.engine
        assert engine is not None
        wrapped.share_buffers(still_training=False)
        reduces = self._uneven.how_many(False) > 0
        wrapped.require_forward_param_sync = reduces
        if reduces:
            engine.reducer.reduce_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give everybody the model of a rank that trained to the end, and its schedule back."""
        wrapped = self._wrapped
        if wrapped.engine is not None:
            wrapped.engine.settlement.settle_all()
        source = self._uneven.source(still_training=is_last_joiner)
        group, device = wrapped.process_group, self._uneven.device
        replicas.broadcast(wrapped.module.parameters(), group, device, source)
        if wrapped.forward_sync_buffers:
            replicas.broadcast(wrapped.module.buffers(), group, device, source)
        wrapped.join_ends()
