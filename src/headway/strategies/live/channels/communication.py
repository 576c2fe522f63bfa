"""Channels: threads that run a wrapped model's collectives during training, each on a process group of its own."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from headway import torch_private
from headway.collectives import executor, live
from headway.collectives.algorithms import RING
from headway.collectives.live import Transfer
from headway.errors import CommunicationError, HeadwayError, InternalError, UnsupportedError, one_line
from headway.plugins import PluginFaultError
from headway.scheduling.buckets import channel_of
from headway.strategies.live.channels.observer import THREAD_NAME, Collective, observer
from headway.strategies.live.channels.streams import Streams, wait_on_host
from headway.strategies.live.channels.wiring import OwnGroups

Work = Callable[[int], None]  # is told the channel it runs on
Culprit = Callable[[str], str]
"""Who is to blame for a failed collective; is told what went wrong on this rank itself, where something did."""

Disagreement = Callable[["Job"], str]
"""What proves that some rank will never take part in a job; "" where nothing does. May ask the other ranks."""

PATIENCE_S = 3.0
"""How long a job is waited for before peers are asked whether they will ever take part in it."""
REMEMBERED = 4096
"""So many of the latest jobs can be told to peers that ask; no rank is that far ahead of another."""
NO_CHANNEL = -1
"""What work that is no collective is told that it runs on."""
FAILED_JOB_S = 1.0
"""How long a job is waited for after a failure: connections that this rank has closed do not wake its own threads."""
BLOCKED_S = 20.0
"""How long a process that ends waits for such threads: a peer that fails, too, takes some seconds to close its end."""
FAILED_JOIN_S = 5.0
"""How long the end of a thread is waited for after a failure, which has closed the connections that it waited on."""


_blocked: list[threading.Thread] = []
"""Threads that still waited for a peer when their channels were stopped."""


def await_blocked() -> None:
    """Wait for threads that outlasted their channels, at the end of the process: waking later they would abort it."""
    deadline = time.monotonic() + BLOCKED_S
    for thread in _blocked:
        thread.join(max(0.0, deadline - time.monotonic()))


def _nothing(_channel: int) -> None:
    pass


class DisagreementError(HeadwayError):
    """Ranks have asked for different collectives, so that none of them can ever be done."""


class Job:
    """One collective of one bucket, waiting, running or done. It begins after the jobs ``after``.

    ``then`` is told of its end, and of its failure where it failed, on the thread that ran it. Its messages carry
    ``tag``, the same on all ranks. It is told to the observer as one collective, unless it tells of its own
    (``tells_itself``).
    """

    tag = 0
    steps = 0  # how many steps of optimizers this rank had taken
    tells_itself = False

    def __init__(
        self,
        name: str,
        bucket: int,
        size_bytes: int,
        work: Work = _nothing,
        after: Sequence[Job] = (),
        algorithm: str = RING,
        then: Callable[[HeadwayError | None], None] | None = None,
    ) -> None:
        self.name = name
        self.bucket = bucket
        self.size_bytes = size_bytes
        self.work = work
        self.after = after
        self.algorithm = algorithm
        self.then = then
        self.sequence = -1
        self.enqueue_ns = time.monotonic_ns()
        self.ready: Any = None  # a mark of what the job's operands wait for on the device
        self.event: Any = None  # with streams, a mark behind the job; it is ``done`` when it has been given
        self.done = threading.Event()
        self.error: HeadwayError | None = None

    def check(self) -> None:
        """Raise what the job failed with, if it did: a new error for each caller."""
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error.__cause__

    @property
    def is_over(self) -> bool:
        """Whether it is done, on the device too."""
        return self.done.is_set() and (self.event is None or bool(self.event.query()))

    def bound(self, channel: int) -> Callable[[int], object]:
        """What carries it out on ``channel``, to be called with its tag."""
        return lambda _tag: self.work(channel)

    def around(self) -> AbstractContextManager[None]:
        """What is done before that and behind it, on the same thread."""
        return nullcontext()

    def let_go(self) -> None:
        """Let go of what the job worked on: channels remember their last one."""
        self.work = _nothing
        self.then = None

    @property
    def identity(self) -> list[Any]:
        """What it is, the same on every rank, as JSON can hold it; with how many steps had been taken."""
        return [self.name, self.bucket, self.tag, self.steps]

    def __str__(self) -> str:
        return f"the {self.name} of bucket {self.bucket} ({self.size_bytes} bytes)"


class Channels:
    """Runs jobs in the order of their submission, job ``n`` on channel ``n`` modulo the number of channels.

    That order must be the same on every rank. What needs no peer, such as an update, has a thread of its own
    (``submit_work``), so that no channel stands still for it. After a failed job every later one fails with the same
    CommunicationError or InternalError, without touching the network. ``culprit`` is asked, once, who is to blame.
    Where parameters are on a device, each thread has a stream there for what it copies and updates, and a job is done
    when that is done. ``strategy`` is the name of whose they are, which the observer is told.
    """

    def __init__(
        self,
        groups: OwnGroups,
        culprit: Culprit,
        streams: Streams,
        strategy: str,
        disagreement: Disagreement = lambda _job: "",
    ) -> None:
        executor.compiled()  # on this thread: Python 3.11 cannot parse on two at a time
        self._groups = groups
        self._culprit = culprit
        self._streams = streams
        self._strategy = strategy
        self._rank = dist.get_rank()
        self._queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in groups.host]
        self._active = len(groups.host)
        self._disagreement = disagreement
        self._latest: deque[Job] = deque(maxlen=REMEMBERED)
        self.last: Job | None = None
        self.failure: HeadwayError | None = None
        self._failing = threading.Lock()
        self._process = os.getpid()
        self._works: SimpleQueue[Job | None] | None = None  # once there is any
        self._threads: list[threading.Thread] = []
        for channel, queue in enumerate(self._queues):
            self._start(queue, channel)

    def _start(self, queue: SimpleQueue[Job | None], channel: int) -> None:
        thread = threading.Thread(target=self._serve, args=(queue, channel), name=THREAD_NAME, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def submitted(self) -> int:
        """How many jobs have been submitted."""
        return 0 if self.last is None else self.last.sequence + 1

    def use(self, count: int) -> None:
        """Use the first ``count`` channels from now on; every rank says so at the same point, with nothing queued."""
        self._active = count

    def submit(self, job: Job) -> Job:
        """Queue ``job``; it gets the next sequence number."""
        self.refuse_forked()
        job.sequence = self.submitted
        job.ready = self._streams.mark()
        self.last = job
        self._latest.append(job)
        self._queues[channel_of(job.sequence, self._active)].put(job)
        return job

    def submit_work(self, job: Job) -> Job:
        """Queue ``job``, which is no collective, behind other such work; ranks need not agree on it."""
        self.refuse_forked()
        job.ready = self._streams.mark()
        if self._works is None:
            self._works = SimpleQueue()
            self._start(self._works, NO_CHANNEL)
        self._works.put(job)
        return job

    def wait(self, job: Job) -> None:
        """Return when ``job`` is done. Raises CommunicationError or InternalError where it failed."""
        self.refuse_forked()
        if not job.done.is_set():
            assert threading.current_thread() not in self._threads
            start_ns = time.monotonic_ns()
            while not job.done.wait(PATIENCE_S):
                self._look_for_disagreement()
                if self.failure is not None and not job.done.wait(FAILED_JOB_S):
                    job.error = self.failure  # its thread may wait for a peer as long as the group lets it
                    break
            observer().wait(job.name, job.bucket, start_ns, time.monotonic_ns())
        job.check()

    def finish_queued(self, deadline_s: float) -> None:
        """Return when all that was submitted is done, or at ``deadline_s`` of the monotonic clock."""
        for job in list(self._latest):
            job.done.wait(max(0.0, deadline_s - time.monotonic()))

    def job(self, sequence: int) -> Job | None:
        """The job of that number; None where it has not been submitted, or was long ago."""
        behind = self.submitted - sequence
        return self._latest[-behind] if 0 < behind <= len(self._latest) else None

    def _look_for_disagreement(self) -> None:
        """Let the oldest job that is not done fail where some rank will never take part in it."""
        oldest = next((job for job in list(self._latest) if not job.done.is_set()), None)
        if oldest is not None and self.failure is None and (proof := self._disagreement(oldest)):
            self.fail(oldest, DisagreementError(proof))

    def stop(self) -> None:
        """End the threads after what is queued; wait for that unless called on one of them.

        After a failure nothing is in flight for long, and the wait is bounded. It must not be left out: a thread that
        comes back from a collective while the interpreter ends takes the process down with it.
        """
        for queue in (*self._queues, *filter(None, [self._works])):
            queue.put(None)
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + FAILED_JOIN_S
        for thread in self._threads:
            while thread.is_alive() and self.failure is None:
                thread.join(PATIENCE_S)
                if thread.is_alive():
                    self._look_for_disagreement()
                deadline = time.monotonic() + FAILED_JOIN_S
            thread.join(max(0.0, deadline - time.monotonic()))
        _blocked.extend(thread for thread in self._threads if thread.is_alive())

    def _serve(self, queue: SimpleQueue[Job | None], channel: int) -> None:
        # A job's collective is called from here and from nowhere deeper: this is its way from the queue to the network.
        stream = self._streams.new()
        with self._streams.on(stream), torch.no_grad():
            while (job := queue.get()) is not None:
                for earlier in job.after:
                    earlier.done.wait()
                start_ns = time.monotonic_ns()
                messages: Sequence[Transfer] = ()
                if self.failure is None:
                    try:
                        wait_on_host(job.ready)
                        with _messages() as messages:
                            collective = job.bound(channel)
                            with job.around():
                                collective(job.tag)
                        wait_on_host(stream)
                        self._tell(job, start_ns, messages)
                    except BaseException as error:  # whatever it is: training waits for this thread
                        self.fail(job, error)
                self._end(job)

    def _tell(self, job: Job, start_ns: int, messages: Sequence[Transfer]) -> None:
        if not job.tells_itself:
            observer().collective(
                Collective(
                    job.name, job.bucket, job.size_bytes, job.algorithm,
                    job.enqueue_ns, start_ns, time.monotonic_ns(), job.sequence, self._strategy, messages,
                )
            )  # fmt: skip

    def _end(self, job: Job) -> None:
        job.error = self.failure
        job.done.set()
        try:
            if job.then is not None:
                job.then(job.error)
        except BaseException as error:
            self.fail(job, error)
        job.let_go()

    def fail(self, job: Job, error: BaseException) -> None:
        """Let ``job`` and every later one fail because of ``error``, unless something failed before."""
        with self._failing:
            if self.failure is not None:
                return
            try:
                self.failure = self._failure_of(job, error)
            except BaseException:  # whoever is to blame, all that waits must end
                self.failure = InternalError(f"rank {self._rank}: {job} failed: {type(error).__name__}")
        # So that peers that wait for this rank fail rather than wait.
        for group in (*self._groups.host, *self._groups.second):
            torch_private.abort_group(group)

    def _failure_of(self, job: Job, error: BaseException) -> HeadwayError:
        """What is raised because of ``error``; peers are told whose fault it is."""
        failure: HeadwayError
        if isinstance(error, DisagreementError):
            return CommunicationError(
                f"rank {self._rank}: {job} cannot be done: {error}. Restart the job from its last checkpoint."
            )
        if isinstance(error, PluginFaultError):
            self._culprit(f"a fault of the {error.plugin}")
            failure = InternalError(f"rank {self._rank}: {error}")
        elif _is_communication(error):
            failure = CommunicationError(
                f"rank {self._rank}: {job} failed: {self._culprit('')} ({one_line(str(error), 200)}). "
                "Restart the job from its last checkpoint."
            )
        else:
            error = error.__cause__ or error if isinstance(error, InternalError) else error
            kind = type(error).__name__
            self._culprit(f"an internal error, {kind}")
            failure = InternalError(
                f"rank {self._rank}: {job} failed with an internal error, not a lost connection: "
                f"{kind}: {one_line(str(error), 200)}. Report it, unless the optimizer's settings are to blame."
            )
        failure.__cause__ = error
        return failure

    def refuse_forked(self) -> None:
        """Raise UnsupportedError in a process that was forked from the one that trains."""
        if os.getpid() != self._process:
            raise UnsupportedError(
                "a forked process uses a model whose update is still in flight",
                fix="Call flush() on the wrapped model before forking.",
            )


@contextmanager
def own_work() -> Iterator[None]:
    """What a job does besides communicating, such as updates: what fails in here is no peer's fault."""
    try:
        yield
    except (HeadwayError, torch.AcceleratorError):  # a device tells of earlier failures at any call
        raise
    except Exception as error:
        raise InternalError(str(error)) from error


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, (InternalError, NotImplementedError, RecursionError)):
        return False
    return isinstance(error, (RuntimeError, OSError, HeadwayError))


def _messages() -> AbstractContextManager[Sequence[Transfer]]:
    """Collect the messages of what is run inside the block, where they are wanted."""
    return live.collected() if observer().wants_transfers else nullcontext(())
