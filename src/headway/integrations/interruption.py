"""SIGINT and SIGTERM in a rank: what must be saved is saved first, then happens what would have happened.

Python calls handlers in the main thread between two of its own instructions. That thread may be inside a collective
which never ends because other ranks are gone, or hold locks of torch's: DDP's reducer calls kernels that observe
collectives while it holds its own. So a thread of our own saves, and the main one waits for it, within a limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

NUMBERS = (signal.SIGINT, signal.SIGTERM)
MAIN_THREAD_WITHIN_S = 1.0
INTERRUPTED_PATIENCE_S = 4.0  # with other ranks, which are told to end too
STOPPED_WITHIN_S = 5.0  # what a signal has stopped first
SAVED_WITHIN_S = 8.0  # or never; launchers kill after some 30 s


def call_first(recorder: Savable) -> None:
    """Finish ``recorder`` on SIGINT or SIGTERM, before the handlers that stand now, until it is written.

    Does nothing outside of the main thread, and for signals that are ignored or handled outside of Python.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    interruption = _Interruption(recorder)
    interruption.attach()
    recorder.when_written(interruption.detach)


@contextlib.contextmanager
def postponed(instead: Callable[[], None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call ``instead``, and what they would have called when the block has ended.

    A signal that comes later than ``STOPPED_WITHIN_S`` after the first is not postponed. Signals that are not handled
    in Python are left alone: they end the process at once. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: dict[int, float] = {}  # the signals, and when each came first

    def handle(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        came.setdefault(number, now_s)
        instead()
        if now_s > min(came.values()) + STOPPED_WITHIN_S:
            before[number](number, frame)

    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for number in NUMBERS:
        if callable(found := signal.getsignal(number)):
            before[number] = found
            signal.signal(number, handle)
    try:
        yield
    finally:
        for each, own in before.items():
            if signal.getsignal(each) is handle:
                signal.signal(each, own)
        for each in came:
            signal.raise_signal(each)


class Savable(Protocol):
    """What has something to write before its process ends."""

    writer: threading.Thread | None
    """The thread that writes it, while one does."""

    def finish(self, patience_s: float) -> None:
        """Write it, once; waits up to ``patience_s`` for others."""

    def hurry(self, patience_s: float) -> None:
        """Where it is being written, wait no longer than that for others."""

    def leave_main_thread(self) -> None:
        """End what only the main thread, which calls it, can end."""

    def after_backward(self, call: Callable[[], object]) -> bool:
        """Have ``call`` called where the main thread's backward ends; False where it is in none."""

    def when_written(self, told: Callable[[], object]) -> None:
        """Have ``told`` called afterwards."""


class _Interruption:
    def __init__(self, recorder: Savable) -> None:
        self._recorder: Savable | None = recorder
        self._heeding = 0  # the signal that the main thread saves for
        self._postponed: list[int] = []
        self._saving = threading.Lock()  # taken for good by who begins
        self._over = threading.Event()
        self._before: dict[int, Any] = {}
        self._reader, self._writer = os.pipe()

    def attach(self) -> None:
        for number in NUMBERS:
            before = signal.getsignal(number)
            if callable(before) or before is signal.SIG_DFL:
                self._before[number] = before
                signal.signal(number, self._handle)
        os.set_blocking(self._writer, False)
        listened = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if listened != -1:  # somebody's event loop listens; it wakes the main thread itself
            signal.set_wakeup_fd(listened)
        # Else a child's signals would be taken for this rank's.
        os.register_at_fork(after_in_child=self._leave_to_before)
        threading.Thread(target=self._listen, name="headway-signals", daemon=True).start()

    def detach(self) -> None:
        """Leave signals to whom they were before, and hand on those that came while the recording was written."""
        self._over.set()
        self._recorder = None
        if threading.current_thread() is threading.main_thread() and not self._heeding:
            self._leave_to_before()
        for number in () if self._heeding else self._postponed:
            os.kill(os.getpid(), number)
        with contextlib.suppress(OSError):
            os.write(self._writer, bytes(1))

    def _leave_to_before(self) -> None:
        with contextlib.suppress(ValueError):  # in a thread
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)
            listened = signal.set_wakeup_fd(-1)
            if listened not in (-1, self._writer):
                signal.set_wakeup_fd(listened)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        recorder = self._recorder
        if recorder is not None:
            if self._heeding or recorder.writer is threading.main_thread():
                self._postponed.append(number)
                recorder.hurry(INTERRUPTED_PATIENCE_S)
                return
            self._heeding = number
            with _children_may_die():
                recorder.leave_main_thread()
                self._save(recorder)
                self._over.wait(SAVED_WITHIN_S)
            self._leave_to_before()
            self._heeding = 0
            for later in {*self._postponed} - {number}:
                os.kill(os.getpid(), later)
        before = self._before[number]
        if not callable(before):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif recorder is None or not recorder.after_backward(lambda: before(number, frame)):
            before(number, frame)

    def _save(self, recorder: Savable) -> None:
        """Have a thread of its own write the recording, once."""
        recorder.hurry(INTERRUPTED_PATIENCE_S)
        if self._saving.acquire(blocking=False):

            def save() -> None:
                try:
                    recorder.finish(INTERRUPTED_PATIENCE_S)
                finally:
                    self._over.set()

            threading.Thread(target=save, name="headway-saving", daemon=True).start()

    def _listen(self) -> None:
        while not self._over.is_set():
            (number,) = os.read(self._reader, 1)
            if number not in self._before or self._over.wait(MAIN_THREAD_WITHIN_S):
                continue
            recorder = self._recorder
            if recorder is not None and recorder.writer is not threading.main_thread():
                self._save(recorder)
            self._over.wait(SAVED_WITHIN_S)
            if self._before[number] is signal.SIG_DFL:
                # The signal would have ended the process at once, whatever its main thread waits for.
                os._exit(128 + number)


@contextlib.contextmanager
def _children_may_die() -> Iterator[None]:
    """The signal often goes to a data loader's workers too, and torch raises in this thread when one is gone."""
    before = signal.getsignal(signal.SIGCHLD)
    if before is None:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
