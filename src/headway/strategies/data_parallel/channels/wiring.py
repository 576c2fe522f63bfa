"""Wiring: where a wrapped model's buckets lie, and what carries them between ranks.

    parameters on   process group       buckets in            collectives
    the CPU         Gloo or other       memory                rings on threads
    a CUDA device   NCCL for CUDA       the device            NCCL, on streams
    a CUDA device   Gloo alone          pinned memory         rings on threads; copied from and to the device

Updates are computed where the parameters are, in every case, and so is the optimizer's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.data_parallel.channels.streams import Streams


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


@dataclass(frozen=True, slots=True)
class OwnGroups:
    """Process groups of one wrapped model alone, as the collectives of a group must be issued in one order.

    ``host`` are those for tensors on the CPU and ``native`` those for collectives where the parameters are; one of them
    has one group a channel. ``second`` is empty, or has one beside each of ``host`` (``live.Prepared`` says what for).
    """

    host: tuple[dist.ProcessGroup, ...]
    second: tuple[dist.ProcessGroup, ...] = ()
    native: tuple[dist.ProcessGroup, ...] = ()

    @property
    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """All of them."""
        return (*self.host, *self.second, *self.native)


def groups_of_our_own(users_group: dist.ProcessGroup, wiring: Wiring, channels: int) -> OwnGroups:
    """New groups of the ranks of ``users_group``. Collective."""

    def new(backend: str, count: int) -> tuple[dist.ProcessGroup, ...]:
        return tuple(_new_group(users_group, backend) for _ in range(count))

    if wiring.native:
        return OwnGroups(host=new("gloo", 1), native=new("nccl", channels))
    return OwnGroups(
        host=new("gloo", channels), second=new("gloo", channels) if users_group.size() == 2 else ()
    )


def _new_group(users_group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(users_group)
    group = dist.new_group(
        ranks, torch_private.group_timeout(users_group), backend=backend,
        use_local_synchronization=users_group is not dist.group.WORLD,
        group_desc="headway decoupled",
    )  # fmt: skip
    assert isinstance(group, dist.ProcessGroup)
    return group
