"""Observes every c10d collective of this process, whoever calls it.

All operations of ``torch.distributed`` go through the dispatcher, including DDP's calls from C++. An overlaid kernel
sees their group, tensors and order, calls the original kernel, and takes the end time from the work's future. The
operation itself is unchanged: same arithmetic, group and order.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway import torch_private
from headway.collectives.algorithms import ALL_REDUCE
from headway.recording.patching import Now, observed_call
from headway.recording.watch import Watch
from headway.strategies.live.channels.observer import THREAD_NAME


class GroupWatch:
    """Keeps the ranks of every process group that this rank used. ``members`` lists groups that lack some rank."""

    def __init__(self) -> None:
        self.members: dict[str, tuple[int, ...]] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}

    def name_of(self, group: dist.ProcessGroup) -> str:
        """The name of ``group``; its ranks are noted at first use."""
        name = torch_private.group_name(group)
        if name not in self._ranks:
            self._note(name, group)
        return name

    def rank_of(self, group: dist.ProcessGroup, index: int) -> int:
        """The global rank of member ``index`` of ``group``; -1 if unknown."""
        ranks = self._ranks[self.name_of(group)]
        return ranks[index] if 0 <= index < len(ranks) else -1

    def _note(self, name: str, group: dist.ProcessGroup) -> None:
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):  # torch.distributed did not create this group
            ranks = ()
        self._ranks[name] = ranks
        if 0 < len(ranks) < dist.get_world_size():
            self.members[name] = ranks


SETTLE_TIMEOUT_S = 2.0
RELEASE_AFTER_NS = 50_000_000


@dataclass(slots=True)
class ObservedCollective:
    """One collective of this rank. ``end_ns`` is 0 until its work completes; ``integers``: it carries no gradients."""

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
        """Whether it is DDP's exchange of which parameters a backward used (find_unused_parameters)."""
        return self.integers and self.name == ALL_REDUCE and self.phase == "backward"


@dataclass(frozen=True, slots=True)
class _Operation:
    """The positions of a c10d operation's arguments that are read."""

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


_LEFT_IN_PLACE: list[
    torch_private.KernelOverlay
] = []  # overlays that could not be removed; they pass calls on


class CollectiveTap(Watch):
    """Observes the collectives of this process while attached."""

    def __init__(self, now: Now, groups: GroupWatch) -> None:
        self.observed: list[ObservedCollective] = []
        self._now = now
        self._groups = groups
        self._sequences: dict[str, int] = defaultdict(int)
        self._inside: dict[int, int] = {}  # thread id -> number of overlaid kernels it is inside
        self._watching = False
        self._main_thread = threading.get_ident()
        self._overlay: torch_private.KernelOverlay | None = None
        self._works: list[tuple[ObservedCollective, Any]] = []
        self._passed_on: list[tuple[list[int], Any]] = []  # the end time (0 while running) and the work

    def attach(self) -> None:
        """Overlay the c10d operations with observing kernels."""
        assert self._overlay is None
        self._watching = True
        self._overlay = torch_private.KernelOverlay("c10d", "CPU")
        for operation_name, operation in OPERATIONS.items():
            self._overlay.put(operation_name, self._observer(operation))

    def detach(self) -> None:
        """Remove the observing kernels."""
        self._watching = False
        overlay, self._overlay = self._overlay, None
        if overlay is None:
            return
        if any(
            [*self._inside.values()]
        ):  # a signal interrupted a kernel, which must not be removed while it runs
            _LEFT_IN_PLACE.append(overlay)
        else:
            overlay.remove()
        self._settle()

    def step_ends(self, step: int, now_ns: int, *, recorded: bool) -> None:
        """Drop references to finished works."""
        self.release_finished()

    def forget(self) -> None:
        """Drop everything observed."""
        self.observed.clear()

    def release_finished(self) -> None:
        """Drop references to finished works, on the main thread.

        A work holds tensors that Python has seen, and a Python callback. If Gloo's thread dropped the last reference,
        it would need the GIL while holding its queue's lock, and the main thread may hold the GIL while waiting for
        that lock. Works that ended only a moment ago may still be in use by that thread, and are kept.
        """
        before_ns = time.monotonic_ns() - RELEASE_AFTER_NS
        self._works = [(seen, work) for seen, work in self._works if not 0 < seen.end_ns < before_ns]

    def _pass_on(self, result: Any) -> Any:
        """Return ``result`` of a kernel that is left in place but no longer observed, and keep its work for a while.

        The call still came through Python, so Gloo's thread must not drop the last reference (see
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
        """Wait until the callbacks of finished works have run.

        Destroying a process group joins its threads while holding the GIL, and would deadlock with a thread that is
        about to enter one of these callbacks.
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
                    return result  # it cannot be timed; the job must not notice
                torch_private.wait_for_work(work)  # the caller would do this next
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
