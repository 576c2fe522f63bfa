"""Small watches (waits for input, pauses, optimizer updates) and notes on models that are recorded only in part."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from headway import torch_private
from headway.recording.modules import ModuleWatch
from headway.recording.patching import guarded, patch_method
from headway.recording.watch import Watch
from headway.trace.events import WORK, Event, Kind, Stream

LEAST_LOOP_NS = 200_000  # shorter starts and ends of a data loader's loop are not recorded

PutInput = Callable[[int, int], None]


class InputWatch(Watch):
    """Calls ``put`` (start, end) for each wait for a data loader, while attached and ``is_recording``."""

    def __init__(self, put: PutInput, is_recording: Callable[[], bool]) -> None:
        self._put, self._is_recording = put, is_recording
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Begin to watch."""
        assert not self._undo
        self._time(torch_private.data_loader_iterator(), "__next__")
        self._time(DataLoader, "__iter__")

    def detach(self) -> None:
        """Leave no trace."""
        while self._undo:
            self._undo.pop()()

    def _time(self, owner: type, name: str) -> None:
        def timed(original: Callable[[Any], Any], waiting: Any) -> Any:
            if not self._is_recording():
                return original(waiting)
            start_ns = time.monotonic_ns()
            is_batch = False
            try:
                result = original(waiting)
                is_batch = not isinstance(waiting, DataLoader)
            finally:
                end_ns = time.monotonic_ns()
                if is_batch or end_ns - start_ns >= LEAST_LOOP_NS:
                    self._put(start_ns, end_ns)
            return result

        self._undo.append(patch_method(owner, name, timed))


LEAST_NS = 200_000  # shorter waits and pauses are not recorded
COLLECTION, CHECKPOINT = "garbage collection", "torch.save"

PutPause = Callable[[str, str, int, int], None]


class PauseWatch(Watch):
    """Calls ``put`` (kind, name, start, end) for waits and pauses of the thread that created it, while attached."""

    def __init__(self, put: PutPause) -> None:
        self._put = put
        self._thread = threading.get_ident()
        self._collection_ns = 0
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Begin to watch."""
        assert not self._undo
        collecting = guarded(self._collecting)
        gc.callbacks.append(collecting)
        self._undo.append(lambda: gc.callbacks.remove(collecting))
        self._time(dist.Work, "wait", Kind.WAIT, WORK)
        self._time(torch, "save", Kind.PAUSE, CHECKPOINT)

    def detach(self) -> None:
        """Leave no trace."""
        while self._undo:
            self._undo.pop()()

    def _time(self, owner: Any, name: str, kind: str, what: str) -> None:
        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            start_ns = time.monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._ended(kind, what, start_ns)

        self._undo.append(patch_method(owner, name, timed))

    def _collecting(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_ns = time.monotonic_ns()
        elif self._collection_ns:
            self._ended(Kind.PAUSE, COLLECTION, self._collection_ns)
            self._collection_ns = 0

    def _ended(self, kind: str, name: str, start_ns: int) -> None:
        end_ns = time.monotonic_ns()
        if end_ns - start_ns >= LEAST_NS and threading.get_ident() == self._thread:
            self._put(kind, name, start_ns, end_ns)


PutUpdate = Callable[[str, int, int], None]

_CLOSURE = 1  # the closure's position among the arguments of ``step``, after the optimizer


class UpdateWatch:
    """Calls ``put`` (name, start, end) for every span of updating inside a call of ``optimizer.step``.

    ``begins`` is called when a span begins. With a closure, updating begins when the closure has returned. L-BFGS calls
    its closure several times and updates between the calls.
    """

    def __init__(self, put: PutUpdate, begins: Callable[[], None]) -> None:
        self._put = put
        self._begins = begins
        self._start_ns = 0  # start of the span in progress; 0 if there is none

    def step_begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The optimizer ``name`` is about to step; returns replacement arguments for ``step``, or None."""
        self._start_ns = 0
        if len(args) > _CLOSURE and callable(args[_CLOSURE]):
            closure = self._observed(name, args[_CLOSURE])
            return (*args[:_CLOSURE], closure, *args[_CLOSURE + 1 :]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._observed(name, kwargs["closure"])}
        self._begin()
        return None

    def step_ends(self, name: str, now_ns: int) -> None:
        """The call of ``step`` ends."""
        if self._start_ns:
            self._put(name, self._start_ns, now_ns)
            self._start_ns = 0

    def _begin(self) -> None:
        self._start_ns = time.monotonic_ns()
        self._begins()

    def _observed(self, name: str, closure: Callable[[], Any]) -> Callable[[], Any]:
        begins, ends = guarded(self._begin), guarded(self.step_ends)

        @functools.wraps(closure)
        def observed(*args: Any, **kwargs: Any) -> Any:
            ends(name, time.monotonic_ns())
            result = closure(*args, **kwargs)
            begins()
            return result

        return observed


SHARDED = (
    "The model is sharded with fully_shard (FSDP2). Its communication, all-gathers of parameters and reduce-scatters of "
    "gradients, is recorded; its modules are not, and Headway makes no plan for it."
)


def several_models(ignored: Sequence[str]) -> str:
    """The note for jobs that wrap models in addition to the recorded one."""
    return (
        f"{1 + len(ignored)} models were wrapped. Modules and gradients are recorded for the largest only, and "
        f"communication and updates for {', '.join(ignored)}. Headway makes no plan for such a job."
    )


def sharded_root() -> nn.Module | None:
    """The largest module in this process that ``fully_shard`` was applied to, if any."""
    kind = torch_private.sharded_by_fully_shard()
    if kind is None:
        return None
    sharded = [instance for instance in gc.get_objects() if issubclass(type(instance), kind)]
    return max(sharded, key=lambda module: sum(1 for _ in module.modules()), default=None)


MODULES_UNSEEN = (
    "The model is compiled, so its modules are not recorded. Their parameters are assumed to be needed when forward "
    "begins."
)
FORWARD_UNSEEN = (
    "Forward runs inside compiled code and is not recorded; its time counts as rest. To record it, compile the model "
    "before wrapping it: DistributedDataParallel(torch.compile(model))."
)


class CompiledModules(Watch):
    """Stands in for forwards of compiled modules, which ``modules`` cannot see, and notes what is not recorded."""

    def __init__(self, modules: ModuleWatch) -> None:
        self._modules = modules

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Add the forwards that are assumed."""
        return rows + assumed_forwards(rows, self._modules.unseen)

    def notes(self, rows: Sequence[Event]) -> list[str]:
        """Say that compiled modules, and perhaps the whole forward, are not recorded."""
        if not self._modules.unseen:
            return []
        return [MODULES_UNSEEN, *([FORWARD_UNSEEN] if self.hides_forward(rows) else [])]

    def hides_forward(self, rows: Iterable[Event]) -> bool:
        """Whether the whole forward runs inside compiled code."""
        return bool(self._modules.unseen) and not any(row.kind == Kind.FORWARD_PASS for row in rows)


def assumed_forwards(rows: Iterable[Event], owners: Sequence[str]) -> list[Event]:
    """Zero-length forwards of the compiled modules ``owners``, at the start of each recorded pass.

    Hooks inside compiled code would break its graph, so these forwards are not seen. Their parameters are needed at the
    latest when the pass begins, or the step if it shows no pass.
    """
    steps = {row.step: row.start_ns for row in rows if row.kind == Kind.STEP}
    passes = [(row.step, row.start_ns) for row in rows if row.kind == Kind.FORWARD_PASS]
    seen = {step for step, _ in passes}
    begins = passes + [(step, start_ns) for step, start_ns in steps.items() if step not in seen]
    return [
        Event(Kind.FORWARD, name, Stream.COMPUTE, step, start_ns, 0)
        for step, start_ns in begins
        for name in owners
    ]
