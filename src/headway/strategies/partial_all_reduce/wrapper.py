"""PartialDataParallel: in the place of DistributedDataParallel, with partial all-reduce as a plan decides it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Self

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from headway import torch_private
from headway.collectives.hierarchical import Hosts
from headway.errors import CommunicationError, HeadwayWarning, UnsupportedError, UserError
from headway.job import Job
from headway.scheduling.groups import GroupSchedule
from headway.strategies.live.averaged import check_module
from headway.strategies.live.existing_group import existing_group
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.unfinished import Unfinished, of_partial_all_reduce
from headway.strategies.partial_all_reduce import meeting as coordinated
from headway.strategies.partial_all_reduce.averaging import Observer
from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.meeting import Meeting, choice_of
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.strategies.partial_all_reduce.runtime import JOIN_LIMIT_S, PartialAllReduce, check_bare

REFUSED = ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh")
"""Options of DistributedDataParallel that would mean something else here. Those about its all-reduce mean nothing."""
FIX = "Run without the plan, or with one that averages gradients."


class PartialDataParallel(PartialAllReduce, DistributedDataParallel):
    """What ``DistributedDataParallel(module, **given)`` becomes under a plan with partial all-reduce.

    Gradients are this rank's own, and nothing is communicated in forward and backward: what scripts do with gradients
    (accumulation with or without ``no_sync()``, clipping, a ``GradScaler``) is done to its own. After each
    ``optimizer.step()`` parameters are averaged in a group. All ranks begin with rank 0's parameters and buffers.
    ``finish()`` makes all ranks' models one.

    Collective over the default process group. Raises UnsupportedError for models and options that would train
    wrongly, UserError where there is no coordinator or it forms other groups, CommunicationError where not all ranks
    come within ``join_timeout_s``.
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
        options: dict[str, Any] = {
            "staleness": strategy.staleness, "moments": strategy.moments, "observer": observer,
            "join_timeout_s": join_timeout_s, "time_limit_s": strategy.group_limit_s,
        }  # fmt: skip
        schedule = _schedule(module, strategy, join_timeout_s)
        if schedule is not None:
            super().__init__(module, schedule, optimizer, **options)
        else:
            self._join_coordinated(module, strategy, optimizer, options)
        self.strategy = strategy
        self._look_like_ddp(given)
        self._unfinished = Unfinished(self, of_partial_all_reduce)

    def _join_coordinated(
        self, module: nn.Module, strategy: PartialAllReduceStrategy, optimizer: Optimizer | None,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        coordinated.refuse_second()
        meeting = Meeting(options["join_timeout_s"])
        choice = choice_of(strategy)
        found = meeting.coordination(choice)
        rank = dist.get_rank()

        def construct(client: CoordinatorClient) -> PartialAllReduce:
            # Workers of an earlier attempt may still count as there: rank 0 does not ask them for their state.
            super(PartialDataParallel, self).__init__(
                module, client, optimizer, worker=rank, host=found.host, secret=found.peers_secret,
                initial="peer" if rank else "own", **options,
            )  # fmt: skip
            return self

        coordinated.join(meeting, choice, found, construct)
        try:
            if rank and not self._known.others:
                raise CommunicationError(
                    f"rank {rank}: the coordinator knows nobody whose model it could begin with. Start the job again."
                )
            meeting.begin_together()
        except BaseException:
            self.close()
            raise
        coordinated.is_trained(self)

    def _look_like_ddp(self, given: Mapping[str, Any]) -> None:
        """What scripts read of a DistributedDataParallel."""
        self.device = next(
            parameter.device for parameter in self.module.parameters() if parameter.requires_grad
        )
        self.device_type = self.device.type
        moves = bool(given.get("device_ids"))
        self.device_ids = [self.device.index] if moves else None
        self.output_device = self.device.index if moves else None
        self.dim = 0
        self.process_group = dist.group.WORLD  # type: ignore[assignment]  # there is one
        self.find_unused_parameters = bool(given.get("find_unused_parameters"))
        self.gradient_as_bucket_view = bool(given.get("gradient_as_bucket_view"))
        self.static_graph, self.mixed_precision = False, None
        self.parameters_to_ignore: set[str] = set()
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.forward_sync_buffers = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, whose inputs are moved where the script gave ``device_ids``."""
        if self.device_ids:
            inputs, kwargs = torch_private.move_inputs_like_ddp(inputs, kwargs, self.device)
        return super().forward(*inputs, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module."""
        nn.Module.train(self, mode)
        return self

    def checkpoint(self) -> dict[str, Any]:
        """As ``PartialAllReduce``: it is meant to be this worker's own."""
        with self._unfinished.expected():
            return super().checkpoint()

    def close(self, *, leave: bool = True) -> None:
        """Leave the job; the model stays this worker's own, or the one that ``finish`` gave it."""
        if unfinished := self.__dict__.get("_unfinished"):
            unfinished.over()
        super().close(leave=leave)

    def join(self, *_args: Any, **_kwargs: Any) -> AbstractContextManager[None]:
        """Nothing: ranks need not make the same number of steps."""
        return nullcontext()

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Refused: averaging is no part of a graph. Raises UnsupportedError."""
        raise UnsupportedError(
            "a model that is averaged cannot be compiled as a whole", got="compile() of the wrapper",
            fix="Compile with model = torch.compile(model) before wrapping.",
        )  # fmt: skip

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Refused: there is no all-reduce of gradients. Raises UnsupportedError."""
        raise UnsupportedError(
            "register_comm_hook() has no gradients to reduce under partial all-reduce", fix=FIX
        )

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """A copy is an ordinary DistributedDataParallel, and no other worker."""
        return torch_private.pickle_as_stock_ddp(self)

    def _set_static_graph(self) -> None:
        """Nothing: no gradients are reduced."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {"world_size": dist.get_world_size(), "rank": dist.get_rank()}

    def join_hook(self, **_options: Any) -> NoReturn:
        """Refused, with ``Join`` over several models. Raises UnsupportedError."""
        raise UnsupportedError("Join has no collectives to shadow under partial all-reduce", fix=FIX)


def check_options(module: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise UserError or UnsupportedError for options of DistributedDataParallel that cannot be had here."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if unknown := sorted(set(given) - set(known)):
        raise UserError("DistributedDataParallel has no such option", got=", ".join(unknown))
    for name in REFUSED:
        if given.get(name):
            raise UnsupportedError(f"{name} is not supported by partial all-reduce", fix=FIX)
    if given.get("process_group") not in (None, dist.group.WORLD):
        raise UnsupportedError(
            "partial all-reduce is for all ranks of the job", got="a process group of its own",
            fix="Leave process_group out. For workers of several processes a plan has within_hosts.",
        )  # fmt: skip
    if torch_private.ddp_ignores_parameters(module):
        raise UnsupportedError("DistributedDataParallel was told to ignore some parameters", fix=FIX)
    _check_devices(module, given)


def _check_devices(module: nn.Module, given: Mapping[str, Any]) -> None:
    devices = {parameter.device for parameter in module.parameters()}
    outputs = [] if given.get("output_device") is None else [given["output_device"]]
    named = [torch_private.device_index(each) for each in [*(given.get("device_ids") or ()), *outputs]]
    if named and (len(devices) != 1 or any(each not in {d.index for d in devices} for each in named)):
        raise UnsupportedError(
            "device_ids or output_device names a device that the parameters are not on", got=str(named),
            expected=", ".join(sorted(map(str, devices))), fix="Move the model there before it is wrapped.",
        )  # fmt: skip


def _schedule(
    module: nn.Module, strategy: PartialAllReduceStrategy, join_timeout_s: float
) -> GroupSchedule | None:
    """The groups, where they are fixed; None where a coordinator forms them.

    Where the plan does not say which hosts there are, ranks tell each other which one they are on.
    """
    world_size = dist.get_world_size(existing_group(None))
    if world_size == 1:
        return GroupSchedule(1, ((),))
    if strategy.is_static and not strategy.hosts:
        hosts = Hosts.of_places(Meeting(join_timeout_s).hosts()).ranks
        if len(hosts) == 1 and strategy.group_size is not None and dist.get_rank() == 0:
            warnings.warn(
                f"static groups are of hosts, and all {world_size} ranks are on one: they average together after each "
                f"step, and group_size has no effect (got {strategy.group_size})",
                HeadwayWarning,
                stacklevel=3,
            )
        return strategy.groups_of(hosts)
    workers = len(strategy.hosts) if strategy.within_hosts is not None and strategy.hosts else world_size
    if not strategy.is_static and (strategy.group_size or 0) > workers and dist.get_rank() == 0:
        warnings.warn(
            f"groups of {strategy.group_size} are asked for, of {workers} workers: until others join, no group has "
            "more members than those",
            HeadwayWarning,
            stacklevel=3,
        )
    decided = strategy.decide(Job.of(model_spec(module), world_size))
    return decided if isinstance(decided, GroupSchedule) else None
