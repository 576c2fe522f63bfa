"""HostDataParallel: DistributedDataParallel within a host, partial all-reduce across hosts, as a plan decides it."""

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
from headway.strategies.partial_all_reduce.host_ranks import FirstOfHost, HandingDown, OtherOfHost, check_same
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
"""Options of DistributedDataParallel that are decided here."""


class HostDataParallel(DistributedDataParallel):
    """What ``DistributedDataParallel(module, **given)`` becomes under partial all-reduce with ``within_hosts``.

    The ranks of a host are one worker: a DistributedDataParallel over them, with all that it does about gradients
    (``no_sync()``, clipping, a ``GradScaler``, hooks) and buffers. After each ``optimizer.step()`` the host's first
    rank averages its parameters with those of other hosts, and hands down what came of it: all ranks of a host hold the
    same parameters, to the bit. Ranks are on one host where they have one host name and address, or as the plan says
    (``hosts``). Where all are on one, this is DistributedDataParallel, with a warning.

    ``flush``, ``finish``, ``checkpoint`` and ``restore`` are called on all ranks of a host. Raises as
    ``PartialDataParallel`` does; where a rank is lost, the others of its host raise, and other hosts go on.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        strategy: PartialAllReduceStrategy,
        optimizer: Optimizer | None = None,
        observer: Observer | None = None,
        join_timeout_s: float = JOIN_LIMIT_S,
        **given: Any,
    ) -> None:
        check_bare(module)
        check_module(module)  # before ranks wait for each other
        check_options(module, given)
        existing_group(None)
        meeting = Meeting(join_timeout_s)
        hosts = _hosts(meeting, module, strategy)
        options = {name: value for name, value in given.items() if name not in OWN}
        worker: FirstOfHost | OtherOfHost | None = None
        group = _group_of_host(hosts)
        if len(hosts.ranks) > 1:
            device = next(parameter.device for parameter in module.parameters() if parameter.requires_grad)
            down = HandingDown(group, device)
            worker = _worker(
                meeting, module, optimizer, strategy, hosts, down, observer=observer, join_timeout_s=join_timeout_s
            )  # fmt: skip
        elif dist.get_rank() == 0:
            warnings.warn(
                f"all {dist.get_world_size()} ranks are on one host, so this plan averages nothing: they train under "
                "DistributedDataParallel. Hosts are told apart by name and address, or by the plan's hosts",
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
    def worker(self) -> FirstOfHost | OtherOfHost | None:
        """This rank's side of averaging; None where there is one host."""
        found: FirstOfHost | OtherOfHost | None = self.__dict__.get("_worker")
        return found

    @property
    def iteration(self) -> int:
        """How many steps this rank has made; 0 where there is one host."""
        return 0 if self.worker is None else self.worker.iteration

    @property
    def is_closed(self) -> bool:
        """Whether it has finished, or was closed."""
        return self.worker is not None and self.worker.is_closed

    @property
    def last_round(self) -> Round | None:
        """On the first rank of a host: the last round that ended with a group's mean."""
        return self.worker.last_round if isinstance(self.worker, FirstOfHost) else None

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
        """Finish the averaging in flight, so that the parameters are what the next step would begin with."""
        if self.worker is not None:
            self.worker.flush()

    def finish(self, source: int | None = None, timeout_s: float = JOIN_LIMIT_S) -> Finished:
        """As of ``PartialAllReduce``, whose workers are hosts: all ranks end with the mean over hosts, to the bit."""
        if self.worker is None:
            return Finished((0,), 0)
        try:
            return self.worker.finish(source, timeout_s)
        finally:
            self._unfinished.over()

    def checkpoint(self) -> dict[str, Any]:
        """This rank's model, optimizer, iteration and random numbers: but for the last, those of its host."""
        if self.worker is None:
            raise UnsupportedError(
                "there is one host, and nothing averages", fix="Save state_dict() instead."
            )
        with self._unfinished.expected():
            return self.worker.checkpoint()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``checkpoint()``: of this rank, or of another one of its host. On all ranks of a host.

        Raises UserError where it is no checkpoint of this model, or not the same on all of them.
        """
        if self.worker is None:
            raise UnsupportedError(
                "there is one host, and nothing averages", fix="Load a state_dict() instead."
            )
        self.worker.restore(state)
        check_same(self.worker, self._down)

    def close(self, *, leave: bool = True) -> None:
        """Leave the job; the model stays this host's own, or the one that ``finish`` gave it."""
        if self.worker is not None:
            self._unfinished.over()
            self.worker.close(leave=leave)

    def join(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refused: the ranks of a host average as one. Raises UnsupportedError."""
        raise UnsupportedError(
            "join() is not supported by within_hosts: ranks of a host make the same steps", fix=FIX
        )

    def join_hook(self, **_options: Any) -> NoReturn:
        """Refused, as ``join``. Raises UnsupportedError."""
        self.join()

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Refused: averaging is no part of a graph. Raises UnsupportedError."""
        raise UnsupportedError(
            "a model that is averaged cannot be compiled as a whole", got="compile() of the wrapper",
            fix="Compile with model = torch.compile(model) before wrapping.",
        )  # fmt: skip

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """A copy is an ordinary DistributedDataParallel, and no other worker."""
        return torch_private.pickle_as_stock_ddp(self)


def _hosts(meeting: Meeting, module: nn.Module, strategy: PartialAllReduceStrategy) -> Hosts:
    if not strategy.hosts:
        return Hosts.of_places(meeting.hosts())
    workers = strategy.workers(Job.of(model_spec(module), dist.get_world_size()))
    return Hosts(tuple(map(tuple, workers)))


def _group_of_host(hosts: Hosts) -> dist.ProcessGroup:
    """A process group of this rank's host. Every rank makes those of all."""
    world = existing_group(None)
    timeout = torch_private.group_timeout(world)
    groups = [dist.new_group(list(ranks), timeout, group_desc="headway host") for ranks in hosts.ranks]
    own = groups[hosts.number_of(dist.get_rank())]
    assert isinstance(own, dist.ProcessGroup)
    return own


def _worker(
    meeting: Meeting, module: nn.Module, optimizer: Optimizer | None, strategy: PartialAllReduceStrategy,
    hosts: Hosts, down: HandingDown, **options: Any,
) -> FirstOfHost | OtherOfHost:  # fmt: skip
    """This rank's side of averaging. The others of a host return when its first rank has joined."""
    number = hosts.number_of(dist.get_rank())
    if not strategy.is_static:
        coordinated.refuse_second()
        choice = choice_of(strategy)
        found = meeting.coordination(choice)
    if not down.is_first:
        if strategy.is_static:
            scheduled_coordinator.run_name()  # counted on all ranks alike
        other = OtherOfHost(module, optimizer, down=down, moments=strategy.moments)
        other.joined()
        return other
    options = {
        **options, "down": down, "hosts": len(hosts.ranks), "worker": number, "staleness": strategy.staleness,
        "moments": strategy.moments, "time_limit_s": strategy.group_limit_s,
    }  # fmt: skip

    def construct(client: CoordinatorClient) -> PartialAllReduce:
        initial = "peer" if number else "own"  # as of PartialDataParallel
        return FirstOfHost(
            module, client, optimizer, host=found.host, secret=found.peers_secret, initial=initial, **options
        )

    first: PartialAllReduce
    with down.failure_told():
        if strategy.is_static:
            named = strategy.model_copy(update={"hosts": tuple(map(len, hosts.ranks))})
            schedule = named.decide(Job.of(model_spec(module), dist.get_world_size()))
            assert isinstance(schedule, GroupSchedule)
            first = FirstOfHost(module, schedule, optimizer, **options)
        else:
            first = coordinated.join(meeting, choice, found, construct)
        assert isinstance(first, FirstOfHost)
        first.tell_joined()
    return first
