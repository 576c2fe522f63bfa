"""The engine of one wrapped model: gradients into buckets, buckets onto the network, updates when due.

Every synchronised backward queues, on every rank, the reduce-scatters of all buckets in plan order and then the
all-gathers of all buckets in gather order, each exactly once, whatever the script does afterwards. A step, a read or a
further backward only ever waits for what is queued. So a read on one rank alone can neither mix up collectives nor
wait for something that other ranks have yet to decide.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from headway import torch_private
from headway.collectives import live
from headway.collectives.program import ring_all_gather, ring_reduce_scatter
from headway.errors import HeadwayError, HeadwayWarning, UnsupportedError
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.data_parallel.decoupled import deferred
from headway.strategies.data_parallel.decoupled.bucket import UNHELD, LiveBucket, Slot, gradient_holders
from headway.strategies.data_parallel.decoupled.communication import CommunicationThread, Job
from headway.strategies.data_parallel.decoupled.observer import ALL_GATHER, REDUCE_SCATTER, observer


class Engine:
    """Keeps the promise that whoever looks at a parameter or its gradient sees what stock DDP would show."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        schedule: BucketSchedule,
        group: dist.ProcessGroup,
    ) -> None:
        self.group = group
        self.synchronise = True  # whether the next backward reduces; no_sync() turns it off
        self.closed = False
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._gather_order = schedule.gather_order
        self._failure: HeadwayError | None = None
        self._lock = threading.RLock()
        self._buckets = self._make_buckets(dict(parameters), schedule)
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._scratch = {
            dtype: torch.empty(
                max(
                    live.scratch_numel(b.buffer.numel(), self._world_size)
                    for b in self._buckets
                    if b.buffer.dtype == dtype
                ),
                dtype=dtype,
            )
            for dtype in {bucket.buffer.dtype for bucket in self._buckets}
        }
        self._warned = False
        self._running = False  # a synchronised backward is filling buckets
        self._callback_queued = False
        self._next_bucket = 0
        self._communication = CommunicationThread(group)
        self._handles = [handle for slot in self._slots for handle in _hook(self, slot)]

    # What happens to a gradient -------------------------------------------------------------------

    def before_accumulation(self) -> None:
        """Called with every gradient before it is added to ``.grad``: the first of a backward settles all.

        So a gradient is accumulated onto the average of the earlier ones, as under DDP.
        """
        if not self._running:
            self.settle_all()

    def take_gradient(self, slot: Slot) -> None:
        """Called when a gradient has been added to ``.grad``: copy it to its bucket, and launch full buckets."""
        if not self.synchronise:
            return
        self.check_usable(inside_backward=True)
        if not self._running:
            self._running, self._next_bucket = True, 0
        if not self._callback_queued:
            self._callback_queued = True
            torch_private.queue_backward_callback(self._backward_ended)
        if slot.pending:
            raise self._fail(
                "a parameter received a gradient again after it had been reduced in the same backward",
                slot.name, "Use checkpoint(..., use_reentrant=False) for shared parameters.",
            )  # fmt: skip
        self._check_gradient(slot, slot.parameter.grad)
        slot.held = gradient_holders(slot.parameter) != UNHELD
        gradient = slot.parameter.grad
        assert gradient is not None
        with torch.no_grad():
            torch.mul(gradient, 1.0 / self._world_size, out=slot.view)
        slot.local = gradient
        if not slot.ready:
            slot.ready = True
            slot.bucket.ready += 1
        self._launch_full_buckets()

    def _check_gradient(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            raise self._fail(
                "another hook removed a gradient before it was reduced", slot.name, "Remove that hook."
            )
        if gradient.layout is not torch.strided:
            raise self._fail(
                "sparse gradients are not supported", slot.name, "Make the layer's gradient dense."
            )
        if gradient.requires_grad or torch.is_grad_enabled():
            raise self._fail(
                "gradients of gradients (create_graph) are not supported", slot.name, "Use stock DDP."
            )
        if gradient.dtype != slot.view.dtype or gradient.device != slot.view.device:
            raise self._fail("a parameter changed its dtype or device after it was wrapped", slot.name,
                             "Convert the model before wrapping it.")  # fmt: skip

    def _launch_full_buckets(self) -> None:
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if bucket.ready < len(bucket.slots):
                return
            for slot in bucket.slots:
                if slot.grad is not slot.local:
                    raise self._fail("a hook replaced a gradient while backward was reducing it", slot.name,
                                     "Change gradients after backward().")  # fmt: skip
            for slot in bucket.slots:
                slot.begin()
            bucket.ready = 0
            bucket.in_flight = True
            self._next_bucket += 1
            self._submit(REDUCE_SCATTER, bucket)
        for index in self._gather_order:
            self._buckets[index].gather = self._submit(ALL_GATHER, self._buckets[index])

    def _backward_ended(self) -> None:
        self._callback_queued = False
        if self._next_bucket == len(self._buckets):
            self._running = False
            # A gradient that somebody holds a reference to can be read without asking: it must be right now.
            for bucket in self._buckets:
                if any(slot.held for slot in bucket.slots):
                    self.settle(bucket)
        elif not torch_private.inside_backward():
            raise self._fail_unfinished()

    def refuse_inside_backward(self, slot: Slot, what: str) -> None:
        """Raise UnsupportedError where backward is still running: not every bucket is on its way yet."""
        if self._running:
            self.check_usable()
            raise UnsupportedError(
                f"the gradient of {slot.name} was {what} during backward, while it is being reduced",
                fix="Look at gradients after backward() has returned.",
            )

    # What happens to a bucket ----------------------------------------------------------------------

    def settle(self, bucket: LiveBucket) -> None:
        """Finish what is under way for ``bucket``: averages into ``.grad``, due updates into parameters."""
        with self._lock:
            if not bucket.in_flight:
                return
            self.check_usable()
            assert bucket.gather is not None
            try:
                self._communication.wait(bucket.gather)
            except HeadwayError as error:
                self._failure = error
                raise
            self._finish(bucket)

    def settle_all(self) -> None:
        """Finish everything under way, in gather order."""
        for index in self._gather_order:
            self.settle(self._buckets[index])

    def settle_stepped(self) -> None:
        """Apply every due update, in gather order, and leave mere gradients under way."""
        for index in self._gather_order:
            if any(slot.stepped for slot in self._buckets[index].slots):
                self.settle(self._buckets[index])

    def _finish(self, bucket: LiveBucket) -> None:
        start_ns = time.monotonic_ns()
        updates, bucket.updates = bucket.updates, []
        bucket.in_flight, bucket.gather = False, None
        replaced: list[tuple[Slot, torch.Tensor | None]] = []
        with torch_private.without_user_modes():
            for slot in bucket.slots:
                gradient = slot.grad
                if slot.cleared:
                    replaced.append((slot, gradient))
                    slot.grad = slot.view
                elif slot.pending:
                    assert gradient is not None
                    gradient.copy_(slot.view)
                slot.leave()
            try:
                for update in updates:
                    update()
            except BaseException as error:  # an interrupted update cannot be told from a finished one
                self._failure = UnsupportedError(
                    f"the update of bucket {bucket.index} did not finish", got=type(error).__name__,
                    fix="Restart the job from its last checkpoint.",
                )  # fmt: skip
                raise
            for slot, gradient in replaced:
                slot.parameter.grad = gradient
        if updates:
            observer().update(bucket.index, start_ns, time.monotonic_ns())

    def _submit(self, name: str, bucket: LiveBucket) -> Job:
        ring = ring_reduce_scatter if name == REDUCE_SCATTER else ring_all_gather
        buffer = bucket.buffer
        work = partial(
            live.run, ring(self._rank, self._world_size), buffer, self.group, self._scratch[buffer.dtype]
        )
        job = Job(name, bucket.index, bucket.size_bytes, work)
        self._communication.submit(job)
        return job

    # What happens to the whole ---------------------------------------------------------------------

    def check_usable(self, *, inside_backward: bool = False) -> None:
        """Raise what went wrong before, or UnsupportedError where a backward never finished."""
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise UnsupportedError(
                "the process group of a decoupled model has been destroyed", fix="Wrap the model again."
            )
        if self._running and not inside_backward and not torch_private.inside_backward():
            raise self._fail_unfinished()

    def warn_of_aliases(self, name: str) -> None:
        """Say, once, that overlap is lost for a bucket because somebody could look past the parameter."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"another tensor shares the memory of {name} (a state_dict(), view or array that was kept, or a "
                "loss whose backward did not run), so its bucket is updated inside step() and gains nothing. "
                "Keep a copy (clone), or delete it before step().",
                HeadwayWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Finish what is under way, stop the thread and leave ordinary parameters behind."""
        if self.closed:
            return
        try:
            if self._failure is None and not self._running:
                self.settle_all()
        finally:
            self.closed = True
            self._communication.stop()
            for handle in self._handles:
                handle.remove()
            if self._failure is None:
                for slot in self._slots:
                    slot.leave()
                    deferred.unregister(slot.parameter)

    def own_handle(self, handle: RemovableHandle) -> None:
        """Remove ``handle``'s hook when the engine closes."""
        self._handles.append(handle)

    @property
    def failed(self) -> bool:
        """Whether something went wrong for good."""
        return self._failure is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._running and not any(bucket.in_flight for bucket in self._buckets)

    @property
    def running(self) -> bool:
        """Whether a backward is filling buckets, or was interrupted while it did."""
        return self._running

    def _make_buckets(
        self, parameters: dict[str, nn.Parameter], schedule: BucketSchedule
    ) -> list[LiveBucket]:
        buckets = []
        for planned in schedule.buckets:
            bucket = LiveBucket(planned, sum(part.numel for part in planned.parts))
            start = 0
            for name in planned.parameters:
                parameter = parameters[name]
                view = bucket.buffer[start : start + parameter.numel()].view(parameter.shape)
                start += parameter.numel()
                slot = Slot(self, name, parameter, view)
                slot.bucket = bucket
                deferred.register(parameter, slot)
                bucket.slots.append(slot)
            buckets.append(bucket)
        return buckets

    def _fail(self, what: str, parameter: str, fix: str) -> UnsupportedError:
        error = UnsupportedError(what, got=parameter, fix=fix)
        self._failure = error
        return error

    def _fail_unfinished(self) -> UnsupportedError:
        missing = [s.name for b in self._buckets[self._next_bucket :] for s in b.slots if not s.ready]
        return self._fail(
            "backward ended without a gradient for some parameters, or was interrupted",
            f"{len(missing)} without: {', '.join(missing[:3])}",
            "Use every trainable parameter in every backward, freeze the others before wrapping, or use stock DDP "
            "with find_unused_parameters=True.",
        )


def _hook(engine: Engine, slot: Slot) -> Sequence[RemovableHandle]:
    engine_of: Callable[[], Engine | None] = weakref.ref(engine)

    def before(_gradient: torch.Tensor) -> None:
        if (alive := engine_of()) is not None:
            alive.before_accumulation()

    def after(_parameter: torch.Tensor, slot: Slot = slot) -> None:
        if (alive := engine_of()) is not None:
            alive.take_gradient(slot)

    return slot.parameter.register_hook(before), slot.parameter.register_post_accumulate_grad_hook(after)
