"""GradientReducer: gradients as backward accumulates them, into buckets, and full buckets onto their way.

Every synchronised backward queues, on every rank, the reduce-scatters of all buckets in plan order, each exactly once,
whatever the script does afterwards. What is gathered, and when, is the form's to say: see ``gather_gradients`` and
``gather_parameters``.

Which backwards are reduced: those that a synchronised forward of the wrapped model has led to expect.

As in stock DDP, a synchronised forward arms the reduction; the next backward is reduced whatever it traverses. So is a
later one that reaches what such a forward returned. Any other, of the bare module on one rank perhaps, stays local.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from headway import torch_private
from headway.errors import UnsupportedError
from headway.scheduling.buckets import BucketReadiness
from headway.strategies.decoupled.condition import LOCK, Condition
from headway.strategies.decoupled.layout import Layout, Usage
from headway.strategies.decoupled.parameter_state import ParameterState, unshared
from headway.strategies.decoupled.settlement import Settlement
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.communication import Job


class Expected:
    """The backwards of one wrapped model that are to be reduced. True where the next one is.

    ``begins`` is called when a backward reaches what a synchronised forward returned, and ``begins_late`` before it
    where stock DDP would not reduce that backward: another has been reduced since the forward.
    """

    def __init__(self, begins: Callable[[], None], begins_late: Callable[[], None]) -> None:
        self._begins = begins
        self._begins_late = begins_late
        self._forward = False  # there has been a synchronised forward since the last reduced backward
        self._reached: weakref.WeakSet[_Output] = weakref.WeakSet()  # they live as long as their graphs

    def __bool__(self) -> bool:
        return self._forward or len(self._reached) > 0

    def forward(self, output: Any) -> None:
        """A synchronised forward returns ``output``."""
        self._forward = True
        hook = _Output(self)
        for tensor in torch_private.tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)

    def reached(self, output: _Output) -> None:
        """A backward has come to what a forward returned, perhaps once more."""
        if not self:
            self._begins_late()
        self._reached.add(output)
        self._begins()

    def backward_ended(self) -> None:
        """A backward was reduced."""
        self._forward = False
        self._reached.clear()


class _Output:
    """A hook on all that one forward returned. It need not be saved with it."""

    __torch_unserializable__ = True

    def __init__(self, expected: Expected) -> None:
        self._expected = weakref.ref(expected)

    def __call__(self, _gradient: Any) -> None:
        if (expected := self._expected()) is not None:
            expected.reached(self)


class GradientReducer:
    """One engine's backward passes.

    ``divisor`` is what sums of gradients are divided by; ``join()`` may change it.
    """

    def __init__(
        self,
        transport: BucketTransport,
        settlement: Settlement,
        condition: Condition,
        device: torch.device,
        *,
        find_unused: bool,
    ) -> None:
        self.divisor = float(transport.world_size)
        self._transport = transport
        self._submit = transport.submit
        self._settlement = settlement
        self._condition = condition
        self._device = device
        self._find_unused = find_unused
        self._unshared_holders = unshared(device)[0]
        self._expected = Expected(self._backward_begins, self._second_backward_begins)
        self._local = False  # whether a backward is running that is not reduced
        self._layout: Layout
        self._usage: Usage
        self._readiness: BucketReadiness

    def follow(self, layout: Layout, usage: Usage) -> list[RemovableHandle]:
        """Fill the buckets of ``layout``; returns the hooks that bring gradients."""
        self._layout, self._usage = layout, usage
        self._readiness = BucketReadiness(layout.schedule)
        # Hooks keep the parameter's state, which knows no engine, and not this object.
        itself = weakref.ref(self)
        handles: list[RemovableHandle] = []
        for state in layout.states:
            handles.append(state.accumulation.register_prehook(partial(self._before_gradient, itself, state)))
            take = partial(self._take_gradient, itself, state)
            handles.append(state.parameter.register_post_accumulate_grad_hook(take))
        return handles

    # The beginning -----------------------------------------------------------------------------------

    def expect(self, output: Any) -> None:
        """A synchronised forward returns ``output``: its backward is to be reduced."""
        self._condition.trainer = threading.get_ident()
        self._expected.forward(output)

    def prepare_for_backward(self, outputs: Any) -> None:
        """As of DDP's reducer, for torch's pipelines: the next backward, from ``outputs``, is the last of a stage.

        The forwards were not synchronised, and what earlier backwards accumulated is reduced with it.
        """
        self._condition.check_usable()
        self.expect(outputs)

    def _rebuild_buckets(self) -> bool:
        """As of DDP's reducer, for Lightning's manual optimization: buckets follow no order of their own here."""
        return False

    @staticmethod
    def _before_gradient(
        itself: Callable[[], GradientReducer | None],
        state: ParameterState,
        _gradients: tuple[torch.Tensor, ...],
    ) -> None:
        """Called before a gradient is added to ``.grad``: the first of a backward settles values.

        Not for gradients that ``torch.autograd.grad`` hands to the script.
        """
        state.announce()
        reducer = itself()
        if reducer is not None and not (reducer._condition.filling or reducer._local):
            reducer._first_gradient()

    def _first_gradient(self) -> None:
        with LOCK:
            if self._expected:
                self._condition.call_at_end(self._backward_ended)
                self._condition.in_first_gradient = True
                if self._condition.work_deferred:
                    self._settle_before_backward()
            else:
                self._local = True
                torch_private.queue_backward_callback(self._local_ended)
                self._settlement.form.before_local_gradients()

    def _local_ended(self) -> None:
        self._local = False

    def _settle_before_backward(self) -> None:
        self._settlement.form.before_gradients()
        self._condition.work_deferred = False

    def _let_go(self) -> None:
        """Gradients are being accumulated: whatever was in flight for the earlier ones ends here."""
        if self._condition.work_deferred:
            self._settle_before_backward()
        if self._condition.gradients_kept:
            self._condition.gradients_kept = False
            self._settlement.form.begin_backward()
            self._settlement.change_form()

    def _backward_begins(self) -> None:
        """A backward that may leave parameters without a gradient begins: be told of its end in any case."""
        if self._find_unused:
            self._begin()

    def _second_backward_begins(self) -> None:
        """A backward begins whose forward came before another backward."""
        self._condition.warn_of_drift("second backward", "a second backward follows several forwards")

    def _begin(self) -> None:
        condition = self._condition
        with LOCK:
            condition.check_usable(inside_backward=True)
            end = condition.end
            if end is None or end() is None:  # looked at here, as a call costs time
                condition.call_at_end(self._backward_ended)
            if not condition.filling:
                self._local = False
                self._let_go()
                condition.filling = True
                condition.defer_work()
                self._readiness.restart()
                self._usage.restart()

    # Gradients ---------------------------------------------------------------------------------------

    @staticmethod
    def _take_gradient(
        itself: Callable[[], GradientReducer | None], state: ParameterState, _parameter: torch.Tensor
    ) -> None:
        """Called when a gradient has been added to ``.grad``: copy it to its buckets, and launch full ones."""
        reducer = itself()
        if reducer is None:
            return
        if (
            not state.accumulating
        ):  # torch makes another node for a parameter that was converted, even to and fro
            raise reducer._converted(state)
        filling = reducer._condition.filling
        if not filling and not reducer._expected:
            state.accumulate_here()
            return
        end = reducer._condition.end  # looked at here, as a call for every gradient costs time
        if not (filling and end is not None and end() is not None):
            reducer._begin()
        if state.phase.pending:
            raise reducer._condition.fail(
                "a parameter received a gradient again after it had been reduced in the same backward",
                state.name, "Use checkpoint(..., use_reentrant=False) for shared parameters.",
            )  # fmt: skip
        gradient = state.parameter.grad
        if (
            gradient is None
            or gradient.layout is not torch.strided
            or gradient.requires_grad
            or torch.is_grad_enabled()
            or gradient.dtype != state.views[0].flat.dtype
            or gradient.device != reducer._device
        ):
            raise reducer._unfit(state, gradient)
        del gradient  # those who hold it are counted
        gradient = state.take(reducer._unshared_holders)
        scale = 1.0 / reducer.divisor
        for view in state.views:
            view.bucket.fill(view, gradient, scale)
        if reducer._usage.used(state) and (full := reducer._readiness.ready(state.name)):
            reducer._launch(full)

    def _launch(self, indices: Sequence[int]) -> None:
        layout, scale = self._layout, 1.0 / self.divisor
        for index in indices:
            for state in layout.states_in[index]:
                if not state.is_as_taken(scale):
                    raise self._condition.fail(
                        "a hook changed a gradient after it had been taken to be reduced", state.name,
                        "Register the hook before wrapping the model, or change gradients after backward().",
                    )  # fmt: skip
                if not state.phase.pending:
                    state.begin_reduction()
            layout.group_at[index].in_flight = True
            for job in self._jobs(index):
                self._submit(job)
        if indices and self._readiness.complete and self._find_unused:
            self._usage.share()

    def _jobs(self, index: int) -> Iterator[Job]:
        """The reduce-scatter of a bucket, and what stands right behind it. Each is to be queued as it comes."""
        bucket, form = self._layout.buckets[index], self._settlement.form
        bucket.reductions += 1
        bucket.reduce = self._transport.reduction(bucket, form.keep(index))
        yield bucket.reduce
        yield from form.behind_reduction(index)

    def _unfit(self, state: ParameterState, gradient: torch.Tensor | None) -> UnsupportedError:
        """Why the gradient cannot be reduced."""
        fail = self._condition.fail
        if gradient is None:
            return fail(
                "another hook removed a gradient before it was reduced", state.name, "Remove that hook."
            )
        if gradient.layout is not torch.strided:
            return fail("sparse gradients are not supported", state.name, "Make the layer's gradient dense.")
        if gradient.requires_grad or torch.is_grad_enabled():
            return fail(
                "gradients of gradients (create_graph) are not supported", state.name, "Use stock DDP."
            )
        return self._converted(state)

    def _converted(self, state: ParameterState) -> UnsupportedError:
        return self._condition.fail(
            "a parameter's dtype or device was changed after wrapping, even if changed back", state.name,
            "Convert the model before wrapping it; evaluate a converted copy of it.",
        )  # fmt: skip

    # The end -----------------------------------------------------------------------------------------

    def _backward_ended(self) -> None:
        self._condition.end = None
        with LOCK:
            if not self._readiness.complete and torch_private.inside_backward():
                return  # nested in another backward, which goes on
            if not self._readiness.complete and self._find_unused:
                self._fill_up()
            if not self._readiness.complete:
                raise self._condition.fail_unfinished()
            self._condition.end_backward()
            self._expected.backward_ended()
            # A gradient that somebody holds a reference to can be read without asking: it must be right now.
            for group in self._layout.groups:
                if any(state.grad_referenced for state in group.states):
                    self._settlement.settle_gradient(group)

    def _fill_up(self) -> None:
        """Let parameters that this rank did not use take part with what they hold, or with zeros."""
        scale = 1.0 / self.divisor
        for state in self._usage.unused():
            gradient = state.take_unused()
            for view in state.views:
                if gradient is None:
                    view.bucket.clear(view)
                else:
                    with torch.no_grad():
                        view.bucket.fill(view, gradient, scale)
            self._launch(self._readiness.ready(state.name))

    def reduce_zeros(self) -> None:
        """Take part in the backward of other ranks without a gradient of one's own; wait for its end."""
        with LOCK:
            self._condition.check_usable()
            self._settlement.settle_all()
            self._usage.restart()
            for bucket in self._layout.buckets:
                bucket.clear()
                for job in self._jobs(bucket.index):
                    self._submit(job)
            if self._find_unused:
                self._usage.share()
            for bucket in self._layout.buckets:
                assert bucket.gather is not None
                self._transport.wait(bucket.gather)
