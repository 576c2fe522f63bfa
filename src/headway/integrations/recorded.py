"""Runs a rank under ``headway record``: where its file goes, signals that end it early, and measuring afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headway import torch_private
from headway.errors import UserError, one_line
from headway.integrations import reports
from headway.network import interference
from headway.recording.attach import record_this_rank
from headway.recording.place import Place, agree_on_place, receive, send
from headway.recording.recorder import PATIENCE_WHEN_FAILED_S, Recorder, RecordOptions
from headway.trace.folder import CLUSTER

NUMBERS = (signal.SIGINT, signal.SIGTERM)
MAIN_THREAD_WITHIN_S = 1.0
INTERRUPTED_PATIENCE_S = 4.0  # with other ranks, which are told to end too
STOPPED_WITHIN_S = 5.0  # what a signal has stopped first
SAVED_WITHIN_S = 8.0  # or never; launchers kill after some 30 s


# On SIGINT and SIGTERM a rank saves its recording first, then lets the signal take its usual course.
#
# Python calls handlers in the main thread. That thread may be in a collective that never ends because other ranks are
# gone, or hold locks of torch: DDP's reducer holds its own while it calls kernels that observe collectives. So a
# separate thread saves, and the main thread waits for it for a limited time.


def call_first(recorder: Savable) -> None:
    """Finish ``recorder`` on SIGINT or SIGTERM before the present handlers run, until the recording is written.

    Does nothing outside the main thread, and for signals that are ignored or handled outside Python.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    interruption = _Interruption(recorder)
    interruption.attach()
    recorder.when_written(interruption.detach)


@contextlib.contextmanager
def postponed(instead: Callable[[], None]) -> Iterator[None]:
    """Call ``instead`` on SIGINT and SIGTERM, and the original handlers when the block has ended.

    A signal more than ``STOPPED_WITHIN_S`` after the first is not postponed. Signals that are not handled in Python
    are left alone: they end the process at once. Does nothing outside the main thread.
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
        if callable(handler := signal.getsignal(number)):
            before[number] = handler
            signal.signal(number, handle)
    try:
        yield
    finally:
        for signal_number, original in before.items():
            if signal.getsignal(signal_number) is handle:
                signal.signal(signal_number, original)
        for signal_number in came:
            signal.raise_signal(signal_number)


class Savable(Protocol):
    """A recorder that must write its file before the process ends."""

    writer: threading.Thread | None
    """The thread that is writing the file, if any."""

    def finish(self, patience_s: float) -> None:
        """Write the file, once; waits up to ``patience_s`` for other ranks."""

    def hurry(self, patience_s: float) -> None:
        """If the file is being written, wait at most ``patience_s`` more for other ranks."""

    def leave_main_thread(self) -> None:
        """End the parts that only the main thread can end; called from it."""

    def after_backward(self, call: Callable[[], object]) -> bool:
        """Call ``call`` when the main thread's backward ends; returns False if there is no backward."""

    def when_written(self, call: Callable[[], object]) -> None:
        """Call ``call`` after the file is written."""


class _Interruption:
    def __init__(self, recorder: Savable) -> None:
        self._recorder: Savable | None = recorder
        self._heeding = 0  # the signal that the main thread saves for
        self._postponed: list[int] = []
        self._saving = threading.Lock()  # acquired once, and never released
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
        if listened != -1:  # an event loop has set it, and wakes the main thread itself
            signal.set_wakeup_fd(listened)
        # Otherwise a child's signals would count as this rank's.
        os.register_at_fork(after_in_child=self._leave_to_before)
        threading.Thread(target=self._listen, name="headway-signals", daemon=True).start()

    def detach(self) -> None:
        """Restore the original handlers, and resend signals that arrived while the recording was written."""
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
        """Write the recording in a separate thread, once."""
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
                # By default the signal ends the process at once, whatever the main thread waits for.
                os._exit(128 + number)


@contextlib.contextmanager
def _children_may_die() -> Iterator[None]:
    """Ignore the death of data loader workers, which often get the signal too: torch would raise in this thread."""
    before = signal.getsignal(signal.SIGCHLD)
    if before is None:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


KEY = "headway/measuring"
MEASURING_PATIENCE_S = 20.0  # with the other ranks' last recorded step
GO, NOT = "go", "not"


# After the recorded steps, ranks measure for a few seconds what plans would cost on these links and cores.
#
# A recording of stock DDP does not show what the decoupled runtime would cost on the same cores, or how long messages of
# other sizes take. So all ranks pause between two steps, measure, and continue. Jobs whose process group does not allow
# this are not measured.


def measure(token: str, folder: Path, *, wanted: bool) -> None:
    """Measure the cluster and save it in rank 0's ``folder``. Either all ranks call it after the same step, or none.

    ``wanted`` says whether this rank takes part; unless all ranks do within a time limit, none does. ``token`` names
    the recording. Failures are printed in one line, and training continues. A signal that would end this rank stops
    measuring on all ranks.
    """
    with postponed(interference.ask), interference.heeded():
        _measure_costs(token, folder, wanted=wanted)


def _measure_costs(token: str, folder: Path, *, wanted: bool) -> None:
    rank = dist.get_rank()
    try:
        if not _all_come(f"{KEY}/{token}", wanted=wanted and _permitted()):
            return
        if rank == 0:
            print(
                "headway: the steps are recorded; now measuring links and cores for predictions, which takes 10 s to a "
                "minute (skip it with --no-measuring)",
                file=sys.stderr,
                flush=True,
            )
        from headway.measuring.probe import probe_cluster
        from headway.network.collective_costs import SHORT

        with _undisturbed():
            cluster = probe_cluster(effort=SHORT)
        if rank == 0:
            cluster.model_copy(update={"source": "measured after the recording"}).save(folder / CLUSTER)
    except interference.HaltedError:
        return
    except Exception as failure:  # training must not fail because measuring did
        print(f"headway: rank {rank}: links and cores could not be measured: {failure}", file=sys.stderr)


def _permitted() -> bool:
    """Whether the job's default group allows collectives of CPU tensors."""
    return (
        dist.get_world_size() > 1
        and dist.get_backend() == "gloo"
        and torch.get_default_device().type == "cpu"
        and not torch_private.uses_file_store()
    )


def _all_come(key: str, *, wanted: bool) -> bool:
    """Whether every rank agrees and arrives in time. All ranks get the same answer: the first decision."""
    store = torch_private.default_store()
    decision = f"{key}/decision"
    if not wanted:
        store.compare_set(decision, "", NOT)
    elif store.add(f"{key}/come", 1) == dist.get_world_size():
        store.compare_set(decision, "", GO)
    else:
        deadline = time.monotonic() + MEASURING_PATIENCE_S
        while not store.check([decision]) and time.monotonic() < deadline:
            time.sleep(0.01)
        store.compare_set(decision, "", NOT)
    store.wait([decision], timedelta(seconds=MEASURING_PATIENCE_S))
    return bool(store.get(decision).decode() == GO)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Isolate measuring from the script: its random numbers and torch modes stay as they are and have no effect."""
    dtype = torch.get_default_dtype()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)


PATIENCE_S = 60.0  # for one chunk of a file


def begin(options_json: str) -> None:
    """Record this rank, whose default process group is initialised, with ``RecordOptions`` as JSON.

    If recording cannot start, one line says so and the job goes on.
    """
    try:
        _begin(RecordOptions.model_validate_json(options_json))
    except UserError:
        raise
    except Exception as failure:
        rank, why = dist.get_rank(), one_line(f"{type(failure).__name__}: {failure}")
        print(f"headway: rank {rank} cannot be recorded: {why}; the job goes on", file=sys.stderr, flush=True)


def _begin(options: RecordOptions) -> None:
    place = agree_on_place(options.folder, options.output)
    reports.update(records=True)
    recorder = record_this_rank(options.model_copy(update={"folder": place.folder}))
    recorder.when_written(functools.partial(_bring_together, recorder, place, dist.get_rank()))
    recorder.when_written(functools.partial(reports.update, done=True))
    call_first(recorder)
    # Last, when the script's own signal handlers are restored.
    recorder.when_written(functools.partial(_measure, recorder, place))


def _measure(recorder: Recorder, place: Place) -> None:
    if recorder.options.measure and recorder.saw_every_step and dist.is_initialized():
        wanted = recorder.may_be_measured and recorder.options.detail != "kernels"
        measure(place.recording.token, place.folder, wanted=wanted)


def _bring_together(recorder: Recorder, place: Place, rank: int) -> None:
    """Send this rank's file to rank 0 if they share no folder; on rank 0, receive such files."""
    if not dist.is_initialized() or torch_private.uses_file_store():
        return
    patience_s = PATIENCE_S if recorder.in_order else PATIENCE_WHEN_FAILED_S
    token = place.recording.token
    try:
        if rank == 0:
            receive(token, place.folder, patience_s)
        elif not place.shared:
            send(token, rank, place.folder, patience_s)
    except Exception as failure:  # training must not fail because its recording did
        print(f"headway: rank {rank}'s recording could not be sent to rank 0: {failure}", file=sys.stderr)
