"""DecoupledDataParallel: in the place of DistributedDataParallel, with the decoupled all-reduce."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from headway import torch_private
from headway.errors import CommunicationError, HeadwayWarning, UnsupportedError
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule, restricted
from headway.strategies.adaptive.stock import Stock, stock_options
from headway.strategies.adaptive.trained_set import TrainedSet
from headway.strategies.ddp.policy import cap_bytes as cap_bytes_of_ddp
from headway.strategies.decoupled import lifecycle
from headway.strategies.decoupled.checks import (
    check_casts,
    check_device_ids,
    check_module,
    trainable_parameters,
)
from headway.strategies.decoupled.condition import LOCK
from headway.strategies.decoupled.engine import Engine
from headway.strategies.decoupled.joining import Joins
from headway.strategies.decoupled.peers import Peers
from headway.strategies.decoupled.policy import (
    DEFAULT_CAP_BYTES,
    DEVICE_CAP_BYTES,
    DecoupledStrategy,
    OnStockDdp,
    strategy_of,
)
from headway.strategies.decoupled.prehook import MaterialiseHook
from headway.strategies.decoupled.refused import refuse, refuse_options
from headway.strategies.decoupled.stepping import clear_gradients
from headway.strategies.live import replicas
from headway.strategies.live.channels import retirement
from headway.strategies.live.channels.wiring import groups_of_our_own, wiring_of
from headway.strategies.live.existing_group import existing_group
from headway.strategies.live.module_spec import model_spec

if TYPE_CHECKING:
    from headway.strategies.adaptive.tuning.proposals import Tuned


class DecoupledDataParallel(Joins):
    """Data parallelism whose all-reduce is cut in two: half under backward, half under the next forward.

    Takes the arguments of ``DistributedDataParallel`` and a ``schedule``; without one, buckets of ``bucket_cap_mb``
    are cut in reverse order of registration. With ``tune`` the schedule is improved during the first steps, and
    ``tuning`` says how as soon as that is done; with ``adapt`` whenever the job's network has changed. Stock DDP does
    the steps until then where ``begin_as`` gives its buckets, through servers where that says so. Parameters,
    gradients, optimizer state and buffers read at any time are those of stock DDP. Options whose meaning is not
    implemented raise UnsupportedError.

    Parameters may be on the CPU, or on a CUDA device with NCCL or Gloo; ``device_ids`` and ``output_device`` may name
    that device, and inputs are then moved to it.

    Raises UnsupportedError for models and options that would train wrongly, UserError where there is no process
    group or where ranks do not agree on the model.
    """

    tuning: Tuned | None = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        schedule: BucketSchedule | None = None,
        tune: bool = False,
        adapt: bool = False,
        begin_as: OnStockDdp | None = None,
    ) -> None:
        nn.Module.__init__(self)
        del check_reduction  # without effect on results
        refuse_options(
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce, mixed_precision=mixed_precision,
            device_mesh=device_mesh, skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )  # fmt: skip
        group = existing_group(process_group)
        retirement.let_go_of_collected()  # they still hold their parameters
        check_module(module)
        self.device = next(iter(trainable_parameters(module).values())).device
        moves = check_device_ids(self.device, device_ids, output_device)
        self._wiring = wiring_of(self.device, group)
        spec = model_spec(module)
        if schedule is None:
            default_bytes = DEFAULT_CAP_BYTES if self.device.type == "cpu" else DEVICE_CAP_BYTES
            cap_bytes = default_bytes if bucket_cap_mb is None else max(1, int(bucket_cap_mb * 2**20))
            schedule = DecoupledStrategy(bucket_cap_bytes=cap_bytes).decide(Job.of(spec))

        check_casts(schedule, self.device)
        self.module = module
        self.process_group = group
        self.dim = dim
        self.device_ids = [self.device.index] if moves else None
        self.output_device = self.device.index if moves else None
        self.device_type = self.device.type
        self.find_unused_parameters, self.static_graph = find_unused_parameters, False
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.mixed_precision = None
        self.parameters_to_ignore: set[str] = set()
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.forward_sync_buffers = broadcast_buffers is not False
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
        self.schedule = schedule
        self._channels = schedule.channels  # at most
        # As stock DDP has it: what was recorded of a compiled model holds for it here.
        self._graph_bytes = cap_bytes_of_ddp(bucket_cap_mb)
        self._join_config = torch_private.join_config_disabled()

        self._stock = Stock(
            stock_options(
                device_ids=self.device_ids, output_device=self.output_device, dim=dim, process_group=group,
                bucket_cap_mb=bucket_cap_mb, find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=gradient_as_bucket_view, batched_grad_copy=batched_grad_copy,
                shares_buffers=self.forward_sync_buffers,
            )
        )  # fmt: skip

        replicas.check_agreement(spec, schedule, group, self.join_device)
        self._hosts = replicas.hosts_of(group, self.join_device)
        if not self._wiring.native:
            schedule.algorithms.check(self._hosts)
        if init_sync:
            replicas.broadcast(module.parameters(), group, self.join_device)
            if self.forward_sync_buffers or forward_sync_buffers is not None:
                replicas.broadcast(module.buffers(), group, self.join_device)
        if begin_as is not None and _compiled_inside(module):
            raise UnsupportedError(
                f"a plan of {begin_as.name} cannot adapt a compiled model", got=begin_as.describe(),
                fix="Leave out --adapt, or adapt: true.",
            )  # fmt: skip
        self._wrapped = {name: id(parameter) for name, parameter in trainable_parameters(module).items()}
        self._start_engine()
        if begin_as is not None:
            self.use_stock_ddp(begin_as)
        if tune or adapt:
            self._watch_over(tune=tune, adapt=adapt)

    def _watch_over(self, *, tune: bool, adapt: bool) -> None:
        from headway.strategies.adaptive.adapting import live
        from headway.strategies.adaptive.tuning.tuner import tune as tune_while_training

        if self._compiled:
            said = "the schedule of a compiled model is not tuned while it trains: record it and run a plan"
            warnings.warn(said, HeadwayWarning, stacklevel=3)
            return
        if adapt and self.device_type != "cpu":
            said = f"steps on {self.device_type} are not watched: the plan stays as it is"
            warnings.warn(said, HeadwayWarning, stacklevel=3)
            adapt = False
        if tune:
            before = self.strategy.describe()
            adapting = partial(_adapt_afterwards, before)
            tune_while_training(self, afterwards=adapting if adapt else None)
        elif adapt:
            live.adapt(self)

    def _start_engine(self) -> None:
        groups = groups_of_our_own(self.process_group, self._wiring, self._channels)
        trainable = trainable_parameters(self.module)
        engine = Engine(
            trainable, self.schedule, self._wiring, groups, self._hosts, Peers(groups.host[0]),
            find_unused=self.find_unused_parameters,
        )  # fmt: skip
        self.trainable = frozenset(id(parameter) for parameter in trainable.values())
        self._trained, self._frozen = TrainedSet(self.module), not trainable
        lifecycle.adopt(engine, self.process_group)
        self._compiled = _compiled_inside(self.module)
        self._watch_modules(engine)
        self.__dict__["_engine"] = engine
        self._abandoning = retirement.when_collected(self, partial(lifecycle.abandon, engine))

    def _watch_modules(self, engine: Engine) -> None:
        for owner in set(torch_private.eager_modules(self.module)) - set(engine.watched):
            engine.watched.add(owner)
            handle = owner.register_forward_pre_hook(MaterialiseHook(engine.settlement, owner), prepend=True)
            engine.own_handles.append(handle)

    @property
    def engine(self) -> Engine | None:
        """What runs this model; None in copies made by deepcopy or pickle, and where stock DDP does for good."""
        return self.__dict__.get("_engine")

    @property
    def strategy(self) -> DecoupledStrategy | OnStockDdp:
        """What is in force."""
        if self._stock.in_force:
            return self._stock.strategy
        return strategy_of(self.schedule, model_spec(self.module))

    @property
    def reductions(self) -> int:
        """How many backwards have been reduced, as far as it can be said without a look at gradients.

        It only grows, but for changes of what is in force; stock DDP's are counted while there is a tuner.
        """
        if self._stock.in_force:
            return self._stock.reductions
        return 0 if self.engine is None else self.engine.layout.buckets[0].reductions

    @property
    def reducer(self) -> Any:  # type: ignore[override]
        """What torch's pipelines ask for before the last backward of a stage."""
        if self._stock.in_force:
            return self._stock.ddp.reducer
        if self.engine is None:
            raise UnsupportedError("a copy of a decoupled model has no reducer")
        return self.engine.reducer

    def flush(self) -> None:
        """Finish everything in flight: averages are in ``.grad`` and due updates in parameters on return.

        Never needed for right results; useful before a timed section or a fork.
        """
        if self.engine is not None:
            self.engine.settlement.settle_all()

    def recover(self) -> int:
        """Behind a CommunicationError or an InternalError: leave ordinary parameters as of the last complete step.

        On this rank alone, and the model cannot be trained any more. Returns how many of the optimizer's steps are
        missing in them, 0 or 1. Raises UnsupportedError where nothing has failed, and where the latest step has reached
        some parameters alone.
        """
        engine = self.engine
        if engine is None or not engine.failed:
            raise UnsupportedError(
                "nothing has failed that a decoupled model could be recovered from", fix="Call state_dict()."
            )
        return lifecycle.give_up(engine)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all parameters by their total norm, as ``torch.nn.utils.clip_grad_norm_``; returns it.

        With parameters gathered only norms are exchanged, not gradients. Every rank must call it.
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, without waiting for those in flight."""
        with LOCK:
            clear_gradients(self.module.parameters(), set_to_none=set_to_none)
            super().zero_grad(set_to_none)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, after rank 0's buffers have been broadcast as stock DDP does it."""
        learning = torch.is_grad_enabled()
        if learning:
            self._check_whole()
        told = self._stock.in_force
        if told:
            self._before_stock(learning=learning)
        if self._stock.in_force:
            return self._stock.forward(self, inputs, kwargs, counted=self.tuner is not None)
        reducing = learning and self._begins_learning()
        if self.tuner is not None and not told:
            self.tuner.before_forward(learning=reducing)
        if self.is_stock:  # since a moment ago
            return self._stock.forward(self, inputs, kwargs, counted=True)
        engine = self.engine
        if self._join_config.enable:
            Join.notify_join_context(self)
        self.share_buffers()
        if self._join_config.enable and self.uneven is not None and engine is not None:
            engine.reducer.divisor = self.uneven.divisor(reduces=learning and self.require_backward_grad_sync)
        if self.device_ids:
            inputs, kwargs = torch_private.move_inputs_like_ddp(inputs, kwargs, self.device)
        if self._compiled:
            with torch_private.compiled_in_parts(self._graph_bytes):
                output = self.module(*inputs, **kwargs)
        else:
            output = self.module(*inputs, **kwargs)
        if reducing and engine is not None and self.require_backward_grad_sync:
            engine.reducer.expect(output)
        self.require_forward_param_sync = learning and self.require_backward_grad_sync
        return output

    def _begins_learning(self) -> bool:
        """A forward is about to begin whose gradients are recorded; whether its backward may be reduced."""
        engine = self.engine
        if engine is None:
            raise UnsupportedError(
                "a copy of a decoupled model cannot be trained", fix="Wrap a copy of its .module instead."
            )
        engine.begin_forward()
        if self.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            refuse("CUDA graph capture")
        if not self._join_config.enable:
            self.join_ends()  # one that was switched off has begun all the same
        trains = self._trains_something()
        engine.synchronise = self.require_backward_grad_sync
        return trains

    def _follow_trainable(self) -> None:
        """Parameters were frozen, unfrozen or replaced, on every rank alike: put buckets of those in force."""
        engine = self.engine
        mine = set() if engine is None else {id(state.parameter) for state in engine.layout.states}
        check_module(self.module, mine=mine)
        device = next(iter(trainable_parameters(self.module).values())).device
        if device != self.device:
            raise UnsupportedError("the model was moved after it was wrapped", got=device, expected=str(self.device),
                                   fix="Move the model before wrapping it.")  # fmt: skip
        self.schedule = restricted(self.schedule, model_spec(self.module))
        trainable = trainable_parameters(self.module)
        spec = model_spec(self.module)
        replicas.check_agreement(spec, self.schedule, self.process_group, self.join_device)
        with self._changing():
            if self._stock.in_force:
                self._stock.begin_again(self, self._stock.strategy)
            else:
                assert engine is not None
                engine.reschedule(trainable, self.schedule)
                engine.warn_of_drift(
                    [name for name, p in trainable.items() if self._wrapped.get(name) != id(p)]
                )
        self.trainable = frozenset(id(parameter) for parameter in trainable.values())

    def reschedule(self, schedule: BucketSchedule) -> None:
        """Put another schedule in force: on every rank, at the same point of the script, between two steps.

        So it is where stock DDP does the steps: the decoupled all-reduce goes on. Raises UserError where ranks do not
        agree on it, UnsupportedError in the middle of a backward.
        """
        if self.engine is None and not self._stock.in_force:
            raise UnsupportedError("a copy of a decoupled model has no schedule")
        if schedule.channels > self._channels:
            raise UnsupportedError(
                "a schedule asks for more channels than the model was wrapped with", got=schedule.channels,
                expected=f"at most {self._channels}",
            )  # fmt: skip
        replicas.check_agreement(model_spec(self.module), schedule, self.process_group, self.join_device)
        if not self._wiring.native:
            schedule.algorithms.check(self._hosts)
        if self.engine is not None and self.engine.running:
            self.engine.check_usable()
            refuse("reschedule() in the middle of a backward", fix="Call it between two steps.")
        with self._changing():
            accumulated = self._come_back() if self._stock.in_force else None
            if self.engine is None:
                self.schedule = schedule
                self._start_engine()
            else:
                self.engine.reschedule(trainable_parameters(self.module), schedule)
                self.schedule = schedule
            if accumulated is not None and self.engine is not None:
                self.engine.note_accumulated(accumulated)

    def _come_back(self) -> frozenset[int]:
        """End stock DDP; returns what its backwards have accumulated."""
        accumulated = self._stock.accumulated
        self._stock.end(self)
        if self.engine is not None:
            self._take_up(self.engine)
        return accumulated

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Refused: what is inside would not run compiled.

        Raises UnsupportedError.
        """
        raise UnsupportedError(
            "a decoupled model cannot be compiled as a whole", got="compile() of the wrapper",
            fix="Compile with model = torch.compile(model) before wrapping, or use stock DDP.",
        )  # fmt: skip

    def share_buffers(self, *, still_training: bool = True) -> None:
        """Give every rank the buffers of rank 0, or under ``join()`` of a rank that still trains, as stock DDP does."""
        if not (self.require_forward_param_sync and self.forward_sync_buffers):
            return
        if self.engine is not None and self.engine.closed:
            return
        buffers = list(self.module.buffers())
        if not buffers:
            return
        with torch_private.preserved_versions(buffers):
            try:
                source = 0 if self.uneven is None else self.uneven.source(still_training=still_training)
                replicas.broadcast(buffers, self.process_group, self.join_device, source)
            except RuntimeError as error:
                raise CommunicationError(
                    f"rank {dist.get_rank()}: the broadcast of buffers failed: {' '.join(str(error).split())[:200]}. "
                    "A peer ended or fell silent: its own output says why. Restart the job from its last checkpoint."
                ) from error

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: everything but the engine and the process group."""
        left_behind = (
            "_engine", "_stock", "_abandoning", "process_group", "trainable", "_trained", "_wrapped", "_compiled",
            "_wiring", "tuner", "uneven",
        )  # fmt: skip
        return {k: v for k, v in self.__dict__.items() if k not in left_behind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy that can be read, evaluated and saved, and that refuses to be trained."""
        nn.Module.__setstate__(self, state)
        self.process_group = existing_group(None)
        self._wiring = wiring_of(self.device, self.process_group)
        self._compiled = _compiled_inside(self.module)
        self._stock = Stock({})
        self.uneven = None

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        if self._stock.in_force:
            return dict(self._stock.ddp._get_ddp_logging_data())
        return {
            "world_size": dist.get_world_size(self.process_group),
            "rank": dist.get_rank(self.process_group),
        }


def _adapt_afterwards(before: str, wrapped: Any, tuned: Tuned) -> None:
    from headway.strategies.adaptive.adapting import live

    live.adapt(wrapped, tuned.entry(tuned.all_steps, before))


def _compiled_inside(module: nn.Module) -> frozenset[int]:
    """The identities of the modules of ``module`` that are compiled."""
    return frozenset(id(each) for each in module.modules() if torch_private.is_compiled(each))
