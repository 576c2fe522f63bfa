"""Parameter servers, live: stock DDP whose communication hook pushes every bucket and pulls its mean."""

from __future__ import annotations

import atexit
import weakref
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.collectives import live
from headway.collectives.algorithms import ALL_REDUCE, SERVERS
from headway.collectives.program import scratch_numel_of
from headway.collectives.servers import push_and_pull
from headway.errors import CommunicationError, UnsupportedError
from headway.strategies.data_parallel.channels.communication import Channels, Job
from headway.strategies.data_parallel.channels.wiring import groups_of_our_own, wiring_of
from headway.strategies.data_parallel.ddp import runtime as ddp_runtime
from headway.strategies.data_parallel.parameter_server.policy import ParameterServerStrategy

_STRATEGY = "_headway_strategy"


def wrap(module: nn.Module, strategy: ParameterServerStrategy, **ddp_options: Any) -> DistributedDataParallel:
    """Wrap ``module`` in DDP that communicates through servers; bucket sizes are those of ``strategy``.

    Raises UnsupportedError for parameters that are not on the CPU, and for process groups without Gloo.
    """
    check_module(module)
    wrapped = DistributedDataParallel(module, **{**ddp_options, **options(strategy)})
    serve(wrapped, strategy)
    return wrapped


def check_module(module: nn.Module) -> None:
    """Raise UnsupportedError for a module whose gradients servers could not add up."""
    elsewhere = sorted({str(p.device) for p in module.parameters() if p.device.type != "cpu"})
    if elsewhere:
        raise UnsupportedError(
            "parameter servers are for parameters on the CPU", got=", ".join(elsewhere), fix="Use ddp or decoupled.",
        )  # fmt: skip


def options(strategy: ParameterServerStrategy) -> dict[str, Any]:
    """The arguments of DistributedDataParallel that ``strategy`` decides."""
    return ddp_runtime.options(strategy.bucketing())


def serve(wrapped: DistributedDataParallel, strategy: ParameterServerStrategy) -> None:
    """Have a model that was wrapped with the ``options`` of ``strategy`` communicate through servers. Collective."""
    setattr(wrapped, _STRATEGY, strategy)
    if wrapped.process_group.size() > 1:
        servers = Servers(wrapped.process_group, strategy.channels)
        wrapped.register_comm_hook(servers, push_bucket)
        weakref.finalize(wrapped, servers.stop).atexit = False


def strategy_of(model: nn.Module) -> ParameterServerStrategy | None:
    """The strategy that ``wrap`` gave a model, if it did."""
    return getattr(model, _STRATEGY, None)


class Servers:
    """This rank's part in serving: channels that push, add up and pull, one bucket at a time each."""

    def __init__(self, group: dist.ProcessGroup, channels: int) -> None:
        wiring = wiring_of(torch.device("cpu"), group)
        self.world_size = group.size()
        self._group = group
        self._groups = groups_of_our_own(group, wiring, channels)
        self._channels = Channels(self._groups, lambda: "a peer ended or fell silent", wiring.streams)
        self._channels.use(channels)
        self._scratch = [torch.empty(0)] * channels
        self._prepared: list[dict[int, live.Prepared]] = [{} for _ in range(channels)]  # by bucket
        self._places: dict[
            int, tuple[int, int]
        ] = {}  # where DDP keeps each bucket for now, and how large it is
        self._stopped = False
        _watch(self)

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Whether this cannot go on without ``group``."""
        return group in (self._group, dist.group.WORLD, *self._groups.all)

    def push(self, buffer: torch.Tensor, bucket: int) -> torch.futures.Future[Any]:
        """Have the mean of ``buffer`` over ranks put in its place; the future is done when it is there."""
        self._look_for_new_buckets(buffer, bucket)
        future: torch.futures.Future[Any] = torch.futures.Future()

        def then(error: CommunicationError | None) -> None:
            if error is None:
                future.set_result(buffer)
            else:
                future.set_exception(error)

        size_bytes = buffer.numel() * buffer.element_size()
        work = partial(self._serve, buffer, bucket)
        self._channels.submit(Job(ALL_REDUCE, bucket, size_bytes, work, algorithm=SERVERS, then=then))
        return future

    def stop(self) -> None:
        """End the channels' threads."""
        if not self._stopped:
            self._stopped = True
            self._channels.stop()

    def _serve(self, buffer: torch.Tensor, bucket: int, channel: int) -> None:
        buffer.div_(self.world_size)
        program = self._prepared[channel].get(bucket)
        if program is None:
            program = self._prepared[channel][bucket] = self._bound(buffer, channel)
        program.run()

    def _look_for_new_buckets(self, buffer: torch.Tensor, bucket: int) -> None:
        """Forget programs that are bound to buckets which DDP has replaced: they would keep the memory of these."""
        place = buffer.data_ptr(), buffer.numel()
        if self._places.setdefault(bucket, place) != place:
            self._places = {bucket: place}
            for prepared in self._prepared:
                prepared.clear()

    def _bound(self, buffer: torch.Tensor, channel: int) -> live.Prepared:
        """The program on a channel's connections, bound to a bucket."""
        group = self._groups.host[channel]
        program = push_and_pull(group.rank(), group.size())
        needed = scratch_numel_of(program, buffer.numel())
        scratch = self._scratch[channel]
        if scratch.numel() < needed or scratch.dtype != buffer.dtype:
            self._prepared[channel].clear()  # or the smaller one would be kept as well
            scratch = self._scratch[channel] = buffer.new_empty(needed)
        second = self._groups.second[channel] if self._groups.second else None
        return live.Prepared(program, buffer, group, scratch, second)


_alive: weakref.WeakSet[Servers] = weakref.WeakSet()


def _watch(servers: Servers) -> None:
    """Stop ``servers`` before the groups that they need, or the interpreter, go away."""
    _watch_groups()
    _alive.add(servers)


@cache
def _watch_groups() -> None:
    torch_private.before_group_shutdown(_before_shutdown)
    atexit.register(_at_exit)


def _before_shutdown(group: dist.ProcessGroup) -> None:
    for servers in [each for each in _alive if each.serves(group)]:
        servers.stop()


def _at_exit() -> None:
    for servers in list(_alive):
        servers.stop()


def push_bucket(servers: Servers, bucket: Any) -> torch.futures.Future[Any]:
    """DDP's communication hook, for a ``dist.GradBucket``."""
    return servers.push(bucket.buffer(), bucket.index())


push_bucket.__annotations__.clear()  # DDP compares them with types, and here they are names
