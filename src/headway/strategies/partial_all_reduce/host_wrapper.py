"""HostDataParallel: DistributedDataParallel within hosts, partial all-reduce across hosts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from headway import torch_private
from headway.collectives.hierarchical import Hosts
from headway.errors import HeadwayWarning, UnsupportedError
from headway.job import Job
from headway.scheduling.groups import GroupSchedule
from headway.strategies.live.averaged import check_module
from headway.strategies.live.existing_group import existing_group
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.refused_scalers import refuse_gradient_scalers_of
from headway.strategies.live.unfinished import Unfinished, of_hosts
from headway.strategies.partial_all_reduce import meeting as coordinated
from headway.strategies.partial_all_reduce import scheduled_coordinator
from headway.strategies.partial_all_reduce.averaging import Observer
from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.finishing import Finished
from headway.strategies.partial_all_reduce.host_ranks import (
    HostBroadcast,
    HostFollower,
    HostLeader,
    check_same,
)
from headway.strategies.partial_all_reduce.meeting import Meeting, choice_of
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.strategies.partial_all_reduce.rounds import Round
from headway.strategies.partial_all_reduce.runtime import (
    JOIN_LIMIT_S,
    SCALER_FIX,
    PartialAllReduce,
    check_bare,
)
from headway.strategies.partial_all_reduce.wrapper import FIX, check_options

OWN = ("process_group", "init_sync")
"""Options of DistributedDataParallel that this wrapper sets itself."""


class HostDataParallel(DistributedDataParallel):
    """Replaces ``DistributedDataParallel(module, **ddp_options)`` under partial all-reduce with ``within_hosts``.

    The ranks of a host are one worker: a DistributedDataParallel over them, with all its handling of gradients
    (``no_sync()``, clipping, ``GradScaler``, hooks) and buffers. After each ``optimizer.step()`` the first rank of a host
    averages its parameters with those of other hosts and broadcasts the result, so all ranks of a host hold bitwise the
    same parameters. Ranks are on the same host if they share host name and address, or according to ``hosts`` in the
    plan. If all are on one host, this is DistributedDataParallel, with a warning.

    Call ``flush``, ``finish``, ``checkpoint`` and ``restore`` on all ranks of a host. Raises as ``PartialDataParallel``
    does; if a rank is lost, the others of its host raise, and other hosts continue.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        strategy: PartialAllReduceStrategy,
        optimizer: Optimizer | None = None,
        observer: Observer | None = None,
        join_timeout_s: float = JOIN_LIMIT_S,
        **ddp_options: Any,
    ) -> None:
        check_bare(module)
        check_module(module)  # before ranks wait for each other
        check_options(module, ddp_options)
        existing_group(None)
        meeting = Meeting(join_timeout_s)
        hosts = _hosts(meeting, module, strategy)
        options = {name: value for name, value in ddp_options.items() if name not in OWN}
        worker: HostLeader | HostFollower | None = None
        group = _group_of_host(hosts)
        if len(hosts.ranks) > 1:
            device = next(parameter.device for parameter in module.parameters() if parameter.requires_grad)
            down = HostBroadcast(group, device)
            worker = _worker(
                meeting, module, optimizer, strategy, hosts, down, observer=observer, join_timeout_s=join_timeout_s
            )  # fmt: skip
        elif dist.get_rank() == 0:
            warnings.warn(
                f"this plan averages nothing: all {dist.get_world_size()} ranks are on one host and train under "
                "DistributedDataParallel. Hosts are identified by name and address, or by hosts in the plan",
                HeadwayWarning,
                stacklevel=2,
            )
        try:
            DistributedDataParallel.__init__(self, module, process_group=group, **options)
            if worker is not None and not strategy.is_static:
                meeting.begin_together()
        except BaseException as error:
            if worker is not None:
                meeting.give_up(error)
                worker.close()
            raise
        self.strategy, self.hosts = strategy, hosts
        if worker is not None:
            self.__dict__["_worker"] = worker  # no module of this one
            self._down = down
            if strategy.is_static:
                refuse_gradient_scalers_of(self, "static groups", SCALER_FIX)
            self._unfinished = Unfinished(self, of_hosts)
            if not strategy.is_static:
                coordinated.is_trained(self)

    @property
    def worker(self) -> HostLeader | HostFollower | None:
        """This rank's leader or follower; None if there is only one host."""
        worker: HostLeader | HostFollower | None = self.__dict__.get("_worker")
        return worker

    @property
    def iteration(self) -> int:
        """Number of steps that this rank has made; 0 if there is only one host."""
        return 0 if self.worker is None else self.worker.iteration

    @property
    def is_closed(self) -> bool:
        """Whether training has finished or the wrapper was closed."""
        return self.worker is not None and self.worker.is_closed

    @property
    def last_round(self) -> Round | None:
        """The last round that applied a group's mean, on the first rank of a host."""
        return self.worker.last_round if isinstance(self.worker, HostLeader) else None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, as DistributedDataParallel does."""
        if self.training and self.worker is not None:
            self.worker.changes()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def updated_by(self, optimizer: Optimizer) -> None:
        """As of ``PartialAllReduce``."""
        if self.worker is not None:
            self.worker.updated_by(optimizer)

    def flush(self) -> None:
        """Complete the averaging in flight, so that parameters are those with which the next step begins."""
        if self.worker is not None:
            self.worker.flush()

    def finish(self, source: int | None = None, timeout_s: float = JOIN_LIMIT_S) -> Finished:
        """End with the mean over hosts, bitwise equal on all ranks; see ``PartialAllReduce.finish``."""
        if self.worker is None:
            return Finished((0,), 0)
        try:
            return self.worker.finish(source, timeout_s)
        finally:
            self._unfinished.over()

    def checkpoint(self) -> dict[str, Any]:
        """Return model, optimizer and iteration of the host, and this rank's random state."""
        if self.worker is None:
            raise UnsupportedError(
                "no worker checkpoint exists: all ranks are on one host", fix="Save state_dict() instead."
            )
        with self._unfinished.expected():
            return self.worker.checkpoint()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``checkpoint()`` of this rank or another rank of its host. Call it on all ranks of a host.

        Raises UserError if it is not a checkpoint of this model, or differs among the ranks.
        """
        if self.worker is None:
            raise UnsupportedError(
                "no worker checkpoint exists: all ranks are on one host", fix="Load a state_dict() instead."
            )
        self.worker.restore(state)
        check_same(self.worker, self._down)

    def close(self, *, leave: bool = True) -> None:
        """Leave the job and keep the current model."""
        if self.worker is not None:
            self._unfinished.over()
            self.worker.close(leave=leave)

    def join(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise UnsupportedError: the ranks of a host average as one worker."""
        raise UnsupportedError(
            "join() is not supported with within_hosts: all ranks of a host must make the same steps", fix=FIX
        )

    def join_hook(self, **_options: Any) -> NoReturn:
        """Raise UnsupportedError, as ``join``."""
        self.join()

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Raise UnsupportedError: averaging cannot be compiled."""
        raise UnsupportedError(
            "an averaged model cannot be compiled as a whole", got="compile() of the wrapper",
            fix="Call model = torch.compile(model) before wrapping.",
        )  # fmt: skip

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Copy as an ordinary DistributedDataParallel, which is not another worker."""
        return torch_private.pickle_as_stock_ddp(self)


def _hosts(meeting: Meeting, module: nn.Module, strategy: PartialAllReduceStrategy) -> Hosts:
    if not strategy.hosts:
        return Hosts.of_places(meeting.hosts())
    workers = strategy.workers(Job.of(model_spec(module), dist.get_world_size()))
    return Hosts(tuple(map(tuple, workers)))


def _group_of_host(hosts: Hosts) -> dist.ProcessGroup:
    """Return the process group of this rank's host. Every rank creates the groups of all hosts."""
    world = existing_group(None)
    timeout = torch_private.group_timeout(world)
    groups = [dist.new_group(list(ranks), timeout, group_desc="headway host") for ranks in hosts.ranks]
    group = groups[hosts.number_of(dist.get_rank())]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _worker(
    meeting: Meeting, module: nn.Module, optimizer: Optimizer | None, strategy: PartialAllReduceStrategy,
    hosts: Hosts, down: HostBroadcast, **options: Any,
) -> HostLeader | HostFollower:  # fmt: skip
    """Create this rank's leader or follower. Followers return once their leader has joined."""
    number = hosts.number_of(dist.get_rank())
    if not strategy.is_static:
        coordinated.refuse_second()
        choice = choice_of(strategy)
        coordination = meeting.coordination(choice)
    if not down.is_first:
        if strategy.is_static:
            scheduled_coordinator.run_name()  # counted on all ranks alike
        follower = HostFollower(module, optimizer, down=down, moments=strategy.moments)
        follower.joined()
        return follower
    options = {
        **options, "down": down, "hosts": len(hosts.ranks), "worker": number, "staleness": strategy.staleness,
        "moments": strategy.moments, "time_limit_s": strategy.group_limit_s,
    }  # fmt: skip

    def construct(client: CoordinatorClient) -> PartialAllReduce:
        initial = "peer" if number else "own"  # as of PartialDataParallel
        return HostLeader(
            module,
            client,
            optimizer,
            host=coordination.host,
            secret=coordination.peers_secret,
            initial=initial,
            **options,
        )

    first: PartialAllReduce
    with down.failure_told():
        if strategy.is_static:
            named = strategy.model_copy(update={"hosts": tuple(map(len, hosts.ranks))})
            schedule = named.decide(Job.of(model_spec(module), dist.get_world_size()))
            assert isinstance(schedule, GroupSchedule)
            first = HostLeader(module, schedule, optimizer, **options)
        else:
            first = coordinated.join(meeting, choice, coordination, construct)
        assert isinstance(first, HostLeader)
        first.tell_joined()
    return first
