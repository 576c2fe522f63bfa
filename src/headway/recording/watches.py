"""Small watches: waits for input, pauses, the optimizer's updates, jobs of other shapes, and compiled modules."""

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
from headway.recording.patching import guarded, patch_method
from headway.trace.events import WORK, Event, Kind, Stream

LEAST_LOOP_NS = 200_000  # of a loop's beginning and end, which without workers take next to no time

PutInput = Callable[[int, int], None]


class InputWatch:
    """Tells ``put`` (start, end) of each wait, while attached and ``is_recording``."""

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


LEAST_NS = 200_000  # shorter ones are not worth a row
COLLECTION, CHECKPOINT = "garbage collection", "torch.save"

PutPause = Callable[[str, str, int, int], None]


class PauseWatch:
    """Tells ``put`` (kind, name, start, end) of waits and pauses of the thread that made it, while attached."""

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

_CLOSURE = 1  # its position among the arguments of ``step``, behind the optimizer's


class UpdateWatch:
    """Tells ``put`` (name, start, end) of every stretch of updating in the main thread's calls of ``step``.

    ``begins`` is called as the first of a call begins. With a closure that is when it has returned: what comes before
    prepares. L-BFGS calls its closure several times and updates between the calls.
    """

    def __init__(self, put: PutUpdate, begins: Callable[[], None]) -> None:
        self._put = put
        self._begins = begins
        self._start_ns = 0  # of the stretch in progress; 0 where there is none

    def step_begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The optimizer ``name`` steps with these arguments; returns others that take their place, or None."""
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
    "The model is sharded with fully_shard (FSDP2): all-gathers of parameters and reduce-scatters of gradients are its "
    "communication. Its modules are not seen, and no plan is made for it."
)


def several_models(ignored: Sequence[str]) -> str:
    """What to say of models that were wrapped besides the one that is recorded."""
    return (
        f"{1 + len(ignored)} models were wrapped: modules and gradients are those of the one with the most bytes. Only "
        f"communication and updates of {', '.join(ignored)} are recorded, and no plan is made for the job."
    )


def sharded_root() -> nn.Module | None:
    """The largest module that ``fully_shard`` was called on in this process, if there is one."""
    kind = torch_private.sharded_by_fully_shard()
    if kind is None:
        return None
    sharded = [instance for instance in gc.get_objects() if issubclass(type(instance), kind)]
    return max(sharded, key=lambda module: sum(1 for _ in module.modules()), default=None)


MODULES_UNSEEN = (
    "The model is compiled: modules inside are not seen, and all their parameters are taken to be needed when forward "
    "begins."
)
FORWARD_UNSEEN = (
    "Forward runs inside compiled code and is not seen: it counts as rest. To see it, compile the model before it is "
    "wrapped: DistributedDataParallel(torch.compile(model))."
)


# What compiled code hides: hooks on modules inside would break it up, so that none are laid there.
#
# A module's forward is then not seen, but that its parameters were needed is known: at the latest when the pass began.


def assumed_forwards(rows: Iterable[Event], owners: Sequence[str]) -> list[Event]:
    """Forwards of no length of the modules ``owners``: where each recorded pass begins, or a step that shows none."""
    steps = {row.step: row.start_ns for row in rows if row.kind == Kind.STEP}
    passes = [(row.step, row.start_ns) for row in rows if row.kind == Kind.FORWARD_PASS]
    seen = {step for step, _ in passes}
    begins = passes + [(step, start_ns) for step, start_ns in steps.items() if step not in seen]
    return [
        Event(Kind.FORWARD, name, Stream.COMPUTE, step, start_ns, 0)
        for step, start_ns in begins
        for name in owners
    ]
