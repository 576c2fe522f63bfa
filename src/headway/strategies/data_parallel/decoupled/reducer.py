"""GradientReducer: gradients as backward accumulates them, into buckets, and full buckets onto their way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from headway import torch_private
from headway.collectives.algorithms import REDUCE_SCATTER
from headway.errors import UnsupportedError
from headway.scheduling.buckets import BucketSchedule
from headway.scheduling.readiness import BucketReadiness
from headway.strategies.data_parallel.decoupled.bucket import LiveBucket
from headway.strategies.data_parallel.decoupled.expected import Expected
from headway.strategies.data_parallel.decoupled.parameter_state import (
    ParameterState,
    gradient_holders,
    unshared,
)

if TYPE_CHECKING:
    from headway.strategies.data_parallel.decoupled.engine import Engine


class GradientReducer:
    """One engine's backward passes. ``running`` says that a synchronised one is filling buckets, or was interrupted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unheld = unshared(engine.wiring.device)[0]
        self.running = False
        self._expected = Expected(self._backward_begins)
        self._local = False  # whether a backward is under way that is not reduced
        self._kept = False  # whether a reduced gradient may be under way
        self._settled = True  # whether nothing has happened since the last backward began
        self._callback_queued = False
        self._readiness: BucketReadiness

    def follow(self, schedule: BucketSchedule) -> Sequence[RemovableHandle]:
        """Fill the buckets of ``schedule``; returns the hooks that bring gradients."""
        self._readiness = BucketReadiness(schedule)
        return [handle for slot in self._engine.slots for handle in _hook(self, slot)]

    def before_accumulation(self, slot: ParameterState) -> None:
        """Called before a gradient is added to ``.grad``: the first of a backward settles values.

        Not for gradients that ``torch.autograd.grad`` hands to the script.
        """
        slot.accumulating = True
        if self.running or self._local:
            return
        if self._expected:
            self._settle_before_backward()
        else:
            self._local = True
            torch_private.queue_backward_callback(self._local_ended)
            self._engine.form.before_local_gradients()

    def _local_ended(self) -> None:
        self._local = False

    def _settle_before_backward(self) -> None:
        if not self._settled:
            self._engine.form.before_gradients()
            self._settled = True

    def _let_go(self) -> None:
        """Gradients are being accumulated: whatever was under way for the earlier ones ends here."""
        self._settle_before_backward()
        if self._kept:
            self._kept = False
            self._engine.form.begin_backward()
            self._engine.change_form()

    def expect(self, output: Any) -> None:
        """A synchronised forward returns ``output``: its backward is to be reduced."""
        self._expected.forward(output)

    def _backward_begins(self) -> None:
        """A backward that may leave parameters without a gradient begins: be told of its end in any case."""
        if self._engine.find_unused:
            self._begin()

    def _begin(self) -> None:
        self._engine.check_usable(inside_backward=True)
        if not self.running:
            self._local = False
            self._let_go()
            self.running, self._settled, self._kept = True, False, True
            self._readiness.restart()
            self._engine.usage.restart()
        if not self._callback_queued:
            self._callback_queued = True
            torch_private.queue_backward_callback(self._backward_ended)

    def take_gradient(self, slot: ParameterState) -> None:
        """Called when a gradient has been added to ``.grad``: copy it to its bucket, and launch full buckets."""
        if (
            not slot.accumulating
        ):  # torch makes another node for a parameter that was converted, even to and fro
            raise self._converted(slot)
        slot.accumulating = False
        if not self.running and not self._expected:
            slot.unreduced_here = True
            return
        if not (self.running and self._callback_queued):
            self._begin()
        if slot.pending:
            raise self._engine.fail(
                "a parameter received a gradient again after it had been reduced in the same backward",
                slot.name, "Use checkpoint(..., use_reentrant=False) for shared parameters.",
            )  # fmt: skip
        self._check_gradient(slot, slot.parameter.grad)
        slot.grad_referenced = (
            gradient_holders(slot.parameter) != self._unheld
        )  # before this function holds it too
        gradient = slot.parameter.grad
        assert gradient is not None
        self._fill(slot, gradient)
        if self._engine.usage.used(slot) and (full := self._readiness.ready(slot.name)):
            self._launch(full)

    def _fill(self, slot: ParameterState, gradient: torch.Tensor) -> None:
        slot.local, slot.version = gradient, gradient._version
        scale = 1.0 / self._engine.divisor
        for place in slot.places:
            place.bucket.fill(place, gradient, scale)

    def _check_gradient(self, slot: ParameterState, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            raise self._engine.fail(
                "another hook removed a gradient before it was reduced", slot.name, "Remove that hook."
            )
        if gradient.layout is not torch.strided:
            raise self._engine.fail(
                "sparse gradients are not supported", slot.name, "Make the layer's gradient dense."
            )
        if gradient.requires_grad or torch.is_grad_enabled():
            raise self._engine.fail(
                "gradients of gradients (create_graph) are not supported", slot.name, "Use stock DDP."
            )
        buffer = slot.places[0].bucket.buffer
        if gradient.dtype != buffer.dtype or gradient.device != self._engine.wiring.device:
            raise self._converted(slot)

    def _converted(self, slot: ParameterState) -> UnsupportedError:
        return self._engine.fail(
            "a parameter changed its dtype or device after it was wrapped, perhaps to and fro", slot.name,
            "Convert the model before wrapping it; evaluate a converted copy of it.",
        )  # fmt: skip

    def _launch(self, indices: Sequence[int]) -> None:
        for index in indices:
            bucket = self._engine.buckets[index]
            for slot in bucket.slots:
                if not slot.is_as_taken(1.0 / self._engine.divisor):
                    raise self._engine.fail(
                        "a hook changed a gradient after it had been taken to be reduced", slot.name,
                        "Register the hook before wrapping the model, or change gradients after backward().",
                    )  # fmt: skip
                if not slot.pending:
                    slot.begin()
            bucket.unit.in_flight = True
            self._reduce(bucket)
        if indices and self._readiness.complete and self._engine.find_unused:
            self._engine.usage.share(self._engine)

    def _reduce(self, bucket: LiveBucket) -> None:
        form = self._engine.form
        bucket.reductions += 1
        bucket.reduce = self._engine.collective(REDUCE_SCATTER, bucket, then=form.keep(bucket.index))
        form.reduced(bucket.index)

    def _backward_ended(self) -> None:
        self._callback_queued = False
        if not self._readiness.complete and torch_private.inside_backward():
            return  # nested in another backward, which goes on
        if not self._readiness.complete and self._engine.find_unused:
            self._fill_up()
        if not self._readiness.complete:
            raise self._engine.fail_unfinished()
        self.running = False
        self._expected.backward_ended()
        # A gradient that somebody holds a reference to can be read without asking: it must be right now.
        for unit in self._engine.units:
            if any(slot.grad_referenced for slot in unit.slots):
                self._engine.settle_gradient(unit)

    def _fill_up(self) -> None:
        """Let parameters that this rank did not use take part with what they hold, or with zeros."""
        for slot in self._engine.usage.unused():
            slot.grad_referenced = slot.average_exposed  # else nobody has seen reduced what it holds
            gradient = slot.grad
            if gradient is None:
                slot.local = None
                for place in slot.places:
                    place.bucket.clear(place)
            else:
                with torch.no_grad():
                    self._fill(slot, gradient)
            self._launch(self._readiness.ready(slot.name))

    def reduce_zeros(self) -> None:
        """Take part in the backward of other ranks without a gradient of one's own; wait for its end."""
        self._engine.check_usable()
        self._engine.settle_all()
        self._engine.usage.restart()
        for bucket in self._engine.buckets:
            bucket.clear()
            self._reduce(bucket)
        if self._engine.find_unused:
            self._engine.usage.share(self._engine)
        for bucket in self._engine.buckets:
            assert bucket.gather is not None
            self._engine.wait(bucket.gather)

    def refuse_while_running(self, slot: ParameterState, what: str) -> None:
        """Raise UnsupportedError where backward is still running: not every bucket is on its way yet."""
        if self.running:
            self._engine.check_usable()
            raise UnsupportedError(
                f"the gradient of {slot.name} was {what} during backward, while it is being reduced",
                fix="Look at gradients after backward() has returned.",
            )

    def unsettle(self) -> None:
        """Something was deferred that the next backward must find settled."""
        self._settled, self._kept = False, True


def _hook(reducer: GradientReducer, slot: ParameterState) -> Sequence[RemovableHandle]:
    reducer_of: Callable[[], GradientReducer | None] = weakref.ref(reducer)

    def before(_gradients: tuple[torch.Tensor, ...], slot: ParameterState = slot) -> None:
        if (alive := reducer_of()) is not None:
            alive.before_accumulation(slot)

    def after(_parameter: torch.Tensor, slot: ParameterState = slot) -> None:
        if (alive := reducer_of()) is not None:
            alive.take_gradient(slot)

    return (
        slot.accumulation.register_prehook(before),
        slot.parameter.register_post_accumulate_grad_hook(after),
    )
