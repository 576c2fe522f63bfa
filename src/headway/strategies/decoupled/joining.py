"""What a decoupled wrapper does under ``join()``: train with uneven inputs, as DistributedDataParallel does."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.handing_over import HandsOver
from headway.strategies.decoupled.uneven import DecoupledJoinHook, Uneven
from headway.strategies.live.channels.wiring import Wiring


class Joins(HandsOver):
    """A wrapper that can be joined: by its engine, which gathers gradients meanwhile, or by stock DDP."""

    forward_sync_buffers: bool
    require_forward_param_sync: bool
    uneven: Uneven | None = None
    _wiring: Wiring

    @abstractmethod
    def reschedule(self, schedule: BucketSchedule) -> None:
        """Put another schedule in force."""

    @abstractmethod
    def share_buffers(self, *, still_training: bool = True) -> None:
        """Give every rank the buffers of a rank that still trains."""

    @property
    def joining(self) -> bool:
        """Whether a ``join()`` lasts."""
        return self._stock.joining or self.uneven is not None

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs, as ``DistributedDataParallel.join``. Gradients are gathered while it lasts.

        Stock DDP goes on without servers where gradients are to be divided by the ranks that are left, of which it
        tells them nothing.
        """
        if enable and not divide_by_initial_world_size and self._stock.has_servers:
            self.use_stock_ddp()
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_options: Any) -> JoinHook:
        """What this rank does while it has no inputs left and others have. Collective."""
        if self._stock.in_force:
            self.join_begins()
            return self._stock.join_hook(divide_by_initial_world_size=divide_by_initial_world_size)
        self.join_ends()  # of one that was switched off
        uneven = Uneven(
            self.process_group,
            self.schedule,
            self.join_device,
            divide_by_initial=divide_by_initial_world_size,
        )
        return DecoupledJoinHook(self, uneven)

    def join_begins(self) -> None:
        """Every rank enters a ``join()``, those without inputs too."""
        if self.tuner is not None:
            self.tuner.join_begins()

    def join_ends(self) -> None:
        """Go on as before a ``join()``, if there is one."""
        if self.uneven is not None and self.engine is not None:
            before, self.uneven = self.uneven.schedule, None
            self.engine.reducer.divisor = float(self.engine.transport.world_size)
            self.reschedule(before)

    @property
    def join_device(self) -> torch.device:
        """Where ``join()`` keeps its counts."""
        return self._wiring.messages

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that ``join()`` counts over."""
        return self.process_group
