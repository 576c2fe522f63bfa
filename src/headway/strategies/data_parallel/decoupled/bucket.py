"""The live state of buckets and of the parameters in them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from headway import torch_private
from headway.scheduling.buckets import Bucket
from headway.strategies.data_parallel.decoupled import deferred
from headway.strategies.data_parallel.decoupled.communication import Job

if TYPE_CHECKING:
    from headway.strategies.data_parallel.decoupled.engine import Engine

# Applies one optimizer's step to the parameters of one bucket; called when their gradients are in place.
Update = Callable[[], None]


class Slot:
    """One parameter: its place in a bucket's buffer, and what is under way for it.

    ``pending``         its gradient went into a reduction whose result is not yet in ``.grad``
    ``stepped``         an optimizer stepped meanwhile, so that its value is one update behind
    ``cleared``         since that step the user replaced ``.grad``, which is therefore no longer ours to write
    """

    def __init__(self, engine: Engine, name: str, parameter: nn.Parameter, view: torch.Tensor) -> None:
        self._engine = weakref.ref(engine)
        self.name = name
        self.parameter = parameter
        self.view = view
        self.bucket: LiveBucket
        self.ready = False
        self.pending = False
        self.stepped = False
        self.cleared = False
        self.held = False
        self.local: torch.Tensor | None = None

    @property
    def engine(self) -> Engine:
        """The engine this slot is part of."""
        engine = self._engine()
        assert engine is not None, "the engine of a parameter is gone while the parameter is deferred"
        return engine

    @property
    def grad(self) -> torch.Tensor | None:
        """``.grad`` as it physically is, without bringing it up to date."""
        with torch_private.without_subclass_dispatch():
            return self.parameter.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch_private.without_subclass_dispatch():
            self.parameter.grad = value

    def begin(self) -> None:
        """The gradient has been handed to the reduction."""
        self.ready = False
        self.pending = True
        deferred.defer(self.parameter)

    def leave(self) -> None:
        """Nothing is under way any more."""
        self.ready = self.pending = self.stepped = self.cleared = self.held = False
        self.local = None
        deferred.undefer(self.parameter)

    def before_value(self) -> None:
        """Make the value current: apply the update that is due."""
        if self.stepped:
            self.engine.settle(self.bucket)

    def before_gradient_read(self) -> None:
        """Make ``.grad`` current: complete the reduction, unless the user has replaced the gradient."""
        if self.pending and not self.cleared:
            self.engine.refuse_inside_backward(self, "read")
            self.engine.settle(self.bucket)

    def before_gradient_write(self) -> None:
        """Leave ``.grad`` to the user from here on, without waiting for anything."""
        if not self.pending:
            return
        self.engine.refuse_inside_backward(self, "replaced")
        if self.stepped:
            self.cleared = True
        else:
            self.leave()

    def shares_storage(self) -> bool:
        """Whether another tensor aliases the parameter, so that its value could be read behind our back."""
        with torch_private.without_subclass_dispatch():
            return torch_private.storage_uses(self.parameter) > _PARAMETER_USES


class LiveBucket:
    """A bucket with its buffer, its slots and what is under way for it."""

    def __init__(self, bucket: Bucket, numel: int) -> None:
        self.index = bucket.index
        self.buffer = torch.empty(numel, dtype=getattr(torch, bucket.dtype))
        self.slots: list[Slot] = []
        self.ready = 0
        self.in_flight = False
        self.gather: Job | None = None
        self.updates: list[Update] = []

    @property
    def size_bytes(self) -> int:
        """The size of the buffer."""
        return self.buffer.numel() * self.buffer.element_size()


def gradient_holders(parameter: nn.Parameter) -> tuple[int, int]:
    """Count who holds ``parameter.grad``: references to the tensor, and uses of its storage.

    Compare with ``UNHELD``, the counts where only the parameter does.
    """
    gradient = cast(torch.Tensor, parameter.grad)
    return sys.getrefcount(gradient), torch_private.storage_uses(gradient)


def _calibrate() -> tuple[tuple[int, int], int]:
    """What the two counts are where nobody shares anything: the interpreter and torch add their own."""
    counts: list[Any] = []
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda p: counts.append(gradient_holders(cast(Any, p))))
    with torch.inference_mode(False), torch.enable_grad():
        (parameter * 2).sum().backward()
    return counts[0], torch_private.storage_uses(parameter)


UNHELD, _PARAMETER_USES = _calibrate()
