"""DecoupledDataParallel: in the place of DistributedDataParallel, with the decoupled all-reduce."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.errors import CommunicationError, UnsupportedError, UserError
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule, GatherMode, restricted
from headway.scheduling.ddp_buckets import cap_bytes as cap_bytes_of_ddp
from headway.strategies.candidates import Learned
from headway.strategies.decoupled import lifecycle
from headway.strategies.decoupled.checks import (
    TrainedSet,
    check_casts,
    check_device_ids,
    check_module,
    refuse,
    refuse_options,
    trainable_now,
    trainable_parameters,
)
from headway.strategies.decoupled.condition import LOCK
from headway.strategies.decoupled.engine import Engine
from headway.strategies.decoupled.learning import StepWatch, learned
from headway.strategies.decoupled.peers import Peers
from headway.strategies.decoupled.policy import (
    DEFAULT_CAP_BYTES,
    DEVICE_CAP_BYTES,
    DecoupledStrategy,
    options_of,
    strategy_of,
)
from headway.strategies.decoupled.stepping import MaterialiseHook, clear_gradients, unbind_unused
from headway.strategies.decoupled.uneven import DecoupledJoinHook, Uneven
from headway.strategies.live import replicas
from headway.strategies.live.agreement import Agreement
from headway.strategies.live.channels import retirement
from headway.strategies.live.channels.wiring import groups_of_our_own, wiring_of
from headway.strategies.live.existing_group import existing_group
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.runtime import Changes
from headway.strategies.plugin import InForce


class DecoupledDataParallel(DistributedDataParallel):
    """Data parallelism whose all-reduce is cut in two: half under backward, half under the next forward.

    Takes the arguments of ``DistributedDataParallel`` and a ``schedule``; without one, buckets of ``bucket_cap_mb``
    are cut in reverse order of registration. Parameters, gradients, optimizer state and buffers read at any time are
    those of stock DDP. Options whose meaning is not implemented raise UnsupportedError.

    Parameters may be on the CPU, or on a CUDA device with NCCL or Gloo; ``device_ids`` and ``output_device`` may name
    that device, and inputs are then moved to it.

    Raises UnsupportedError for models and options that would train wrongly, UserError where there is no process
    group or where ranks do not agree on the model.
    """

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

        self.uneven: Uneven | None = None
        self.changes = Changes()

        replicas.check_agreement(spec, schedule, group, self.join_device)
        self._hosts = replicas.hosts_of(group, self.join_device)
        if not self._wiring.native:
            schedule.algorithms.check(self._hosts)
        if init_sync:
            replicas.broadcast(module.parameters(), group, self.join_device)
            if self.forward_sync_buffers or forward_sync_buffers is not None:
                replicas.broadcast(module.buffers(), group, self.join_device)
        self._wrapped = {name: id(parameter) for name, parameter in trainable_parameters(module).items()}
        self._start_engine()

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
        """What runs this model; None in copies made by deepcopy or pickle, and where something else does for good."""
        return self.__dict__.get("_engine")

    @property
    def strategy(self) -> DecoupledStrategy:
        """What is in force."""
        return strategy_of(self.schedule, model_spec(self.module))

    @property
    def reductions(self) -> int:
        """How many backwards have been reduced under the schedule in force."""
        return 0 if self.engine is None else self.engine.layout.buckets[0].reductions

    @property
    def reducer(self) -> Any:  # type: ignore[override]
        """What torch's pipelines ask for before the last backward of a stage."""
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
        reducing = self.begin_forward(learning=torch.is_grad_enabled())
        return self.run_forward(inputs, kwargs, reducing=reducing)

    def begin_forward(self, *, learning: bool) -> bool:
        """A forward is about to begin, ``learning`` where gradients are recorded.

        Returns whether its backward may be reduced.
        """
        if not learning:
            return False
        self.changes.check_ended()
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
        trains = self.trains_something()
        engine.synchronise = self.require_backward_grad_sync
        return trains

    def run_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, reducing: bool) -> Any:
        """The forward that ``begin_forward`` said was ``reducing``."""
        learning = torch.is_grad_enabled()
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

    def trains_something(self, rebuild: Callable[[bool], None] | None = None) -> bool:
        """Whether any parameter is trained now; where others are than before, they are followed.

        ``rebuild`` follows them where something else does the steps; it is told whether there are other parameters, or
        other modules alone. Raises UnsupportedError where a module has been compiled in place.
        """
        if self._trained.changed(self.module):
            trainable = trainable_now(self.module, self._compiled)
            names = trainable_parameters(self.module).keys()
            if trainable and (trainable != self.trainable or names != self.schedule.buckets_of.keys()):
                self._follow_trainable(rebuild)
            # Other modules may compute with the same parameters.
            if rebuild is not None:
                rebuild(False)
            elif self.engine is not None:
                self._watch_modules(self.engine)
            # A critic that is frozen while others learn is as it was when it thaws.
            self._frozen = not trainable
            self._trained = TrainedSet(self.module)
        return not self._frozen

    def _follow_trainable(self, rebuild: Callable[[bool], None] | None) -> None:
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
        if rebuild is not None:
            rebuild(True)
        else:
            assert engine is not None
            with self.changes.of(self):
                engine.reschedule(trainable, self.schedule)
                engine.warn_of_drift(
                    [name for name, p in trainable.items() if self._wrapped.get(name) != id(p)]
                )
        self.trainable = frozenset(id(parameter) for parameter in trainable.values())

    def reschedule(self, schedule: BucketSchedule) -> None:
        """Put another schedule in force: on every rank, at the same point of the script, between two steps.

        Raises UserError where ranks do not agree on it, UnsupportedError in the middle of a backward.
        """
        if self.engine is None:
            raise UnsupportedError("a copy of a decoupled model has no schedule")
        self.check_schedule(schedule)
        with self.changes.of(self):
            self.engine.reschedule(trainable_parameters(self.module), schedule)
            self.schedule = schedule

    def check_schedule(self, schedule: BucketSchedule) -> None:
        """Raise UserError where ranks do not agree on ``schedule``, UnsupportedError where it cannot be put in force.

        Collective.
        """
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

    # Giving way to another runtime, and coming back ---------------------------------------------------

    @property
    def accumulated(self) -> frozenset[int]:
        """The identities of parameters whose gradients a backward has added to that was not reduced."""
        return frozenset() if self.engine is None else self.engine.accumulated

    def check_settled(self) -> None:
        """Raise what went wrong before, or UnsupportedError where a backward never finished."""
        if self.engine is not None:
            self.engine.check_usable()

    def check_between_steps(self, what: str) -> None:
        """Raise as ``check_settled``, and UnsupportedError in the middle of a backward: ``what`` is refused there."""
        engine = self.engine
        if engine is None:
            raise UnsupportedError("a copy of a decoupled model cannot be handed over to stock DDP")
        engine.check_usable()
        if engine.running:
            refuse(f"{what} in the middle of a backward", fix="Call it between two steps.")

    def stand_aside(self) -> None:
        """Leave module and optimizers as if there had been no engine, on every rank at the same point."""
        assert self.engine is not None
        self.engine.stand_aside()
        lifecycle.set_aside(self.engine, aside=True)
        unbind_unused()

    def let_go(self) -> None:
        """Give back connections and threads, after ``stand_aside``; ``come_back`` makes others."""
        if self.engine is not None:
            lifecycle.release_everywhere(self.engine)
            self._abandoning.detach()
            self.__dict__["_engine"] = None

    def come_back(self, schedule: BucketSchedule, accumulated: Collection[int] | None = None) -> None:
        """Do the steps again, under ``schedule``. ``accumulated`` is what another runtime had not reduced, if any."""
        engine = self.engine
        if engine is None:
            self.schedule = schedule
            self._start_engine()
        else:
            lifecycle.set_aside(engine, aside=False)
            self._watch_modules(engine)
            engine.reschedule(trainable_parameters(self.module), schedule)
            self.schedule = schedule
        if accumulated is not None:
            assert self.engine is not None
            self.engine.note_accumulated(accumulated)

    # What tuning learns from --------------------------------------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """Whether any module in it is compiled."""
        return bool(self._compiled)

    @property
    def permitted_forms(self) -> tuple[GatherMode, ...]:
        """What may be gathered, what is gathered now first."""
        assert self.engine is not None
        if self.engine.settlement.needs_gradients:
            return ("gradients",)
        now = self.schedule.gather
        return (now, "gradients" if now == "parameters" else "parameters")

    @property
    def channels(self) -> int:
        """How many collectives its connections can have in flight at a time."""
        assert self.engine is not None
        return self.engine.transport.channels

    def watch_steps(self) -> StepWatch:
        """Begin to watch steps, until the watch is told to ``detach``."""
        assert self.engine is not None
        return StepWatch(self.module, self.engine, model_spec(self.module))

    def learn(self, watch: StepWatch, agreement: Agreement) -> Learned:
        """What ``watch`` saw on the slowest rank, and what collectives cost with nothing else in flight. Collective.

        Raises TuningEndedError where a rank saw no step.
        """
        assert self.engine is not None
        return learned(self.engine, model_spec(self.module), watch, agreement)

    # join() -------------------------------------------------------------------------------------------

    @property
    def joining(self) -> bool:
        """Whether a ``join()`` lasts."""
        return self.uneven is not None

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs, as ``DistributedDataParallel.join``. Gradients are gathered while it lasts."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_options: Any) -> JoinHook:
        """What this rank does while it has no inputs left and others have. Collective."""
        self.join_ends()  # of one that was switched off
        uneven = Uneven(
            self.process_group,
            self.schedule,
            self.join_device,
            divide_by_initial=divide_by_initial_world_size,
        )
        return DecoupledJoinHook(self, uneven)

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

    # What DistributedDataParallel offers and this refuses: nothing is silently ignored -------------------

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Refuse: the collective is not an all-reduce that a hook could replace."""
        refuse("register_comm_hook()")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> NoReturn:
        refuse("_register_builtin_comm_hook()")

    def _register_buffer_comm_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse("_register_buffer_comm_hook()")

    def _register_fused_optim(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse("_register_fused_optim()")

    def _set_static_graph(self) -> NoReturn:
        refuse("static_graph=True")

    def _update_process_group(self, new_process_group: Any) -> NoReturn:
        refuse("_update_process_group()")

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
            "_engine", "_abandoning", "process_group", "trainable", "_trained", "_wrapped", "_compiled", "_wiring",
            "uneven", "changes",
        )  # fmt: skip
        return {k: v for k, v in self.__dict__.items() if k not in left_behind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy that can be read, evaluated and saved, and that refuses to be trained."""
        nn.Module.__setstate__(self, state)
        self.process_group = existing_group(None)
        self._wiring = wiring_of(self.device, self.process_group)
        self._compiled = _compiled_inside(self.module)
        self.uneven, self.changes = None, Changes()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {
            "world_size": dist.get_world_size(self.process_group),
            "rank": dist.get_rank(self.process_group),
        }


def _compiled_inside(module: nn.Module) -> frozenset[int]:
    """The identities of the modules of ``module`` that are compiled."""
    return frozenset(id(each) for each in module.modules() if torch_private.is_compiled(each))


__all__ = ["DecoupledDataParallel", "in_force", "live_options", "refusal", "unseen", "wrap"]


def wrap(module: nn.Module, strategy: DecoupledStrategy, **ddp_options: Any) -> DecoupledDataParallel:
    """Wrap ``module`` as ``strategy`` decides. ``ddp_options`` are arguments of DistributedDataParallel.

    Raises PlanError where the strategy does not fit the module, UnsupportedError and UserError as
    ``DecoupledDataParallel`` does.
    """
    return DecoupledDataParallel(module, **live_options(strategy, module), **ddp_options)


def unseen(module: nn.Module, strategy: DecoupledStrategy, **ddp_options: Any) -> DecoupledDataParallel:
    """As ``wrap``, but told to nobody who watches or replaces what scripts wrap."""
    wrapped = object.__new__(DecoupledDataParallel)
    init = inspect.unwrap(DecoupledDataParallel.__init__)
    init(wrapped, module, **live_options(strategy, module), **ddp_options)
    return wrapped


def live_options(strategy: DecoupledStrategy, module: nn.Module) -> dict[str, Any]:
    """The arguments of DecoupledDataParallel that ``strategy`` decides for ``module``.

    Raises PlanError where the strategy does not fit the module.
    """
    return {"schedule": strategy.decide(Job.of(model_spec(module)))}


def in_force(wrapped: nn.Module) -> InForce | None:
    """What a decoupled model does now, after whatever its optimizer made of its plan."""
    if not isinstance(wrapped, DecoupledDataParallel):
        return None
    # The engine's, which an optimizer may have had gather gradients after all.
    schedule = wrapped.schedule if wrapped.engine is None else wrapped.engine.schedule
    buckets = tuple(bucket.parameters for bucket in schedule.buckets)
    return InForce(options_of(schedule, model_spec(wrapped.module)), buckets)


def refusal(wrapped: nn.Module, *, compiled_around: bool) -> str:
    """Why the decoupled all-reduce would refuse to take the place of a model's wrapper; "" where it would not.

    ``compiled_around`` says that code was compiled which calls the wrapper.
    """
    if isinstance(wrapped, DecoupledDataParallel):
        return ""
    if compiled_around:
        return "the model was compiled after it was wrapped"
    try:
        check_module(cast("nn.Module", wrapped.module))
        refuse_options(
            static_graph=getattr(wrapped, "static_graph", False),
            mixed_precision=getattr(wrapped, "mixed_precision", None),
        )
    except UserError as refusal:
        return str(refusal).partition(". ")[0]
    return ""
