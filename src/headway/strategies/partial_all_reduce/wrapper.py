"""PartialDataParallel: replaces DistributedDataParallel under a plan with partial all-reduce."""

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
"""Rejected options of DistributedDataParallel; options about its all-reduce are ignored."""
FIX = "Run without the plan, or with one that averages gradients."


class PartialDataParallel(PartialAllReduce, DistributedDataParallel):
    """Replaces ``DistributedDataParallel(module, **ddp_options)`` under a plan with partial all-reduce.

    Gradients stay local, and nothing is communicated in forward and backward: accumulation with or without
    ``no_sync()``, clipping and ``GradScaler`` act on this rank's gradients. After each ``optimizer.step()`` parameters
    are averaged in a group. All ranks start with rank 0's parameters and buffers; ``finish()`` ends with one model.

    Collective over the default process group. Raises UnsupportedError for models and options that would train
    wrongly, UserError if there is no coordinator or its generator differs from the plan, and CommunicationError if not
    all ranks arrive within ``join_timeout_s``.
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
        self._look_like_ddp(ddp_options)
        self._unfinished = Unfinished(self, of_partial_all_reduce)

    def _join_coordinated(
        self, module: nn.Module, strategy: PartialAllReduceStrategy, optimizer: Optimizer | None,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        coordinated.refuse_second()
        meeting = Meeting(options["join_timeout_s"])
        choice = choice_of(strategy)
        coordination = meeting.coordination(choice)
        rank = dist.get_rank()

        def construct(client: CoordinatorClient) -> PartialAllReduce:
            # Workers of an earlier attempt may still be registered, so rank 0 does not ask for their state.
            super(PartialDataParallel, self).__init__(
                module, client, optimizer, worker=rank, host=coordination.host, secret=coordination.peers_secret,
                initial="peer" if rank else "own", **options,
            )  # fmt: skip
            return self

        coordinated.join(meeting, choice, coordination, construct)
        try:
            if rank and not self._directory.peers:
                raise CommunicationError(
                    f"rank {rank}: the coordinator knows no worker to copy the model from. Start the job again."
                )
            meeting.begin_together()
        except BaseException:
            self.close()
            raise
        coordinated.is_trained(self)

    def _look_like_ddp(self, ddp_options: Mapping[str, Any]) -> None:
        """Set the attributes of DistributedDataParallel that scripts read."""
        self.device = next(
            parameter.device for parameter in self.module.parameters() if parameter.requires_grad
        )
        self.device_type = self.device.type
        moves = bool(ddp_options.get("device_ids"))
        self.device_ids = [self.device.index] if moves else None
        self.output_device = self.device.index if moves else None
        self.dim = 0
        self.process_group = dist.group.WORLD  # type: ignore[assignment]  # there is one
        self.find_unused_parameters = bool(ddp_options.get("find_unused_parameters"))
        self.gradient_as_bucket_view = bool(ddp_options.get("gradient_as_bucket_view"))
        self.static_graph, self.mixed_precision = False, None
        self.parameters_to_ignore: set[str] = set()
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.forward_sync_buffers = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, with inputs moved to the device if the script passed ``device_ids``."""
        if self.device_ids:
            inputs, kwargs = torch_private.move_inputs_like_ddp(inputs, kwargs, self.device)
        return super().forward(*inputs, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module."""
        nn.Module.train(self, mode)
        return self

    def checkpoint(self) -> dict[str, Any]:
        """Return this worker's own state; see ``PartialAllReduce.checkpoint``."""
        with self._unfinished.expected():
            return super().checkpoint()

    def close(self, *, leave: bool = True) -> None:
        """Leave the job and keep the current model."""
        if unfinished := self.__dict__.get("_unfinished"):
            unfinished.over()
        super().close(leave=leave)

    def join(self, *_args: Any, **_kwargs: Any) -> AbstractContextManager[None]:
        """Do nothing: ranks need not make the same number of steps."""
        return nullcontext()

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Raise UnsupportedError: averaging cannot be compiled."""
        raise UnsupportedError(
            "an averaged model cannot be compiled as a whole", got="compile() of the wrapper",
            fix="Call model = torch.compile(model) before wrapping.",
        )  # fmt: skip

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Raise UnsupportedError: gradients are not all-reduced."""
        raise UnsupportedError(
            "register_comm_hook() is not supported: partial all-reduce does not reduce gradients", fix=FIX
        )

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Copy as an ordinary DistributedDataParallel, which is not another worker."""
        return torch_private.pickle_as_stock_ddp(self)

    def _set_static_graph(self) -> None:
        """Do nothing: gradients are not reduced."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {"world_size": dist.get_world_size(), "rank": dist.get_rank()}

    def join_hook(self, **_options: Any) -> NoReturn:
        """Raise UnsupportedError: there are no collectives to shadow in ``Join``."""
        raise UnsupportedError(
            "Join is not supported: partial all-reduce has no collectives to shadow", fix=FIX
        )


def check_options(module: nn.Module, ddp_options: Mapping[str, Any]) -> None:
    """Raise UserError or UnsupportedError for options of DistributedDataParallel that are not supported."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    if unknown := sorted(set(ddp_options) - set(parameters)):
        raise UserError("unknown option of DistributedDataParallel", got=", ".join(unknown))
    for name in REFUSED:
        if ddp_options.get(name):
            raise UnsupportedError(f"{name} is not supported by partial all-reduce", fix=FIX)
    if ddp_options.get("process_group") not in (None, dist.group.WORLD):
        raise UnsupportedError(
            "partial all-reduce uses all ranks of the job", got="a process_group",
            fix="Remove process_group. For workers of several processes, set within_hosts in the plan.",
        )  # fmt: skip
    if torch_private.ddp_ignores_parameters(module):
        raise UnsupportedError("parameters ignored by DistributedDataParallel are not supported", fix=FIX)
    _check_devices(module, ddp_options)


def _check_devices(module: nn.Module, ddp_options: Mapping[str, Any]) -> None:
    devices = {parameter.device for parameter in module.parameters()}
    outputs = [] if ddp_options.get("output_device") is None else [ddp_options["output_device"]]
    named = [
        torch_private.device_index(device) for device in [*(ddp_options.get("device_ids") or ()), *outputs]
    ]
    if named and (len(devices) != 1 or any(device not in {d.index for d in devices} for device in named)):
        raise UnsupportedError(
            "device_ids or output_device does not match the device of the parameters", got=str(named),
            expected=", ".join(sorted(map(str, devices))), fix="Move the model to that device before wrapping it.",
        )  # fmt: skip


def _schedule(
    module: nn.Module, strategy: PartialAllReduceStrategy, join_timeout_s: float
) -> GroupSchedule | None:
    """Return the fixed groups; None if a coordinator forms them.

    If the plan does not list hosts, ranks exchange their host names.
    """
    world_size = dist.get_world_size(existing_group(None))
    if world_size == 1:
        return GroupSchedule(1, ((),))
    if strategy.is_static and not strategy.hosts:
        hosts = Hosts.of_places(Meeting(join_timeout_s).hosts()).ranks
        if len(hosts) == 1 and strategy.group_size is not None and dist.get_rank() == 0:
            warnings.warn(
                f"group_size {strategy.group_size} has no effect: static groups consist of hosts, and all {world_size} "
                "ranks are on one host. They all average after each step",
                HeadwayWarning,
                stacklevel=3,
            )
        return strategy.groups_of(hosts)
    workers = len(strategy.hosts) if strategy.within_hosts is not None and strategy.hosts else world_size
    if not strategy.is_static and (strategy.group_size or 0) > workers and dist.get_rank() == 0:
        warnings.warn(
            f"group_size {strategy.group_size} exceeds the number of workers ({workers}): groups stay smaller until more "
            "workers join",
            HeadwayWarning,
            stacklevel=3,
        )
    decided = strategy.decide(Job.of(model_spec(module), world_size))
    return decided if isinstance(decided, GroupSchedule) else None
