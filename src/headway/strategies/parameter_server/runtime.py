"""Parameter servers, live: stock DDP whose communication hook pushes every bucket and pulls its mean."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.collectives import live
from headway.collectives.algorithms import ALL_REDUCE, SERVERS
from headway.collectives.program import scratch_numel_of
from headway.collectives.servers import Serving
from headway.errors import UnsupportedError
from headway.strategies.ddp import runtime as ddp_runtime
from headway.strategies.live import replicas
from headway.strategies.live.channels import retirement
from headway.strategies.live.channels.communication import Job
from headway.strategies.live.channels.hooked import HookedChannels
from headway.strategies.live.channels.wiring import OwnGroups, wiring_of
from headway.strategies.live.existing_group import existing_group
from headway.strategies.live.module_spec import check_dense_gradients, model_spec
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.plugin import InForce

_STRATEGY = "_headway_strategy"


def wrap(module: nn.Module, strategy: ParameterServerStrategy, **ddp_options: Any) -> DistributedDataParallel:
    """Wrap ``module`` in DDP that communicates through servers; bucket sizes are those of ``strategy``.

    Raises as ``check`` does, and UnsupportedError for process groups without Gloo.
    """
    check(module, strategy, ddp_options)
    wrapped = DistributedDataParallel(module, **{**ddp_options, **options(strategy)})
    take_over(wrapped, strategy, ddp_options)
    return wrapped


def check(module: nn.Module, strategy: ParameterServerStrategy, given: Mapping[str, Any]) -> None:
    """Refuse, on all ranks, what servers could not add up. ``given`` are the arguments of DDP. Collective.

    Raises UnsupportedError for parameters that are not on the CPU and for sparse gradients, UserError where ranks have
    other parameters, or the same in another order: DDP itself says so on one rank alone, and others wait for it.
    """
    check_runs(strategy)
    check_module(module)
    group = existing_group(given.get("process_group"))
    replicas.check_agreement(
        model_spec(module), strategy, group, wiring_of(torch.device("cpu"), group).messages
    )


def check_runs(strategy: ParameterServerStrategy) -> None:
    """Raise UnsupportedError for servers that are predicted alone."""
    if strategy.servers is not None:
        raise UnsupportedError(
            "servers on hosts, with or without workers, are predicted and cannot be run yet",
            got=f"servers: {strategy.servers}", expected="servers: null, where each worker is a server",
            fix="Leave out servers, or use ddp or decoupled.",
        )  # fmt: skip


def check_module(module: nn.Module) -> None:
    """Raise UnsupportedError for a module whose gradients servers could not add up."""
    elsewhere = sorted({str(p.device) for p in module.parameters() if p.device.type != "cpu"})
    if elsewhere:
        raise UnsupportedError(
            "parameter servers are for parameters on the CPU", got=", ".join(elsewhere), fix="Use ddp or decoupled.",
        )  # fmt: skip
    check_dense_gradients(module, "Leave out sparse=True, or use ddp.")


def options(strategy: ParameterServerStrategy) -> dict[str, Any]:
    """The arguments of DistributedDataParallel that ``strategy`` decides."""
    return ddp_runtime.options(strategy.bucketing())


def take_over(
    wrapped: DistributedDataParallel, strategy: ParameterServerStrategy, given: Mapping[str, Any]
) -> None:
    """Have a model that a script has just wrapped, with ``given`` and ``options``, communicate through servers.

    Collective. Raises PlanError for shares of another number of ranks.
    """
    strategy.serving.check(wrapped.process_group.size())
    ddp_runtime.keep_compiled_parts(wrapped, given)
    Served(wrapped, strategy)


class Served:
    """DDP with the ``options`` of ``strategy`` that communicates through servers until ``end``; made by all ranks."""

    def __init__(self, wrapped: DistributedDataParallel, strategy: ParameterServerStrategy) -> None:
        retirement.end_unused()
        self._servers: Servers | None = None
        if wrapped.process_group.size() > 1:
            servers = self._servers = Servers(wrapped, strategy.channels, strategy.serving)
            self._abandoning = retirement.when_collected(wrapped, servers.abandon)
        setattr(wrapped, _STRATEGY, strategy)
        torch_private.copy_without_hook(wrapped, _STRATEGY)
        self.hook(wrapped)

    def hook(self, wrapped: DistributedDataParallel) -> None:
        """Go on with another reducer of ``wrapped``."""
        if self._servers is not None:
            wrapped.register_comm_hook(self._servers, push_bucket)

    def end(self, wrapped: DistributedDataParallel) -> None:
        """Leave ``wrapped``, which has let go of its reducer, without servers."""
        delattr(wrapped, _STRATEGY)
        torch_private.copy_with_hook(wrapped)
        if self._servers is not None and self._abandoning.detach():
            self._servers.abandon()


def in_force(wrapped: nn.Module) -> InForce | None:
    """What ``wrap`` gave a model, if it did."""
    strategy: ParameterServerStrategy | None = getattr(wrapped, _STRATEGY, None)
    if strategy is None or not isinstance(wrapped, DistributedDataParallel):
        return None
    return InForce(strategy.model_dump(mode="json"), ddp_runtime.named_buckets(wrapped))


class Servers(HookedChannels):
    """This rank's part in serving: channels that push, add up and pull, one bucket at a time each."""

    def __init__(self, wrapped: DistributedDataParallel, channels: int, serving: Serving) -> None:
        super().__init__(wrapped, channels, ParameterServerStrategy.name)
        self._lanes = [_Lane(channel, self._groups, serving) for channel in range(channels)]

    def push(self, buffer: torch.Tensor, bucket: int) -> torch.futures.Future[Any]:
        """Have the mean of ``buffer`` over ranks put in its place; the future is done when it is there."""
        size_bytes = buffer.numel() * buffer.element_size()
        work = partial(self._serve, buffer, bucket)
        return self.submit(Job(ALL_REDUCE, bucket, size_bytes, work, algorithm=SERVERS), buffer)

    def abandon(self) -> None:
        """Let go of buckets at once, and of connections as soon as every rank does."""
        super().abandon()
        self._lanes.clear()

    def _serve(self, buffer: torch.Tensor, bucket: int, channel: int) -> None:
        buffer.div_(self.world_size)
        self._lanes[channel].run(buffer, bucket)


class _Known(NamedTuple):
    """Where DDP kept a bucket the last time (address, numel), and the program bound to it, if it is kept."""

    place: tuple[int, int]
    program: live.Prepared | None


class _Lane:
    """What one channel's thread serves with: programs on the channel's connections, and room for what is pushed.

    Programs keep the memory of the buckets that they are bound to, and DDP replaces its buckets after the first step.
    So only that of a bucket is kept which is where it was the time before.
    """

    def __init__(self, channel: int, groups: OwnGroups, serving: Serving) -> None:
        self._serving = serving
        self._group = groups.host[channel]
        self._second = groups.second[channel] if groups.second else None
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._known: dict[int, _Known] = {}  # by bucket

    def run(self, buffer: torch.Tensor, bucket: int) -> None:
        """Push and pull ``buffer``, a bucket."""
        place = buffer.data_ptr(), buffer.numel()
        known = self._known.get(bucket)
        stayed = known is not None and known.place == place
        program = (known.program if known is not None and stayed else None) or self._bound(buffer)
        program.run()
        self._known[bucket] = _Known(place, program if stayed else None)

    def _bound(self, buffer: torch.Tensor) -> live.Prepared:
        program = self._serving.program(self._group.rank(), self._group.size())
        needed = scratch_numel_of(program, buffer.numel())
        scratch = self._scratch.get(buffer.dtype)
        if scratch is None or scratch.numel() < needed:
            scratch = self._scratch[buffer.dtype] = buffer.new_empty(needed)
        return live.Prepared(program, buffer, self._group, scratch, self._second)


def push_bucket(servers: Servers, bucket: Any) -> torch.futures.Future[Any]:
    """DDP's communication hook, for a ``dist.GradBucket``."""
    return servers.push(bucket.buffer(), bucket.index())


push_bucket.__annotations__.clear()  # DDP compares them with types, and here they are names
