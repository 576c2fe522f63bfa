"""torch's DDP as a runtime: it does the steps of a wrapped model until something else takes its place.

A DistributedDataParallel of torch's own is put over the module that a wrapper holds, and the wrapper's forward is its
forward. The wrapper stays what scripts have it for: its hooks, its names, ``no_sync()``, ``join()``, copies. It looks
before a forward whether other parameters are trained, which torch's DDP would not notice. Gradients go through
all-reduces of its own, or through what a strategy puts behind its hook, such as servers.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.errors import UnsupportedError
from headway.scheduling.ddp_buckets import cap_bytes
from headway.strategies.base import Strategy
from headway.strategies.live.channels.hooked import HookedBuckets

COUNTED_BY = 8
"""Hooks on about so many parameters count backwards where all are used in each."""


def takes_a_cap_a_bucket() -> bool:
    """Whether this torch takes a cap for every bucket."""
    return "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters


def bucket_options(bucket_cap_mb: float | None, bucket_caps_mb: Collection[float] = ()) -> dict[str, Any]:
    """The arguments of DistributedDataParallel for buckets of these sizes, torch's defaults among them.

    They are all there, so that a script's own bucket sizes never stay in force under a plan: None is torch's default.
    Raises UnsupportedError where this torch does not take a cap for every bucket and there are some.
    """
    options: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb}
    if takes_a_cap_a_bucket():
        options["bucket_cap_mb_list"] = list(bucket_caps_mb) or None
    elif bucket_caps_mb:
        raise UnsupportedError(
            "this torch cannot give every bucket a size of its own", got=torch.__version__,
            expected="a DistributedDataParallel that takes bucket_cap_mb_list", fix="Use torch 2.13 or newer.",
        )  # fmt: skip
    return options


def keep_compiled_parts(wrapped: DistributedDataParallel, script_options: Mapping[str, Any]) -> None:
    """Have a model compiled in the parts that the script's own options ask for, whenever it is.

    Scripts compile before they wrap, or what they have wrapped. Then gradients are there when they were as the job was
    recorded; and caps below a MiB, which compiling does not take, are for buckets alone.
    """
    compiled = any(torch_private.is_compiled(module) for module in wrapped.module.modules())
    if compiled or torch_private.ddp_has_separate_bucket_cap(wrapped):
        torch_private.compile_in_parts_of(wrapped, cap_bytes(script_options.get("bucket_cap_mb")))


def named_buckets(wrapped: DistributedDataParallel) -> tuple[tuple[str, ...], ...]:
    """The buckets that DDP has now, by the names of their parameters."""
    names = [name for name, p in wrapped.module.named_parameters() if p.requires_grad]
    return tuple(tuple(names[i] for i in bucket) for bucket in torch_private.ddp_buckets(wrapped))


def _accepts(_module: nn.Module, _world_size: int) -> None: ...


@dataclass(frozen=True)
class StockSteps:
    """How torch's DDP does steps under a strategy.

    ``options`` are the arguments of DistributedDataParallel that the strategy decides. ``check`` raises
    UnsupportedError for a module that cannot be trained so, and PlanError for another number of ranks. ``carry`` puts
    something in the place of its all-reduces; it is collective.
    """

    options: Mapping[str, Any]
    check: Callable[[nn.Module, int], None] = _accepts
    carry: Callable[[DistributedDataParallel], HookedBuckets] | None = None


class Wrapper(Protocol):
    """A wrapped model whose steps torch's DDP may do."""

    module: nn.Module
    require_backward_grad_sync: bool
    require_forward_param_sync: bool
    _join_config: Any


def stock_options(*, shares_buffers: bool, batched_grad_copy: bool, **options: Any) -> dict[str, Any]:
    """Arguments of this torch's DistributedDataParallel for a module whose replicas are alike already."""
    known = inspect.signature(inspect.unwrap(DistributedDataParallel.__init__)).parameters
    sharing = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    copying = {"batched_grad_copy": True} if batched_grad_copy else {}
    return {**options, **copying, sharing: shares_buffers, "init_sync": False}


class StockDdp:
    """Stock DDP over one wrapper's module, with ``options`` of DistributedDataParallel; at first it is not in force.

    ``reductions`` counts the backwards that were reduced since it has been in force, if forwards say that they are
    ``counted``: those that add to gradients, so no ``autograd.grad`` of inputs, and once however many forwards there
    were before. ``joining`` says whether a ``join()`` has begun and not ended meanwhile, ``frozen`` that no parameter
    is trained at the moment.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._strategy: Strategy | None = None  # in force, or the last one that was
        self._steps = StockSteps({})  # of that strategy
        self._carried: HookedBuckets | None = None  # where something carries its buckets
        # Kept when it is no longer in force: graphs that went through it may yet refer to it.
        self._ddp: DistributedDataParallel | None = None
        self.in_force = False  # whether it does the wrapper's steps
        self._in_final_buckets = False
        self.frozen = False
        self.joining = False
        self.reductions = 0
        self._accumulates = False  # what the last backward left is reduced with a later one's
        self._awaits_backward = False  # that is counted
        self._counting: list[Any] = []  # hooks
        self._no_join = torch_private.join_config_disabled()

    @property
    def strategy(self) -> Strategy:
        """What it decides, where it is in force."""
        assert self._strategy is not None
        return self._strategy

    @property
    def ddp(self) -> DistributedDataParallel:
        """The DDP that is in force."""
        assert self._ddp is not None
        return self._ddp

    @property
    def reducer(self) -> Any:
        """The reducer that is in force."""
        return self.ddp.reducer

    @property
    def is_carried(self) -> bool:
        """Whether something else than its own all-reduces carries its buckets."""
        return self._carried is not None

    def begin(
        self, wrapped: Wrapper, strategy: Strategy, steps: StockSteps, accumulated: Collection[int] = ()
    ) -> None:
        """Do the steps of ``wrapped`` from now on: on every rank at the same point, with no engine on its parameters.

        ``steps`` are those of ``strategy``. ``carry`` comes next. ``accumulated`` are the identities of parameters
        whose gradients a backward has added to that was not reduced.

        Ranks have the same parameters and buffers by then.
        """
        options = {**self._options, **steps.options}
        self._ddp = torch_private.stock_ddp(self._ddp, wrapped.module, options, accumulated)
        self._strategy, self._steps = strategy, steps
        self._ddp.require_forward_param_sync = wrapped.require_forward_param_sync
        self.in_force = True
        self.frozen = self.joining = False
        self._in_final_buckets = self._ddp.find_unused_parameters
        self.reductions, self._awaits_backward, self._accumulates = 0, False, bool(accumulated)

    @property
    def accumulated(self) -> frozenset[int]:
        """The identities of parameters whose gradients a backward may have added to that was not reduced."""
        parameters = self.ddp.module.parameters() if self._accumulates else ()
        return frozenset(id(each) for each in parameters if each.grad is not None)

    def check_settled(self) -> None:
        """Raise RuntimeError, with torch's explanation, where a backward has left parameters unreduced."""
        torch_private.check_reduced(self.ddp)

    def carry(self) -> None:
        """Have carry buckets what its strategy says. Collective: every rank has begun."""
        if self._steps.carry is not None:
            self._carried = self._steps.carry(self.ddp)

    def end(self, wrapped: Wrapper) -> None:
        """Leave the module as it was before: no hook, no bucket, and gradients that are their own.

        Raises RuntimeError, as stock DDP's next forward would, where a backward has left parameters unreduced.
        """
        ddp = self.ddp
        self._count_no_more()
        torch_private.release_reducer(ddp)
        if self._carried is not None:
            self._carried.end(ddp)
            self._carried = None
        wrapped.require_forward_param_sync = ddp.require_forward_param_sync
        if self._options.get("gradient_as_bucket_view"):
            for parameter in wrapped.module.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        self.in_force = False

    def begin_again(
        self, wrapped: Wrapper, strategy: Strategy | None = None, steps: StockSteps | None = None
    ) -> None:
        """Go on with buckets made anew: other parameters are trained, or ``strategy`` is another one. Collective."""
        stays = strategy is None or strategy == self._strategy
        kept, steps = (self._carried, self._steps) if stays else (None, steps)
        assert steps is not None
        if kept is not None:
            self._carried = None
        accumulated = self.accumulated
        self.end(wrapped)
        self.begin(wrapped, strategy or self.strategy, steps, accumulated)
        if kept is None:
            self.carry()
        else:
            self._carried = kept
            kept.hook(self.ddp)

    def forward(
        self, wrapped: Wrapper, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, counted: bool
    ) -> Any:
        """The forward of ``wrapped``; ``counted`` where its backward is."""
        ddp, synchronises = self.ddp, wrapped.require_backward_grad_sync
        # After a join() torch leaves its wrapper as it was within: nobody counts ranks any more.
        ddp.__dict__["_join_config"] = wrapped._join_config if self.joining else self._no_join
        ddp.__dict__["require_backward_grad_sync"] = synchronises and not self.frozen
        output = ddp.forward(*inputs, **kwargs)
        if self.frozen:
            ddp.require_forward_param_sync = synchronises and torch.is_grad_enabled()
        elif synchronises and torch.is_grad_enabled():
            self._count(wrapped.module, counted=counted)
            if self._accumulates or not self._in_final_buckets:
                self._await(output)
        elif torch.is_grad_enabled():
            self._accumulates = True
        return output

    def _await(self, output: Any) -> None:
        """Be told when a backward comes to what a forward returned."""
        reached = _Reached(self)
        for tensor in torch_private.tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(reached)

    def _count(self, module: nn.Module, *, counted: bool) -> None:
        """The next backward that adds to gradients is one more, if it is ``counted``."""
        if not counted:
            self._count_no_more()
        elif not self._counting:
            trained = [each for each in module.parameters() if each.requires_grad]
            # Ranks count alike: where they may leave parameters out, each has to notice whatever it uses.
            some = 1 if self.ddp.find_unused_parameters else max(1, len(trained) // COUNTED_BY)
            self._counting = [
                each.register_post_accumulate_grad_hook(_Added(self)) for each in trained[::some]
            ]
        self._awaits_backward = counted

    def _count_no_more(self) -> None:
        for handle in self._counting:
            handle.remove()
        self._counting = []

    def gradient_added(self) -> None:
        """A backward has added to a gradient."""
        self.reductions += self._awaits_backward
        self._awaits_backward = False

    def backward_begins(self) -> None:
        """A backward has come to what a synchronised forward returned."""
        self._accumulates = False
        if not (self._in_final_buckets or self.joining):  # a rank that has joined does so in its own time
            # Behind what stock DDP does as a backward ends, which it has yet to ask for.
            torch_private.queue_backward_callback(
                lambda: torch_private.queue_backward_callback(self._backward_ended)
            )

    def _backward_ended(self) -> None:
        """Have buckets follow the order of gradients now, since all ranks are here.

        Stock DDP does so in the next forward with gradients, which may be one that evaluates on one rank alone.
        """
        if self.in_force and not self._in_final_buckets:
            self._in_final_buckets = torch_private.rebuild_buckets(self.ddp)

    def join_hook(self, **options: Any) -> JoinHook:
        """What a rank without inputs does for the others, as stock DDP has it."""
        self.joining = True
        return _JoinHook(self, self.ddp.join_hook(**options))


class _Added:
    """A hook on a parameter that a backward has added to the gradient of."""

    def __init__(self, stock: StockDdp) -> None:
        self._stock = weakref.ref(stock)

    def __call__(self, _parameter: Any) -> None:
        if (stock := self._stock()) is not None:
            stock.gradient_added()


class _Reached:
    """A hook on all that one forward returned: its backward has begun. It need not be saved with it."""

    __torch_unserializable__ = True

    def __init__(self, stock: StockDdp) -> None:
        self._stock: weakref.ref[StockDdp] | None = weakref.ref(stock)

    def __call__(self, _gradient: Any) -> None:
        stock = None if self._stock is None else self._stock()
        if stock is not None:
            stock.backward_begins()
        self._stock = None  # of several outputs the first one counts


class _JoinHook(JoinHook):
    """Stock DDP's, which tells when the ``join()`` has ended."""

    def __init__(self, stock: StockDdp, own: JoinHook) -> None:
        self._stock, self._own = stock, own

    def main_hook(self) -> None:
        """One iteration of the others."""
        self._own.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every rank has joined."""
        self._own.post_hook(is_last_joiner)
        self._stock.joining = False
