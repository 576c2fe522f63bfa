"""What is in flight for one parameter, and who else holds it or its gradient.

The life of a parameter between two backwards: its phases, what may happen in each, and what comes of it.

    CURRENT ──REDUCE──> REDUCING ──STEP──> STEPPED ──REPLACE──> CLEARED
       ^                   │  ^               │                    │
       │                 BRING└────SETTLE─────┤                    │
       │<──────────────────┘                BRING                SETTLE
       │<──SETTLE── GATHERING <───────────────┘                    │
       │<──────────────────────────────────────────────────────────┘

UNUSED and STEPPED_UNUSED are REDUCING and STEPPED where no rank used the parameter. RELEASE leads to CURRENT from
everywhere. What is not in ``TRANSITIONS`` cannot happen: trying it is an InternalError.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from headway import torch_private
from headway.errors import InternalError
from headway.strategies.decoupled import deferred
from headway.strategies.decoupled.buckets import BucketView, same_bits
from headway.torch_private import version_of


class Phase(enum.Enum):
    """What is in flight for one parameter."""

    __hash__ = (
        object.__hash__
    )  # of Enum it is written in Python, and phases are looked up for every parameter

    CURRENT = (False, False, False, False)
    """Nothing."""
    REDUCING = (True, False, False, True)
    """Its gradient went into a reduction whose average is not in ``.grad``."""
    UNUSED = (True, False, False, False)
    """As before, but no rank used it, so that there is no average."""
    STEPPED = (True, True, False, True)
    """An optimizer stepped since, so that the value is one update behind as well."""
    STEPPED_UNUSED = (True, True, False, False)
    """As before, but there is no average."""
    CLEARED = (True, True, True, False)
    """Since that step the script replaced ``.grad``, which is no longer ours to write."""
    GATHERING = (False, True, False, False)
    """The value is one update behind; ``.grad`` is what it should be."""

    def __init__(self, pending: bool, stepped: bool, cleared: bool, to_bring: bool) -> None:
        self.pending = pending  # a reduction's result is not in ``.grad``
        self.stepped = stepped  # the value is one update behind
        self.cleared = cleared
        self.to_bring = (
            to_bring  # ``.grad`` lacks an average that a reduction left, or will leave, in the bucket
        )


class Event(enum.Enum):
    """What happens to a parameter."""

    REDUCE = "its gradient is handed to a reduction"
    STEP = "an optimizer steps it, and its update is deferred"
    BRING = "the average is written into .grad"
    FIND_UNUSED = "no rank turns out to have used it"
    REPLACE = "the script replaces .grad"
    SETTLE = "its value is brought up to date"
    RELEASE = "whatever was in flight ends"


class Outcomes(dict[Phase, Phase]):
    """The phase behind one event, by the phase before. Raises InternalError where the event is not legal."""

    def __init__(self, event: Event, phases: dict[Phase, Phase]) -> None:
        super().__init__(phases)
        self._event = event

    def __missing__(self, phase: Phase) -> Phase:
        raise InternalError(f"{self._event.value} in the phase {phase.name}, where that cannot happen")


TRANSITIONS: dict[Event, Outcomes] = {
    event: Outcomes(event, phases)
    for event, phases in {
        Event.REDUCE: {Phase.CURRENT: Phase.REDUCING},
        Event.STEP: {
            Phase.CURRENT: Phase.GATHERING,
            Phase.REDUCING: Phase.STEPPED,
            Phase.UNUSED: Phase.STEPPED_UNUSED,
        },
        Event.BRING: {Phase.REDUCING: Phase.CURRENT, Phase.STEPPED: Phase.GATHERING},
        Event.FIND_UNUSED: {Phase.REDUCING: Phase.UNUSED, Phase.STEPPED: Phase.STEPPED_UNUSED},
        Event.REPLACE: {
            Phase.CURRENT: Phase.CURRENT,
            Phase.GATHERING: Phase.GATHERING,
            Phase.REDUCING: Phase.CURRENT,
            Phase.UNUSED: Phase.CURRENT,
            Phase.STEPPED: Phase.CLEARED,
            Phase.STEPPED_UNUSED: Phase.CLEARED,
            Phase.CLEARED: Phase.CLEARED,
        },
        Event.SETTLE: {
            Phase.STEPPED: Phase.REDUCING,
            Phase.STEPPED_UNUSED: Phase.UNUSED,
            Phase.CLEARED: Phase.CURRENT,
            Phase.GATHERING: Phase.CURRENT,
        },
        Event.RELEASE: dict.fromkeys(Phase, Phase.CURRENT),
    }.items()
}


def gradient_holders(parameter: nn.Parameter) -> tuple[int, int]:
    """Count who holds ``parameter.grad``: references to the tensor, and uses of its storage.

    Compare with ``unshared``, the counts where only the parameter does.
    """
    gradient = parameter.grad
    return sys.getrefcount(gradient), torch_private.storage_uses(gradient)  # type: ignore[arg-type]


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


_CURRENT = Phase.CURRENT
_REDUCE, _STEP, _BRING = TRANSITIONS[Event.REDUCE], TRANSITIONS[Event.STEP], TRANSITIONS[Event.BRING]
_FIND_UNUSED, _REPLACE = TRANSITIONS[Event.FIND_UNUSED], TRANSITIONS[Event.REPLACE]
_SETTLE, _RELEASE = TRANSITIONS[Event.SETTLE], TRANSITIONS[Event.RELEASE]

_NOTICES: dict[Phase, type[nn.Parameter]] = {
    phase: deferred.DeferredParameter
    if phase.stepped
    else deferred.DeferredGradient
    if phase.pending
    else nn.Parameter
    for phase in Phase
}
"""What a parameter is while it is in a phase: it notices uses of what is not current."""


class Replaced(NamedTuple):
    """What a look at an average did to ``.grad``: the local gradient before, and a copy of the average behind."""

    local: torch.Tensor | None
    average: torch.Tensor


class ParameterState:
    """One parameter: its views of buckets, its phase, and what is known of its gradient.

    Its attributes are changed by its own methods only. Those that are not told by the phase:

    ``accumulating``        a gradient is about to be added to ``.grad``
    ``accumulated_here``    ``.grad`` has been added to by a backward that was not reduced
    ``taken``               the gradient when it was copied to its buckets, and ``taken_version`` its version then
    ``grad_referenced``     somebody else holds that gradient and may read it without asking
    ``reduced_not_stepped`` no optimizer has stepped since the gradient was handed to a reduction
    ``rescaled``            the reduced gradient has been clipped or unscaled where it is sharded
    ``had_gradient``        whether there was a gradient when an optimizer stepped
    ``shown``               the average, where a look has put it into ``.grad``
    ``replaced``            what that look replaced there
    ``average_exposed``     such an average, which a script may have kept, was taken back out of ``.grad``
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        with torch_private.without_subclass_dispatch():  # the graph itself does not keep it, nor hooks on it
            self.accumulation = torch.autograd.graph.get_gradient_edge(parameter).node
        self.views: list[BucketView] = []
        self.phase = _CURRENT
        self.accumulating = False
        self.accumulated_here = False
        self.taken: torch.Tensor | None = None
        self.taken_version = 0
        self.grad_referenced = False
        self.reduced_not_stepped = False
        self.rescaled = False
        self.had_gradient = False
        self.shown: torch.Tensor | None = None
        self.replaced: Replaced | None = None
        self.average_exposed = False
        self._stepped_reduction = 0

    @property
    def grad(self) -> torch.Tensor | None:
        """``.grad`` as it physically is, without bringing it up to date."""
        return deferred.gradient_of(self.parameter)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        deferred.set_gradient(self.parameter, value)

    # A backward --------------------------------------------------------------------------------------

    def announce(self) -> None:
        """A gradient is about to be added to ``.grad``."""
        self.accumulating = True

    def accumulate_here(self) -> None:
        """A gradient has been added to ``.grad`` that stays on this rank."""
        self.accumulating = False
        self.accumulated_here = True

    def take(self, unshared_holders: tuple[int, int]) -> torch.Tensor:
        """The gradient is complete and about to be copied to its buckets; returns it. The caller must not hold it yet.

        ``unshared_holders`` is what ``gradient_holders`` counts where nobody else holds it.
        """
        self.accumulating = False
        self.grad_referenced = gradient_holders(self.parameter) != unshared_holders
        self.taken = gradient = self.parameter.grad
        assert gradient is not None
        self.taken_version = version_of(gradient)
        return gradient

    def take_unused(self) -> torch.Tensor | None:
        """This rank did not use the parameter in a backward that is reduced; returns what ``.grad`` holds."""
        self.grad_referenced = self.average_exposed  # else nobody has seen reduced what it holds
        self.taken = gradient = self.grad
        if gradient is not None:
            self.taken_version = version_of(gradient)
        return gradient

    def is_as_taken(self, scale: float) -> bool:
        """Whether the gradient is what was copied to be reduced, times ``scale``.

        Gradients may lie in one memory and share a version (of parameters that were concatenated), so that a change of
        version alone says little.
        """
        local = self.grad
        if local is not self.taken:
            return False
        if local is None or version_of(local) == self.taken_version:
            return True
        flat = local.detach().reshape(-1)
        parts = ((flat[v.start : v.end] * scale, v.flat) for v in self.views)
        return all(same_bits(part.to(filled.device), filled) for part, filled in parts)

    def begin_reduction(self) -> None:
        """The gradient has been handed to the reduction."""
        self._enter(_REDUCE[self.phase])
        self.rescaled = self.accumulated_here = self.average_exposed = False
        self.reduced_not_stepped = True

    def forget_reduced(self) -> None:
        """A backward begins: each rank lets go of what was reduced before and never stepped."""
        self.shown, self.reduced_not_stepped = None, False
        if self.phase.pending:
            self.release()

    # A step ------------------------------------------------------------------------------------------

    def first_step(self) -> bool:
        """Whether no optimizer has stepped it since its latest reduction; one does now."""
        before, self._stepped_reduction = self._stepped_reduction, self.views[0].bucket.reductions
        return self._stepped_reduction > before

    def step(self) -> None:
        """An optimizer has stepped; the value is behind from here on, and so is its version until ``note_steps``."""
        self.had_gradient = self.grad is not None
        self.reduced_not_stepped = False
        self._enter(_STEP[self.phase])

    def settle(self) -> None:
        """The value is current again."""
        self._enter(_SETTLE[self.phase])

    def release(self) -> None:
        """Nothing is in flight any more."""
        self._enter(_RELEASE[self.phase])

    # Looks at the average ----------------------------------------------------------------------------

    def find_unused(self) -> None:
        """No rank used the parameter: there is no average to bring."""
        self._enter(_FIND_UNUSED[self.phase])

    def show_average(self, replaced: Replaced) -> None:
        """The average has been written into ``.grad``, over ``replaced.local``."""
        self._enter(_BRING[self.phase])
        self.shown, self.replaced = self.grad, replaced

    @property
    def shows_average(self) -> bool:
        """Whether ``.grad`` is still what a look at the average put there."""
        gradient = self.grad
        if gradient is None or gradient is not self.shown or self.replaced is None:
            return False
        return same_bits(gradient, self.replaced.average)

    def put_back(self) -> None:
        """Take a look back: ranks that looked and ranks that did not must hold the same kind of gradient."""
        assert self.replaced is not None
        untouched = self.shows_average
        replaced, self.replaced = self.replaced, None
        gradient = self.grad
        if gradient is None or gradient is not self.shown:
            return
        if untouched:
            if replaced.local is None:
                self.grad = None
            else:
                gradient.detach().copy_(replaced.local)
            self.begin_reduction()
            self.average_exposed = replaced.local is not None
        elif (
            self.accumulated_here
        ):  # a local backward was added to the average, here and perhaps nowhere else
            gradient.detach().sub_(replaced.average)
            if replaced.local is not None:
                gradient.detach().add_(replaced.local)

    def keep_shown(self) -> None:
        """What a look has put into ``.grad`` stays there: it is the script's own by now."""
        self.replaced = None

    def forget_look(self) -> None:
        """The average that a look put into ``.grad`` is given up."""
        self.shown = self.replaced = None

    def rescale(self) -> None:
        """The reduced gradient has been clipped or unscaled, on every rank."""
        self.rescaled = self.phase.pending
        self.replaced = None  # what is accumulated from now on is so onto what was changed, on every rank

    def leave_gradient(self) -> None:
        """The script replaces ``.grad``: it is no longer ours to write."""
        phase = _REPLACE[self.phase]
        if phase is _CURRENT:
            self._enter(phase)
        else:  # what is noticed stays the same
            self.phase = phase

    # What is asked of it -----------------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        """Whether its gradient is the one that was reduced and is to be stepped by, the same on every rank.

        Some ranks may have looked at it, and hold it whole.
        """
        return self.reduced_not_stepped and (
            self.phase.pending or (self.shown is not None and self.grad is self.shown)
        )

    @property
    def is_local(self) -> bool:
        """Whether it is to be stepped by a gradient that other ranks have not contributed to."""
        return self.accumulated_here and not self.phase.pending and self.grad is not None

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is _CURRENT:
            self.grad_referenced = False
            self.taken = None
        self.parameter.__class__ = _NOTICES[phase]


def looked_past(states: Iterable[ParameterState], device: torch.device) -> list[ParameterState]:
    """Those whose parameter another tensor aliases, so that its value could be read behind our back."""
    alone = unshared(device)[1]
    with torch_private.without_subclass_dispatch():
        return [state for state in states if torch_private.storage_uses(state.parameter) > alone]


def note_steps(states: Iterable[ParameterState]) -> None:
    """Let autograd know that the values of ``states`` are not what they were."""
    with torch_private.without_subclass_dispatch():
        torch.autograd.graph.increment_version([state.parameter for state in states])
