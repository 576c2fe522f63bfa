"""Condition: what every part of an engine must know of the whole before it does anything, and who may change it when.

Scripts have threads of their own that read parameters, gradients and states while another one trains: actors,
evaluators, monitors. Whatever changes what is in flight is done under ``LOCK``, by one thread at a time, and between
two of its holders everything is as between two statements of the script. A read on another thread may wait for
collectives that the training thread has queued, or ask peers, and never queues one: so it disturbs no order that ranks
must agree on. It needs no other rank's script either, so that no two ranks can wait for each other because of it.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from headway import torch_private
from headway.errors import HeadwayError, HeadwayWarning, UnsupportedError

LOOK_AGAIN_S = 0.05
"""How soon a thread that waits for a backward notices that it was interrupted."""

LOCK = threading.RLock()
"""Held while what is in flight for any decoupled model of this process is being changed."""

_backward_ended = threading.Condition(LOCK)

# A fork while another thread holds it would leave it held for ever.
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


class Condition:
    """Whether one engine can go on, and what the next backward has to do first.

    ``unfilled`` names the parameters without a gradient in the backward that is filling buckets. A wait of another
    thread for a backward is limited to ``limit_s``.
    """

    def __init__(self, limit_s: float = 1800.0) -> None:
        self.limit_s = limit_s
        self.trainer: int | None = None  # the thread of the latest forward that is to be reduced
        self.in_first_gradient = False  # the first gradient of a reduced backward is being added to ``.grad``
        self.end: weakref.ref[Callable[[], None]] | None = None
        self.failure: HeadwayError | None = None
        self.closed = False
        self.filling = False  # a synchronised backward is filling buckets, or was interrupted while it did
        self.work_deferred = False  # since a backward began: the next one must complete it first
        self.gradients_kept = False  # a reduced gradient may be in flight
        self.unfilled: Callable[[], Sequence[str]] = tuple
        self._warned: set[str] = set()

    def defer_work(self) -> None:
        """Deferred work now exists; the next backward must complete it first."""
        self.work_deferred = self.gradients_kept = True

    def check_usable(self, *, inside_backward: bool = False) -> None:
        """Raise what went wrong before, or UnsupportedError where a backward never finished."""
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise UnsupportedError(
                "the process group of a decoupled model has been destroyed", fix="Wrap the model again."
            )
        if not self.filling or inside_backward or torch_private.inside_backward():
            return
        if threading.get_ident() == self.trainer:  # no other thread can tell whether it was interrupted
            raise self.fail_unfinished()

    def begin_forward(self) -> None:
        """A forward that may be reduced begins on this thread, which trains from here on.

        Raises UnsupportedError where another thread is in a backward meanwhile.
        """
        if self.is_elsewhere and self.is_in_backward:
            raise UnsupportedError(
                "two threads train one decoupled model: a forward that records gradients began during a backward",
                got=f"a forward on the thread {threading.current_thread().name!r}",
                fix="Evaluate under torch.no_grad() on other threads, or call the bare .module.",
            )
        self.trainer = threading.get_ident()

    # A backward that is reduced ------------------------------------------------------------------------

    def call_at_end(self, ended: Callable[[], None]) -> None:
        """Call ``ended``, which clears ``end``, when the backward that is running, or the innermost, is done.

        Once, however often this is said.
        """
        if self.end is None or self.end() is None:
            # Held by the backward alone, so that it is gone where that was interrupted.
            end = partial(ended)
            self.end = weakref.ref(end)
            torch_private.queue_backward_callback(end)

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward with an end to come is running, on whatever thread: not one that was interrupted."""
        return self.end is not None and self.end() is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread than this one is in a backward that is reduced."""
        if threading.get_ident() == self.trainer or torch_private.inside_backward():
            return False
        return self.filling or (self.in_first_gradient and self.is_in_backward)

    def await_backward(self, what: str) -> None:
        """Return when no other thread is in a backward that is reduced; called under ``LOCK``, which it lends.

        Raises UnsupportedError, which says that ``what`` was read, where that takes longer than the limit.
        """
        deadline = time.monotonic() + self.limit_s
        while self.is_elsewhere and self.failure is None and not self.closed:
            if time.monotonic() > deadline:
                raise UnsupportedError(
                    f"{what} was read on the thread {threading.current_thread().name!r}, and the backward of the "
                    f"thread that trains did not end within {self.limit_s:g} s",
                    fix="Read gradients on the thread that trains.",
                )
            _backward_ended.wait(LOOK_AGAIN_S)

    def end_backward(self) -> None:
        """No backward is being reduced any more; called under ``LOCK``."""
        self.filling = self.in_first_gradient = False
        _backward_ended.notify_all()

    # What goes wrong -----------------------------------------------------------------------------------

    def fail(self, what: str, got: str, fix: str) -> UnsupportedError:
        """Note for good that training cannot go on; returns the error to raise."""
        error = UnsupportedError(what, got=got, fix=fix)
        self.failure = error
        return error

    def fail_unfinished(self) -> UnsupportedError:
        """Note for good that a backward left buckets unfilled; returns the error to raise."""
        missing = self.unfilled()
        return self.fail(
            "backward ended without a gradient for some parameters, or was interrupted",
            f"{len(missing)} without: {', '.join(missing[:3])}",
            "Use every trainable parameter in every backward, freeze the others, or pass "
            "find_unused_parameters=True.",
        )

    def warn_of_aliases(self, name: str) -> None:
        """Warn once that overlap is lost for a bucket because somebody could look past the parameter."""
        self._warn_once(
            "aliases",
            f"another tensor shares the memory of {name} (a state_dict(), view or array that was kept, a "
            "loss whose backward did not run, or another thread that reads it), so its bucket is updated "
            "inside step() and gains nothing. Keep a copy (clone), or delete it before step().",
        )

    def warn_of_drift(self, kind: str, what: str) -> None:
        """Warn once of each ``kind`` that ranks would drift apart here under stock DDP, so that numbers differ."""
        self._warn_once(
            kind,
            f"{what}: this plan averages these gradients over all ranks. Stock DDP does not, and its ranks drift "
            "apart without a message. Losses will therefore differ from those under stock DDP.",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, HeadwayWarning, stacklevel=3)
