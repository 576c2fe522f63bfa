"""AdaptiveDataParallel: in the place of DistributedDataParallel, with the runtime that proves to be fastest."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel

from headway.errors import HeadwayWarning, UnsupportedError, one_line
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.policy import HOME, AdaptiveStrategy
from headway.strategies.base import Strategy
from headway.strategies.live import replicas
from headway.strategies.live.existing_group import existing_group
from headway.strategies.live.module_spec import model_spec
from headway.strategies.live.runtime import Changes, Runtime
from headway.strategies.live.stock import StockDdp, StockSteps, stock_options
from headway.strategies.registry import plugin_named, plugin_of, policy_named

if TYPE_CHECKING:
    from headway.strategies.adaptive.counting import StepCount
    from headway.strategies.adaptive.proposals import Tuned


def _of_home(name: str) -> Any:
    """An attribute that is that of the decoupled runtime."""

    def read(wrapped: AdaptiveDataParallel) -> Any:
        return getattr(wrapped._home, name)

    def write(wrapped: AdaptiveDataParallel, value: Any) -> None:
        setattr(wrapped._home, name, value)

    return property(read, write)


class AdaptiveDataParallel(DistributedDataParallel):
    """A wrapped model whose steps one of several runtimes does, which change while it trains.

    Takes the arguments of ``DistributedDataParallel``. Its runtimes are the decoupled all-reduce and stock DDP, whose
    buckets servers may carry. With ``tune`` the schedule is improved during the first steps, and ``tuning`` says how as
    soon as that is done; with ``adapt`` whenever the job's network has changed. ``use_stock_ddp`` and ``reschedule``
    change by hand what does the steps. Parameters, gradients, optimizer state and buffers read at any time are those of
    stock DDP.

    Raises UnsupportedError for models and options that would train wrongly, UserError where there is no process
    group or where ranks do not agree on the model.
    """

    tuning: Tuned | None = None
    tuner: StepCount | None = None
    handovers: int = 0
    """How often steps were handed over to stock DDP, or stock DDP got other buckets."""

    # Whoever does the steps, these are kept in one place: scripts, no_sync() and join() set them.
    require_backward_grad_sync = _of_home("require_backward_grad_sync")
    require_forward_param_sync = _of_home("require_forward_param_sync")
    forward_sync_buffers = _of_home("forward_sync_buffers")
    find_unused_parameters = _of_home("find_unused_parameters")
    process_group = _of_home("process_group")
    device = _of_home("device")
    device_ids = _of_home("device_ids")
    output_device = _of_home("output_device")
    device_type = _of_home("device_type")
    dim = _of_home("dim")
    _join_config = _of_home("_join_config")

    def __init__(self, module: nn.Module, *, strategy: AdaptiveStrategy, **ddp_options: Any) -> None:
        nn.Module.__init__(self)
        copying = ddp_options.get("batched_grad_copy", False)
        self.__dict__["_home"] = home = plugin_named(HOME).live_runtime(module, strategy.home, **ddp_options)
        self.module = module
        self._changes: Changes = home.changes
        self._bucket_cap_mb = ddp_options.get("bucket_cap_mb")
        self._stock = StockDdp(
            stock_options(
                device_ids=home.device_ids, output_device=home.output_device, dim=home.dim,
                process_group=home.process_group, bucket_cap_mb=self._bucket_cap_mb,
                find_unused_parameters=home.find_unused_parameters,
                gradient_as_bucket_view=home.gradient_as_bucket_view, batched_grad_copy=copying,
                shares_buffers=home.forward_sync_buffers,
            )
        )  # fmt: skip
        begins = strategy.begin_as
        if begins.name != HOME:
            if home.is_compiled:
                raise UnsupportedError(
                    f"a plan of {begins.name} cannot adapt a compiled model", got=begins.describe(),
                    fix="Leave out --adapt, or adapt: true.",
                )  # fmt: skip
            self.use_stock_ddp(begins)
        if strategy.decides_while_training:
            self._watch_over(tune=strategy.tune, adapt=strategy.adapt)

    def _watch_over(self, *, tune: bool, adapt: bool) -> None:
        from headway.strategies.adaptive import watching
        from headway.strategies.adaptive.tuner import tune as tune_while_training

        if self._home.is_compiled:
            words = "the schedule of a compiled model is not tuned while it trains: record it and run a plan"
            warnings.warn(words, HeadwayWarning, stacklevel=3)
            return
        if adapt and self.device_type != "cpu":
            words = f"steps on {self.device_type} are not watched: the plan stays as it is"
            warnings.warn(words, HeadwayWarning, stacklevel=3)
            adapt = False
        if tune:
            adapting = partial(_adapt_afterwards, self.strategy.describe())
            tune_while_training(self, afterwards=adapting if adapt else None)
        elif adapt:
            watching.adapt(self)

    # What does the steps ------------------------------------------------------------------------------

    @property
    def _acting(self) -> Runtime:
        acting: Runtime = self._stock if self._stock.in_force else self._home
        return acting

    @property
    def _headway_acting(self) -> DistributedDataParallel:
        """The wrapper within that does the steps, for who records them."""
        home: DistributedDataParallel = self._home
        return self._stock.ddp if self._stock.in_force else home

    @property
    def is_stock(self) -> bool:
        """Whether stock DDP does this model's steps, through servers or not."""
        return self._stock.in_force

    @property
    def strategy(self) -> Strategy:
        """What is in force."""
        return self._acting.strategy

    @property
    def stock_strategy(self) -> Strategy:
        """What stock DDP would decide, with the script's own options."""
        return policy_named("ddp").model_validate({"bucket_cap_mb": self._bucket_cap_mb})

    @property
    def reductions(self) -> int:
        """How many backwards have been reduced, as far as it can be said without a look at gradients.

        It only grows, but for changes of what is in force; stock DDP's are counted while there is a tuner.
        """
        return self._acting.reductions

    @property
    def reducer(self) -> Any:  # type: ignore[override]
        """What torch's pipelines ask for before the last backward of a stage."""
        return self._acting.reducer

    @property
    def schedule(self) -> BucketSchedule:
        """The decoupled schedule that is in force, or was before stock DDP."""
        schedule: BucketSchedule = self._home.schedule
        return schedule

    @property
    def trainable(self) -> frozenset[int]:
        """The identities of the parameters that are trained."""
        trainable: frozenset[int] = self._home.trainable
        return trainable

    @property
    def engine(self) -> Any:
        """What runs decoupled steps; None in copies, and where stock DDP does the steps for good."""
        return self._home.engine

    def use_stock_ddp(self, strategy: Strategy | None = None, *, keep_connections: bool = False) -> None:
        """Have stock DDP do the steps from here on: on every rank, at the same point of the script, between two steps.

        Its options are those that the script gave, its buckets those of ``strategy`` or else the script's; servers
        carry them where ``strategy`` is one of servers. Optimizers get their whole state, buckets are given up, and so
        are connections and threads unless ``keep_connections``. ``reschedule`` goes back.

        Raises UserError where ranks do not agree, PlanError for shares of servers that are not those of the ranks;
        UnsupportedError for gradients that codecs send, in the middle of a backward, within a ``join()``, and for
        models that are compiled or that stock DDP or servers refuse; what was in force goes on.
        """
        home, stock = self._home, self._stock
        wanted = strategy or self.stock_strategy
        steps = plugin_of(wanted).on_stock_ddp(wanted)
        if steps is None:
            _refuse(f"use_stock_ddp() with {wanted.describe()}", fix="Give the sizes of buckets alone.")
        steps.check(self.module, dist.get_world_size(self.process_group))
        if home.engine is None and not stock.in_force:
            raise UnsupportedError("a copy of an adaptive model cannot be handed over to stock DDP")
        if home.is_compiled or self.joining:
            _refuse(f"use_stock_ddp() {'within join()' if self.joining else 'of a compiled model'}")
        if not stock.in_force:
            home.check_between_steps("use_stock_ddp()")
            self._check_agreement(wanted)
            accumulated = home.accumulated
            with self._changes.of(home):
                home.stand_aside()
                refusal = self._begin_stock(wanted, steps, accumulated)
            if refusal is not None:
                raise refusal
        elif wanted != stock.strategy:
            self._check_agreement(wanted)
            with self._changes.of(stock):
                stock.begin_again(self, wanted, steps)
        self.handovers += 1
        if not keep_connections:
            home.let_go()

    def _begin_stock(
        self, strategy: Strategy, steps: StockSteps, accumulated: Collection[int]
    ) -> UnsupportedError | None:
        """Put stock DDP in force; returns why that cannot be: then the decoupled runtime is in force again."""
        cause: Exception | None = None
        try:
            self._stock.begin(self, strategy, steps, accumulated)
        except Exception as error:
            cause = error
        # One rank alone may have no memory for its buckets: none goes on without the others.
        if replicas.is_so_anywhere(cause is not None, self.process_group, self.join_device):
            if cause is None:
                self._stock.end(self)
            self._home.come_back(self.schedule)
            refusal = UnsupportedError(
                "stock DDP cannot have this model", got=one_line(str(cause or "another rank has failed")),
                fix="Keep it decoupled.",
            )  # fmt: skip
            refusal.__cause__ = cause
            return refusal
        self._stock.carry()
        return None

    def reschedule(self, schedule: BucketSchedule) -> None:
        """Put a decoupled schedule in force: on every rank, at the same point of the script, between two steps.

        It also ends ``use_stock_ddp``. Raises UserError where ranks do not agree on it, UnsupportedError in the middle
        of a backward.
        """
        home, stock = self._home, self._stock
        if not stock.in_force:
            home.reschedule(schedule)
            return
        home.check_schedule(schedule)
        with self._changes.of(stock):
            accumulated = stock.accumulated
            stock.end(self)
            home.come_back(schedule, accumulated)

    def _check_agreement(self, strategy: Strategy) -> None:
        replicas.check_agreement(model_spec(self.module), strategy, self.process_group, self.join_device)

    # A step -------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module under what is in force, after whoever tunes has been told of it."""
        home, stock = self._home, self._stock
        if home.module is not self.module:  # the script has replaced it
            home.module = self.module
        learning = torch.is_grad_enabled()
        began_on_stock = stock.in_force
        if began_on_stock:
            if learning:
                self._changes.check_ended()
            self._before_stock(learning=learning)
            tuned = self.tuner is not None
        else:
            reducing = home.begin_forward(learning=learning)
            tuned = self.tuner is not None
            if self.tuner is not None:
                self.tuner.before_forward(learning=reducing)
        # Whoever tunes may have changed it.
        if self.is_stock:
            return stock.forward(self, inputs, kwargs, counted=tuned)
        if began_on_stock:
            reducing = home.begin_forward(learning=learning)
        return home.run_forward(inputs, kwargs, reducing=reducing)

    def _before_stock(self, *, learning: bool) -> None:
        """A forward is about to be stock DDP's, unless the tuner has something else in mind."""
        stock = self._stock
        if not self._join_config.enable:
            stock.joining = False  # one that was switched off has begun all the same
        if learning:
            stock.frozen = not self._home.trains_something(self._rebuild_stock)
        if self.tuner is not None:
            self.tuner.before_forward(learning=learning and not stock.frozen)

    def _rebuild_stock(self, other_parameters: bool) -> None:
        """Have stock DDP follow what is trained now."""
        stock = self._stock
        if other_parameters or stock.ddp.module is not self.module:
            with self._changes.of(stock):
                stock.begin_again(self)

    def flush(self) -> None:
        """Finish everything in flight: averages are in ``.grad`` and due updates in parameters on return.

        Never needed for right results; useful before a timed section or a fork.
        """
        self._home.flush()

    def recover(self) -> int:
        """Behind a CommunicationError or an InternalError: leave ordinary parameters as of the last complete step.

        On this rank alone, and the model cannot be trained any more. Returns how many of the optimizer's steps are
        missing in them, 0 or 1. Raises UnsupportedError where nothing has failed, and where the latest step has reached
        some parameters alone.
        """
        missing: int = self._home.recover()
        return missing

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all parameters by their total norm, as ``torch.nn.utils.clip_grad_norm_``; returns it.

        Every rank must call it.
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, without waiting for those in flight."""
        self._home.zero_grad(set_to_none)

    # join() -------------------------------------------------------------------------------------------

    @property
    def joining(self) -> bool:
        """Whether a ``join()`` lasts."""
        return self._stock.joining or bool(self._home.joining)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with uneven inputs, as ``DistributedDataParallel.join``. Decoupled steps gather gradients meanwhile.

        Stock DDP goes on without servers where gradients are to be divided by the ranks that are left, of which it
        tells them nothing.
        """
        if enable and not divide_by_initial_world_size and self._stock.is_carried:
            self.use_stock_ddp()
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_options: Any) -> JoinHook:
        """What this rank does while it has no inputs left and others have. Collective."""
        if self.tuner is not None:
            self.tuner.join_begins()
        return self._acting.join_hook(divide_by_initial_world_size=divide_by_initial_world_size)

    @property
    def join_device(self) -> torch.device:
        """Where ``join()`` keeps its counts."""
        device: torch.device = self._home.join_device
        return device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that ``join()`` counts over."""
        group: dist.ProcessGroup = self._home.process_group
        return group

    # What DistributedDataParallel offers and this refuses, and what copies have ---------------------------

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Refuse: what is in force may change."""
        _refuse("register_comm_hook()")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> NoReturn:
        _refuse("_register_builtin_comm_hook()")

    def _register_buffer_comm_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _refuse("_register_buffer_comm_hook()")

    def _register_fused_optim(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        _refuse("_register_fused_optim()")

    def _set_static_graph(self) -> NoReturn:
        _refuse("static_graph=True")

    def _update_process_group(self, new_process_group: Any) -> NoReturn:
        _refuse("_update_process_group()")

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Refused: what is inside would not run compiled.

        Raises UnsupportedError.
        """
        raise UnsupportedError(
            "an adaptive model cannot be compiled as a whole", got="compile() of the wrapper",
            fix="Compile with model = torch.compile(model) before wrapping, or use stock DDP.",
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            home, stock = self.__dict__.get("_home"), self.__dict__.get("_stock")
            if home is None:
                raise
            acting = stock.ddp if stock is not None and stock.in_force else home
            return getattr(acting if hasattr(acting, name) else home, name)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: everything but what trains."""
        left_behind = ("_stock", "_changes", "tuner")
        return {name: value for name, value in self.__dict__.items() if name not in left_behind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy that can be read, evaluated and saved, and that refuses to be trained."""
        nn.Module.__setstate__(self, state)
        self.process_group = existing_group(None)
        self._stock, self._changes = StockDdp({}), self._home.changes

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        wrapped: Any = self._headway_acting
        return dict(wrapped._get_ddp_logging_data())


def _refuse(what: str, fix: str = "Use stock DDP.") -> NoReturn:
    raise UnsupportedError(f"{what} is not supported by an adaptive model", fix=fix)


def _adapt_afterwards(before: str, wrapped: Any, tuned: Tuned) -> None:
    from headway.strategies.adaptive import watching

    watching.adapt(wrapped, tuned.entry(tuned.all_steps, before))
