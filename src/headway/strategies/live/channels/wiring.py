"""Wiring: where a wrapped model's buckets lie, and what carries them between ranks.

    parameters on   process group       buckets in            collectives
    the CPU         Gloo or other       memory                rings on threads
    a CUDA device   NCCL for CUDA       the device            NCCL, on streams
    a CUDA device   Gloo alone          pinned memory         rings on threads; copied from and to the device

Updates are computed where the parameters are, in every case, and so is the optimizer's state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.live.channels.streams import Streams

DESCRIPTION = "headway decoupled"
JUST_MADE_S = 0.2


@dataclass(frozen=True, slots=True)
class Wiring:
    """How one wrapped model's tensors travel.

    ``native`` says that collectives run on the parameters' device; ``messages`` is where the user's process group
    takes the tensors of small messages and of broadcasts.
    """

    device: torch.device
    native: bool
    messages: torch.device
    streams: Streams

    @property
    def buffers(self) -> torch.device:
        """Where buckets lie."""
        return self.device if self.native else torch.device("cpu")

    @property
    def pinned(self) -> bool:
        """Whether buckets lie in memory that a device copies from and to."""
        return self.buffers != self.device and self.device.type == "cuda"


def wiring_of(device: torch.device, group: dist.ProcessGroup) -> Wiring:
    """The wiring of a model on ``device`` over the ranks of ``group``. Raises UnsupportedError where there is none."""
    backends = torch_private.backends_of(group)
    native = device.type == "cuda" and backends.get("cuda") == "nccl"
    if device.type not in backends:
        raise UnsupportedError(
            f"the process group cannot carry tensors of the model's device, {device}",
            got=", ".join(f"{backend} for {kind}" for kind, backend in sorted(backends.items())),
            expected="Gloo for parameters on the CPU, NCCL or Gloo for CUDA",
            fix="Call init_process_group('cpu:gloo,cuda:nccl').",
        )
    return Wiring(device, native, torch.device("cpu") if "cpu" in backends else device, Streams(device))


class OwnGroups:
    """Process groups of one wrapped model alone, as the collectives of a group must be issued in one order.

    ``host`` are those for tensors on the CPU and ``native`` those for collectives where the parameters are; one of them
    has one group a channel. ``second`` is empty, or has one for each of ``host`` (``live.Prepared`` says what for).
    """

    def __init__(
        self,
        host: Sequence[dist.ProcessGroup],
        second: Sequence[dist.ProcessGroup] = (),
        native: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.host, self.second, self.native = tuple(host), tuple(second), tuple(native)
        self._made_s = time.monotonic()

    @property
    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """All of them."""
        return (*self.host, *self.second, *self.native)

    def end(self) -> None:
        """Close the connections and give back threads and descriptors. To be called when no rank uses them any more."""
        ended, self.host, self.second, self.native = self.all, (), (), ()
        if time.monotonic() < self._made_s + JUST_MADE_S:
            torch_private.let_gloo_finish()  # what was exchanged when they were made
        for group in ended:
            with suppress(ValueError, AssertionError):  # destroyed with the default group
                dist.destroy_process_group(group)


def groups_of_our_own(users_group: dist.ProcessGroup, wiring: Wiring, channels: int) -> OwnGroups:
    """New groups of the ranks of ``users_group``. Collective.

    Over Gloo they share its network devices, and with them the thread that serves connections.
    """
    if wiring.native:
        native = [_new_group(users_group, "nccl") for _ in range(channels)]
        return OwnGroups(host=[_new_group(users_group, "gloo")], native=native)
    devices = torch_private.gloo_devices(users_group)
    count = channels * (2 if users_group.size() == 2 else 1)
    groups = [_new_group(users_group, "gloo", devices) for _ in range(count)]
    return OwnGroups(host=groups[:channels], second=groups[channels:])


def _new_group(
    users_group: dist.ProcessGroup, backend: str, devices: Sequence[Any] = ()
) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(users_group)
    timeout = torch_private.group_timeout(users_group)
    local = users_group is not dist.group.WORLD
    if devices:
        return torch_private.new_gloo_group(ranks, timeout, devices, local=local, description=DESCRIPTION)
    group = dist.new_group(
        ranks, timeout, backend=backend, use_local_synchronization=local, group_desc=DESCRIPTION
    )
    assert isinstance(group, dist.ProcessGroup)
    return group
