"""Collectives as they pass: every c10d operation of this process, whoever calls it.

The operations of ``torch.distributed`` go through the dispatcher, DDP's from C++ too. A kernel laid over theirs
sees group, tensors and order, calls the original and takes the end from the work's future. Nothing about the
operation changes: neither arithmetic nor group nor order.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headway import torch_private
from headway.collectives.algorithms import ALL_REDUCE
from headway.recording.groups import GroupWatch
from headway.recording.layer import observed_call
from headway.recording.now import Now
from headway.strategies.live.channels.observer import THREAD_NAME

SETTLE_TIMEOUT_S = 2.0
RELEASE_AFTER_NS = 50_000_000


@dataclass(slots=True)
class ObservedCollective:
    """One collective of this rank; ``end_ns`` is 0 until its work completes. ``integers`` are no gradients."""

    name: str
    group: str
    sequence: int
    size_bytes: int
    step: int
    enqueue_ns: int
    asynchronous: bool
    phase: str
    end_ns: int = 0
    integers: bool = False

    @property
    def is_of_uses(self) -> bool:
        """Whether DDP tells by it which parameters a backward used (find_unused_parameters)."""
        return self.integers and self.name == ALL_REDUCE and self.phase == "backward"


@dataclass(frozen=True, slots=True)
class _Operation:
    """Where a c10d operation keeps what is needed: positions among its arguments."""

    name: str
    payload: int  # the tensor (or list) whose size is the whole tensor's
    group: int
    asynchronous: int


OPERATIONS = {
    "allreduce_": _Operation("all_reduce", 0, 1, 4),
    "broadcast_": _Operation("broadcast", 0, 1, 4),
    "allgather_": _Operation("all_gather", 0, 2, 3),
    "_allgather_base_": _Operation("all_gather", 0, 2, 3),
    "reduce_scatter_": _Operation("reduce_scatter", 1, 2, 4),
    "_reduce_scatter_base_": _Operation("reduce_scatter", 1, 2, 4),
    "alltoall_base_": _Operation("all_to_all", 0, 2, 5),
    "reduce_": _Operation("reduce", 0, 1, 5),
    "barrier": _Operation("barrier", 0, 1, 3),
}


_LEFT_IN_PLACE: list[torch_private.KernelOverlay] = []  # which pass calls on


class CollectiveTap:
    """Observes the collectives of this process while attached."""

    def __init__(self, now: Now, groups: GroupWatch) -> None:
        self.observed: list[ObservedCollective] = []
        self._now = now
        self._groups = groups
        self._sequences: dict[str, int] = defaultdict(int)
        self._inside: dict[int, int] = {}  # how many kernels each thread is inside of
        self._watching = False
        self._main_thread = threading.get_ident()
        self._overlay: torch_private.KernelOverlay | None = None
        self._works: list[tuple[ObservedCollective, Any]] = []
        self._passed_on: list[tuple[list[int], Any]] = []  # when each ended, or 0

    def attach(self) -> None:
        """Lay the observing kernels over the c10d operations."""
        assert self._overlay is None
        self._watching = True
        self._overlay = torch_private.KernelOverlay("c10d", "CPU")
        for operation_name, operation in OPERATIONS.items():
            self._overlay.put(operation_name, self._observer(operation))

    def detach(self) -> None:
        """Take the observing kernels off again."""
        self._watching = False
        overlay, self._overlay = self._overlay, None
        if overlay is None:
            return
        if any([*self._inside.values()]):  # where a signal interrupts one: it must not go while it runs
            _LEFT_IN_PLACE.append(overlay)
        else:
            overlay.remove()
        self._settle()

    def release_finished(self) -> None:
        """Let go of finished works, on the main thread.

        A work holds tensors that Python has seen, and a Python callback. If Gloo's thread dropped the last reference,
        it would enter the interpreter while it holds its queue's lock, for which the main thread may be waiting
        inside the interpreter. Works that ended a moment ago may still be in that thread's hands.
        """
        before_ns = time.monotonic_ns() - RELEASE_AFTER_NS
        self._works = [(seen, work) for seen, work in self._works if not 0 < seen.end_ns < before_ns]

    def _pass_on(self, result: Any) -> Any:
        """What a kernel returned that is only left in place: its work is held on to as those that are observed.

        The call came through Python all the same, and Gloo's thread must not drop the last reference (see
        ``release_finished``).
        """
        now_ns = time.monotonic_ns()
        self._passed_on = [
            (ended, work) for ended, work in self._passed_on if not 0 < ended[0] < now_ns - RELEASE_AFTER_NS
        ]
        work = result[1] if isinstance(result, tuple) else result
        ended = [0]
        try:
            torch_private.when_work_completes(work, lambda: ended.__setitem__(0, time.monotonic_ns()))
        except RuntimeError:  # this backend's work has no future
            return result
        self._passed_on.append((ended, work))
        return result

    def _settle(self) -> None:
        """Let callbacks of finished works run.

        A process group that is destroyed joins its threads without letting go of the interpreter, and would wait
        for ever for a thread that is about to enter one of these callbacks.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline and any(seen.end_ns == 0 for seen in self.observed[-64:]):
            time.sleep(0.002)
        time.sleep(RELEASE_AFTER_NS / 1e9)
        self._works.clear()

    def _observer(self, operation: _Operation) -> Callable[..., Any]:
        def overlaid(original: Callable[..., Any], *args: Any) -> Any:
            if not self._watching:
                return self._pass_on(original(*args))
            thread = threading.get_ident()
            self._inside[thread] = self._inside.get(thread, 0) + 1
            try:
                return observed_call(original, observe, *args)
            finally:
                self._inside[thread] -= 1

        def observe(original: Callable[..., Any], *args: Any) -> Any:
            if threading.current_thread().name == THREAD_NAME:
                return original(*args)  # a strategy's runtime reports its own
            group = self._groups.name_of(torch_private.process_group(args[operation.group]))
            sequence = self._sequences[group]
            self._sequences[group] = sequence + 1
            step, phase = self._now.step, self._now.phase
            if threading.get_ident() != self._main_thread:
                phase = "thread"
            asynchronous = len(args) <= operation.asynchronous or bool(args[operation.asynchronous])
            size_bytes = 0 if operation.name == "barrier" else _size_bytes(args[operation.payload])
            seen = ObservedCollective(
                operation.name, group, sequence, size_bytes, step, time.monotonic_ns(), asynchronous, phase,
                integers=_of_integers(args[operation.payload]),
            )  # fmt: skip
            result = original(*args)
            work = result[1] if isinstance(result, tuple) else result
            try:
                torch_private.when_work_completes(work, lambda: setattr(seen, "end_ns", time.monotonic_ns()))
            except RuntimeError:  # this backend's work has no future
                if asynchronous:
                    return result  # and cannot be timed; the job must not notice
                torch_private.wait_for_work(work)  # as who asked does next
                seen.end_ns = time.monotonic_ns()
            self.observed.append(seen)
            self._works.append((seen, work))
            return result

        return overlaid


def _size_bytes(payload: Any) -> int:
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(_size_bytes(part) for part in payload)


def _of_integers(payload: Any) -> bool:
    while isinstance(payload, (list, tuple)) and payload:
        payload = payload[0]
    return isinstance(payload, torch.Tensor) and not (payload.is_floating_point() or payload.is_complex())
