"""What is under way for one parameter, and who else holds it or its gradient."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from headway import torch_private
from headway.strategies.data_parallel.decoupled import deferred
from headway.strategies.data_parallel.decoupled.copying import same_bits

if TYPE_CHECKING:
    from headway.strategies.data_parallel.decoupled.bucket import BucketView, SettleGroup
    from headway.strategies.data_parallel.decoupled.engine import Engine


class Replaced(NamedTuple):
    """What a look at an average did to ``.grad``: the local gradient before, and a copy of the average behind."""

    local: torch.Tensor | None
    average: torch.Tensor


class ParameterState:
    """One parameter: its places in buckets, and what is under way for it.

    ``pending``         its gradient went into a reduction whose result is not in ``.grad``
    ``stepped``         an optimizer stepped since, so that its value is one update behind
    ``cleared``         since that step the user replaced ``.grad``, which is therefore no longer ours to write
    """

    def __init__(self, engine: Engine, name: str, parameter: nn.Parameter) -> None:
        self._engine = weakref.ref(engine)
        self.name = name
        self.parameter = parameter
        with torch_private.without_subclass_dispatch():  # the graph itself does not keep it, nor hooks on it
            self.accumulation = torch.autograd.graph.get_gradient_edge(parameter).node
        self.places: list[BucketView] = []
        self.unit: SettleGroup
        self.pending = False
        self.stepped = False
        self.cleared = False
        self.grad_referenced = False
        self.changed = False  # the reduced gradient has been clipped or unscaled where it is sharded
        self.whole: torch.Tensor | None = None  # the average, where a look has put it into .grad
        self.reduced_not_stepped = (
            False  # no optimizer has stepped since its gradient was handed to the reduction
        )
        self.defined = False  # whether there was a gradient when an optimizer stepped
        self.local: torch.Tensor | None = None  # the gradient when it was taken, and its version then
        self.version = 0
        self.unreduced: Replaced | None = None  # what a look at the average replaced in .grad
        self.unused_everywhere = False  # no rank used the parameter, so that there is no average to bring
        self.unreduced_here = False  # .grad has been added to by a backward that was not reduced
        self.accumulating = False  # a gradient is about to be added to .grad
        self.average_exposed = False  # an average that a script may have kept was taken back out of .grad

    @property
    def engine(self) -> Engine:
        """The engine this slot is part of."""
        engine = self._engine()
        assert engine is not None, "the engine of a parameter is gone while the parameter is deferred"
        return engine

    @property
    def grad(self) -> torch.Tensor | None:
        """``.grad`` as it physically is, without bringing it up to date."""
        return deferred.gradient_of(self.parameter)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        deferred.set_gradient(self.parameter, value)

    def begin(self) -> None:
        """The gradient has been handed to the reduction."""
        self.changed = self.unused_everywhere = self.unreduced_here = self.average_exposed = False
        self.reduced_not_stepped = True
        self.pending = True
        deferred.defer_gradient(self.parameter)

    def step(self) -> None:
        """An optimizer has stepped; the value is behind from here on, and so is its version until ``note_steps``."""
        self.stepped, self.reduced_not_stepped = True, False
        self.defined = self.grad is not None
        deferred.defer(self.parameter)

    def settled(self) -> None:
        """The value is current again."""
        self.stepped = False
        if self.cleared or not self.pending:
            self.leave()
        else:
            deferred.defer_gradient(self.parameter)

    def leave(self) -> None:
        """Nothing is under way any more."""
        self.pending = self.stepped = self.cleared = self.grad_referenced = False
        self.local = None
        deferred.undefer(self.parameter)

    def forget_look(self) -> None:
        """The average that a look put into ``.grad`` is given up."""
        self.whole = self.unreduced = None

    def forget(self) -> None:
        """A backward begins: what was reduced before is no more what ``.grad`` holds."""
        self.whole, self.reduced_not_stepped = None, False

    @property
    def sharded(self) -> bool:
        """Whether its gradient is the one that was reduced and is to be stepped by, the same on every rank.

        Some ranks may have looked at it, and hold it whole.
        """
        return self.reduced_not_stepped and (
            self.pending or (self.whole is not None and self.grad is self.whole)
        )

    def is_as_taken(self, scale: float) -> bool:
        """Whether the gradient is what was copied to be reduced, times ``scale``.

        Gradients may lie in one memory and share a version (of parameters that were concatenated), so that a change of
        version alone says little.
        """
        local = self.grad
        if local is not self.local:
            return False
        if local is None or local._version == self.version:
            return True
        flat = local.detach().reshape(-1)
        parts = ((flat[p.start : p.end] * scale, p.view) for p in self.places)
        return all(same_bits(part.to(filled.device), filled) for part, filled in parts)

    @property
    def shows_average(self) -> bool:
        """Whether ``.grad`` is still what a look at the average put there."""
        gradient = self.grad
        if gradient is None or gradient is not self.whole or self.unreduced is None:
            return False
        return same_bits(gradient, self.unreduced.average)

    @property
    def is_local(self) -> bool:
        """Whether it is to be stepped by a gradient that other ranks have not contributed to."""
        return self.unreduced_here and not self.pending and self.grad is not None

    @property
    def to_bring(self) -> bool:
        """Whether ``.grad`` lacks an average that a reduction left, or will leave, in the bucket."""
        return self.pending and not self.cleared and not self.unused_everywhere

    def before_value(self) -> None:
        """Make the value current: apply the update that is due."""
        if self.stepped:
            self.engine.settle_value(self.unit)

    def before_gradient_read(self) -> None:
        """Make ``.grad`` current: complete the reduction, unless the user has replaced the gradient."""
        if self.to_bring:
            self.engine.refuse_inside_backward(self, "read")
            self.engine.settle_gradient(self.unit)

    def before_gradient_write(self) -> None:
        """Leave ``.grad`` to the user from here on, without waiting for anything."""
        if not self.pending:
            return
        self.engine.refuse_inside_backward(self, "replaced")
        if self.stepped:
            self.cleared = True
        else:
            self.leave()


def looked_past(slots: Iterable[ParameterState], device: torch.device) -> list[ParameterState]:
    """Those of ``slots`` whose parameter another tensor aliases, so that its value could be read behind our back."""
    alone = unshared(device)[1]
    with torch_private.without_subclass_dispatch():
        return [slot for slot in slots if torch_private.storage_uses(slot.parameter) > alone]


def note_steps(slots: Iterable[ParameterState]) -> None:
    """Let autograd know that the values of ``slots`` are not what they were."""
    with torch_private.without_subclass_dispatch():
        torch.autograd.graph.increment_version([slot.parameter for slot in slots])


def gradient_holders(parameter: nn.Parameter) -> tuple[int, int]:
    """Count who holds ``parameter.grad``: references to the tensor, and uses of its storage.

    Compare with ``unshared``, the counts where only the parameter does.
    """
    gradient = cast(torch.Tensor, parameter.grad)
    return sys.getrefcount(gradient), torch_private.storage_uses(gradient)


@lru_cache
def unshared(device: torch.device) -> tuple[tuple[int, int], int]:
    """What ``gradient_holders`` counts, and the uses of a parameter's storage, where nobody shares anything.

    The interpreter and torch add their own.
    """
    counts: list[Any] = []
    parameter = nn.Parameter(torch.ones(2, device=device))
    parameter.register_post_accumulate_grad_hook(lambda p: counts.append(gradient_holders(cast(Any, p))))
    with torch_private.without_user_modes(), torch.enable_grad():
        (parameter * 2).sum().backward()
    return counts[0], torch_private.storage_uses(parameter)
