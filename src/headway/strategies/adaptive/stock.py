"""Stock DDP in the place of a decoupled wrapper's engine, for as long as that hands its steps over.

A DistributedDataParallel of torch's own is put over the same module, and the wrapper's forward is its forward. The
wrapper stays what scripts have it for: its hooks, its names, ``no_sync()``, ``join()``, copies. Nothing of the engine
is left on the way of a step; all that is looked at before a forward is whether other parameters are trained, which
stock DDP would not notice. Its gradients go through all-reduces of its own, or through servers behind its hook.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.strategies.ddp import runtime as ddp_runtime
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import OnStockDdp
from headway.strategies.parameter_server import runtime as server_runtime

COUNTED_BY = 8
"""Hooks on about so many parameters count backwards where all are used in each."""


class HandingOver(Protocol):
    """A wrapper whose steps stock DDP may do."""

    module: nn.Module
    require_backward_grad_sync: bool
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    _join_config: Any


def stock_options(*, shares_buffers: bool, batched_grad_copy: bool, **options: Any) -> dict[str, Any]:
    """Arguments of this torch's DistributedDataParallel for a module whose replicas are alike already."""
    known = inspect.signature(inspect.unwrap(DistributedDataParallel.__init__)).parameters
    sharing = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    copying = {"batched_grad_copy": True} if batched_grad_copy else {}
    return {**options, **copying, sharing: shares_buffers, "init_sync": False}


def check_on_stock(module: nn.Module, strategy: OnStockDdp, world_size: int) -> None:
    """Raise UnsupportedError for what stock DDP over ``module`` cannot have; PlanError for shares of other ranks."""
    if isinstance(strategy, DistributedDataParallelStrategy):
        ddp_runtime.options(strategy)  # raises where this torch cannot have such buckets
    else:
        server_runtime.check_module(module)
        strategy.serving.check(world_size)


class Stock:
    """Stock DDP over one wrapper's module, with ``options`` of DistributedDataParallel; at first it is not in force.

    ``reductions`` counts the backwards that were reduced since it has been in force, if forwards say that they are
    ``counted``: those that add to gradients, so no ``autograd.grad`` of inputs, and once however many forwards there
    were before. ``joining`` says whether a ``join()`` has begun and not ended meanwhile, ``frozen`` that no parameter
    is trained at the moment.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._strategy: OnStockDdp = self.own_strategy  # in force, or the last one that was
        self._served: server_runtime.Served | None = None  # where servers carry its buckets
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
    def own_strategy(self) -> DistributedDataParallelStrategy:
        """What it decides with the script's own options."""
        return DistributedDataParallelStrategy(bucket_cap_mb=self._options.get("bucket_cap_mb"))

    @property
    def strategy(self) -> OnStockDdp:
        """What it decides, where it is in force."""
        return self._strategy

    @property
    def ddp(self) -> DistributedDataParallel:
        """The DDP that is in force."""
        assert self._ddp is not None
        return self._ddp

    @property
    def has_servers(self) -> bool:
        """Whether servers carry its buckets."""
        return self._served is not None

    def begin(self, wrapped: HandingOver, strategy: OnStockDdp, accumulated: Collection[int] = ()) -> None:
        """Do the steps of ``wrapped`` from now on: on every rank at the same point, with no engine on its parameters.

        The buckets are those of ``strategy``. Where servers carry them, ``serve`` comes next. ``accumulated`` are the
        identities of parameters whose gradients a backward has added to that was not reduced.

        Ranks have the same parameters and buffers by then.
        """
        if isinstance(strategy, DistributedDataParallelStrategy):
            decided = ddp_runtime.options(strategy)
        else:
            decided = server_runtime.options(strategy)
        options = {**self._options, **decided}
        self._ddp = torch_private.stock_ddp(self._ddp, wrapped.module, options, accumulated)
        self._strategy = strategy
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

    def check_reduced(self) -> None:
        """Raise RuntimeError, with torch's explanation, where a backward has left parameters unreduced."""
        torch_private.check_reduced(self.ddp)

    def serve(self) -> None:
        """Where its strategy is one of servers, have them carry buckets. Collective: every rank has begun."""
        if not isinstance(self._strategy, DistributedDataParallelStrategy):
            self._served = server_runtime.Served(self.ddp, self._strategy)

    def end(self, wrapped: HandingOver) -> None:
        """Leave the module as it was before: no hook, no bucket, and gradients that are their own.

        Raises RuntimeError, as stock DDP's next forward would, where a backward has left parameters unreduced.
        """
        ddp = self.ddp
        self._count_no_more()
        torch_private.release_reducer(ddp)
        if self._served is not None:
            self._served.end(ddp)
            self._served = None
        wrapped.require_forward_param_sync = ddp.require_forward_param_sync
        if self._options.get("gradient_as_bucket_view"):
            for parameter in wrapped.module.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        self.in_force = False

    def begin_again(self, wrapped: HandingOver, strategy: OnStockDdp) -> None:
        """Go on with buckets made anew: other parameters are trained, or something else is asked for. Collective."""
        kept = self._served if strategy == self._strategy else None
        if kept is not None:
            self._served = None
        accumulated = self.accumulated
        self.end(wrapped)
        self.begin(wrapped, strategy, accumulated)
        if kept is None:
            self.serve()
        else:
            self._served = kept
            kept.hook(self.ddp)

    def forward(
        self, wrapped: HandingOver, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, counted: bool
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

    def __init__(self, stock: Stock) -> None:
        self._stock = weakref.ref(stock)

    def __call__(self, _parameter: Any) -> None:
        if (stock := self._stock()) is not None:
            stock.gradient_added()


class _Reached:
    """A hook on all that one forward returned: its backward has begun. It need not be saved with it."""

    __torch_unserializable__ = True

    def __init__(self, stock: Stock) -> None:
        self._stock: weakref.ref[Stock] | None = weakref.ref(stock)

    def __call__(self, _gradient: Any) -> None:
        stock = None if self._stock is None else self._stock()
        if stock is not None:
            stock.backward_begins()
        self._stock = None  # of several outputs the first one counts


class _JoinHook(JoinHook):
    """Stock DDP's, which tells when the ``join()`` has ended."""

    def __init__(self, stock: Stock, own: JoinHook) -> None:
        self._stock, self._own = stock, own

    def main_hook(self) -> None:
        """One iteration of the others."""
        self._own.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every rank has joined."""
        self._own.post_hook(is_last_joiner)
        self._stock.joining = False
