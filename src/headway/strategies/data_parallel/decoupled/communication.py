"""The communication thread: runs one wrapped model's collectives, one after the other, beside training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch
import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, UnsupportedError
from headway.strategies.data_parallel.decoupled.observer import observer


class Job:
    """One collective of one bucket, waiting, running or done."""

    def __init__(self, name: str, bucket: int, size_bytes: int, run: Callable[[], None]) -> None:
        self.name = name
        self.bucket = bucket
        self.size_bytes = size_bytes
        self.run = run
        self.sequence = -1
        self.enqueue_ns = time.monotonic_ns()
        self.done = threading.Event()
        self.error: CommunicationError | None = None


class CommunicationThread:
    """Runs jobs in the order of their submission, which must be the same on every rank of ``group``.

    After a failed job every later one fails with the same CommunicationError, without touching the network.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._submitted = 0
        self._failure: CommunicationError | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="headway-communication", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue ``job``; it gets the next sequence number."""
        self._refuse_forked()
        job.sequence = self._submitted
        self._submitted += 1
        self._jobs.put(job)

    def wait(self, job: Job) -> None:
        """Return when ``job`` is done. Raises CommunicationError where it failed."""
        self._refuse_forked()
        if not job.done.is_set():
            assert threading.current_thread() is not self._thread
            start_ns = time.monotonic_ns()
            job.done.wait()
            observer().wait(job.name, job.bucket, start_ns, time.monotonic_ns())
        if job.error is not None:
            raise CommunicationError(str(job.error)) from job.error.__cause__

    def stop(self) -> None:
        """End the thread after what is queued; wait for that unless called on the thread itself."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread and self._failure is None:
            self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            start_ns = time.monotonic_ns()
            if self._failure is None:
                try:
                    with torch.no_grad():
                        job.run()
                except Exception as error:
                    self._fail(job, error)
            job.error = self._failure
            if job.error is None:
                observer().collective(
                    job.name, job.bucket, job.size_bytes, job.enqueue_ns, start_ns, time.monotonic_ns(), job.sequence
                )  # fmt: skip
            job.done.set()

    def _fail(self, job: Job, error: Exception) -> None:
        reason = " ".join(str(error).split())[:200]
        self._failure = CommunicationError(
            f"rank {self._rank}: the {job.name} of bucket {job.bucket} ({job.size_bytes} bytes) failed: {reason}. "
            "A peer ended or fell silent: its own output says why. Restart the job from its last checkpoint."
        )
        self._failure.__cause__ = error
        torch_private.abort_group(self._group)

    def _refuse_forked(self) -> None:
        if os.getpid() != self._process:
            raise UnsupportedError(
                "a forked process uses a decoupled model whose update is still under way",
                fix="Call flush() on the wrapped model before forking.",
            )
