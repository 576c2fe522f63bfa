"""What a decoupled wrapper can do besides: hand its steps over to stock DDP."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from headway.errors import CommunicationError, UnsupportedError, one_line
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.adaptive.stock import Stock, check_on_stock
from headway.strategies.adaptive.trained_set import TrainedSet
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled import lifecycle
from headway.strategies.decoupled.checks import trainable_now, trainable_parameters
from headway.strategies.decoupled.engine import Engine
from headway.strategies.decoupled.policy import OnStockDdp, has_wire
from headway.strategies.decoupled.refused import RefusingDataParallel, refuse
from headway.strategies.decoupled.stepping import unbind_unused
from headway.strategies.live import replicas
from headway.strategies.live.module_spec import model_spec

if TYPE_CHECKING:
    from headway.strategies.adaptive.tuning.counting import StepCount


class HandsOver(RefusingDataParallel):
    """A wrapper whose steps are its engine's, or stock DDP's in its place."""

    process_group: dist.ProcessGroup
    trainable: frozenset[int]
    schedule: BucketSchedule
    tuner: StepCount | None = None
    handovers: int = 0
    """How often steps were handed over to stock DDP, or stock DDP got other buckets."""
    _stock: Stock
    _abandoning: weakref.finalize[Any, Any]
    _compiled: frozenset[int]
    _trained: TrainedSet
    _frozen = False  # no parameter is trained at the moment
    _half_way = False  # a change of what is in force has begun and not ended

    @property
    @abstractmethod
    def engine(self) -> Engine | None:
        """What runs this model."""

    @property
    @abstractmethod
    def joining(self) -> bool:
        """Whether a ``join()`` lasts."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the process group takes small tensors."""

    @abstractmethod
    def _follow_trainable(self) -> None:
        """Other parameters are trained than before."""

    @property
    def is_stock(self) -> bool:
        """Whether stock DDP does this model's steps."""
        return self._stock.in_force

    @property
    def stock_strategy(self) -> DistributedDataParallelStrategy:
        """What stock DDP would decide, with the script's own options."""
        return self._stock.own_strategy

    def use_stock_ddp(self, strategy: OnStockDdp | None = None, *, keep_connections: bool = False) -> None:
        """Have stock DDP do the steps from here on: on every rank, at the same point of the script, between two steps.

        Its options are those that the script gave, its buckets those of ``strategy`` or else the script's; servers
        carry them where ``strategy`` is one of servers. Optimizers get their whole state, buckets are given up, and so
        are connections and threads unless ``keep_connections``. ``reschedule`` goes back.

        Raises UserError where ranks do not agree, PlanError for shares of servers that are not those of the ranks;
        UnsupportedError for gradients that codecs send, in the middle of a backward, within a ``join()``, and for
        models that are compiled or that stock DDP or servers refuse; what was in force goes on.
        """
        stock, engine = self._stock, self.engine
        wanted = strategy or stock.own_strategy
        if has_wire(wanted):
            refuse(f"use_stock_ddp() with {wanted.describe()}", fix="Give the sizes of buckets alone.")
        check_on_stock(self.module, wanted, dist.get_world_size(self.process_group))
        if engine is None and not stock.in_force:
            raise UnsupportedError("a copy of a decoupled model cannot be handed over to stock DDP")
        if self._compiled or self.joining:
            refuse(f"use_stock_ddp() {'within join()' if self.joining else 'of a compiled model'}")
        if not stock.in_force:
            assert engine is not None
            engine.check_usable()
            if engine.running:
                refuse("use_stock_ddp() in the middle of a backward", fix="Call it between two steps.")
            replicas.check_agreement(model_spec(self.module), wanted, self.process_group, self.join_device)
            accumulated = engine.accumulated
            with self._changing():
                engine.stand_aside()
                lifecycle.set_aside(engine, aside=True)
                unbind_unused()
                refusal = self._begin_stock(engine, wanted, accumulated)
            if refusal is not None:
                raise refusal
        elif wanted != stock.strategy:
            replicas.check_agreement(model_spec(self.module), wanted, self.process_group, self.join_device)
            with self._changing():
                stock.begin_again(self, wanted)
        self.handovers += 1
        if engine is not None and not keep_connections:
            lifecycle.release_everywhere(engine)
            self._abandoning.detach()
            self.__dict__["_engine"] = None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What is in force is being changed: nothing is trained any more where that breaks off half-way.

        Gradients might stay on their ranks then. Raises RuntimeError or UnsupportedError, and changes nothing, where a
        backward has not ended as it should.
        """
        self._check_whole()
        if self._stock.in_force:
            self._stock.check_reduced()
        elif self.engine is not None:
            self.engine.check_usable()
        self._half_way = True
        yield
        self._half_way = False

    def _check_whole(self) -> None:
        """Raise CommunicationError where a change of what is in force broke off."""
        if self._half_way:
            raise CommunicationError(
                f"rank {dist.get_rank()}: a change of the communication plan broke off half-way, so gradients would no "
                "longer be averaged. The error that ended it was raised before this one: see what it says (as of "
                "memory), and restart the job from its last checkpoint, with a plan instead of tuning if it is memory."
            )

    def _begin_stock(
        self, engine: Engine, strategy: OnStockDdp, accumulated: Collection[int]
    ) -> UnsupportedError | None:
        """Put stock DDP in force; returns why that cannot be: then ``engine`` is in force again."""
        cause: Exception | None = None
        try:
            self._stock.begin(self, strategy, accumulated)
        except Exception as error:
            cause = error
        # One rank alone may have no memory for its buckets: none goes on without the others.
        if replicas.is_so_anywhere(cause is not None, self.process_group, self.join_device):
            if cause is None:
                self._stock.end(self)
            self._take_up(engine)
            engine.reschedule(trainable_parameters(self.module), self.schedule)
            refusal = UnsupportedError(
                "stock DDP cannot have this model", got=one_line(str(cause or "another rank has failed")),
                fix="Keep it decoupled.",
            )  # fmt: skip
            refusal.__cause__ = cause
            return refusal
        self._stock.serve()
        return None

    def _take_up(self, engine: Engine) -> None:
        """Get ``engine``, which stood aside, ready to go on."""
        lifecycle.set_aside(engine, aside=False)
        self._watch_modules(engine)

    @abstractmethod
    def _watch_modules(self, engine: Engine) -> None:
        """Have modules bring their parameters up to date before they run, those that do not yet."""

    def _before_stock(self, *, learning: bool) -> None:
        """A forward is about to be stock DDP's, unless the tuner has something else in mind."""
        stock = self._stock
        if not self._join_config.enable:
            stock.joining = False  # one that was switched off has begun all the same
        if learning:
            stock.frozen = not self._trains_something()
        if self.tuner is not None:
            self.tuner.before_forward(learning=learning and not stock.frozen)

    def _trains_something(self) -> bool:
        """Whether any parameter is trained now; where others are than before, they are followed.

        Raises UnsupportedError where a module has been compiled in place.
        """
        if self._trained.changed(self.module):
            trainable = trainable_now(self.module, self._compiled)
            names = trainable_parameters(self.module).keys()
            if trainable and (trainable != self.trainable or names != self.schedule.buckets_of.keys()):
                self._follow_trainable()
            self._follow_modules()
            # A critic that is frozen while others learn is as it was when it thaws.
            self._frozen = not trainable
            self._trained = TrainedSet(self.module)
        return not self._frozen

    def _follow_modules(self) -> None:
        """Other modules may compute with the same parameters."""
        stock, engine = self._stock, self.engine
        if stock.in_force:
            if stock.ddp.module is not self.module:
                with self._changing():
                    stock.begin_again(self, stock.strategy)
        elif engine is not None:
            self._watch_modules(engine)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            stock = self.__dict__.get("_stock")
            if stock is None or not stock.in_force:
                raise
            return getattr(stock.ddp, name)
