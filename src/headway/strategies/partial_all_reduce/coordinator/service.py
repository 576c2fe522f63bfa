"""The coordinator's event loop: turns messages, leases and timers into ledger events and sends the answers."""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.strategies.partial_all_reduce.coordinator import ledger as events
from headway.strategies.partial_all_reduce.coordinator import messages
from headway.strategies.partial_all_reduce.coordinator.journal import Journal
from headway.strategies.partial_all_reduce.coordinator.ledger import Answer, Decision, Ledger
from headway.strategies.partial_all_reduce.coordinator.messages import AnyToWorker, GroupStart, Member
from headway.strategies.partial_all_reduce.coordinator.observer import Observer
from headway.strategies.partial_all_reduce.generators.generator import Worker

LEAST_S = 5.0
FIRST_S = 60.0
"""Shortest limit for a member that has never asked."""
FACTOR = 10.0
"""A member is absent after this multiple of its usual time, and groups proceed without it."""
REMEMBERED = 5
"""The usual time is the median of this many recent times, so a single long one, such as an evaluation, counts little."""


# A member may be absent: it evaluates, saves, or waits in a collective of the script. Groups can be drawn before their
# members arrive, so without this rule a group could wait for a member that itself waits for the group in a barrier.


@dataclass(slots=True)
class _Pace:
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    free_since: float | None = None  # computing since then
    returned: bool = False  # present before: even its first iteration takes no longer than usual
    is_reported: bool = False  # as absent

    def limit_s(self, longest_s: float) -> float:
        """Time after which it counts as absent; ``longest_s`` is the longest recent time of any member."""
        if self.times_s:
            return max(LEAST_S, FACTOR * statistics.median(self.times_s))
        return LEAST_S if self.returned else max(FIRST_S, FACTOR * longest_s)


class Absences:
    """Detects members that others should no longer wait for. Times are seconds of one clock.

    A member without a measured iteration gets more time, since its first one may be slow. While no member has one,
    nobody is absent.
    """

    def __init__(self) -> None:
        self._paces: dict[Worker, _Pace] = {}

    def joined(self, worker: Worker, now: float) -> None:
        """A member has joined for the first time and computes."""
        self._paces[worker] = _Pace(free_since=now)

    def returned(self, worker: Worker, now: float) -> None:
        """A member has rejoined, or is known from an earlier coordinator; it may be waiting for others."""
        pace = self._paces.setdefault(worker, _Pace())
        pace.free_since, pace.returned, pace.is_reported = now, True, False

    def note_ask(self, worker: Worker, now: float) -> None:
        """A member has finished an iteration."""
        pace = self._paces.setdefault(worker, _Pace())
        if pace.free_since is not None:
            pace.times_s.append(now - pace.free_since)
        pace.free_since, pace.is_reported = None, False

    def freed(self, worker: Worker, now: float) -> None:
        """A member computes again: its group has ended, or it continues alone."""
        if (pace := self._paces.get(worker)) is not None:
            pace.free_since, pace.is_reported = now, False

    def gone(self, worker: Worker) -> None:
        """A member has left. Its times are kept in case it returns."""
        if (pace := self._paces.get(worker)) is not None:
            pace.free_since = None

    def absent(self, now: float) -> Sequence[Worker]:
        """Return members that became absent since the last call."""
        longest_s = max(
            (max(pace.times_s) for pace in self._paces.values() if pace.times_s), default=math.inf
        )
        absent = [
            worker
            for worker, pace in sorted(self._paces.items())
            if pace.free_since is not None
            and not pace.is_reported
            and now - pace.free_since > pace.limit_s(longest_s)
        ]
        for worker in absent:
            self._paces[worker].is_reported = True
        return absent


LOOKS_A_LEASE = 8
"""Checks for expired leases per lease."""
PAUSE = 0.5
"""Share of a lease: a coordinator that did not check for this long was itself stopped and may have missed messages."""


class Leases:
    """Leases of workers, in seconds of one clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._ends: dict[Worker, float] = {}
        self._looked: float | None = None

    @property
    def look_s(self) -> float:
        """Time between checks."""
        return self.lease_s / LOOKS_A_LEASE

    def renew(self, worker: Worker, now: float) -> None:
        """Renew the lease of a worker that sent a message."""
        self._ends[worker] = now + self.lease_s

    def drop(self, worker: Worker) -> None:
        """Drop the lease of a worker that left."""
        self._ends.pop(worker, None)

    def ended(self, now: float) -> Sequence[Worker]:
        """Return workers with expired leases; after a pause of the coordinator itself, all get a new lease."""
        looked, self._looked = self._looked, now
        if looked is not None and now - looked > self.lease_s * PAUSE:
            self._ends = {worker: max(end, now + self.lease_s) for worker, end in self._ends.items()}
        return sorted(worker for worker, end in self._ends.items() if end <= now)


MAX_UNSENT = 1024


class Refusal(NamedTuple):
    """Why a connection is closed: a gRPC status name and a message."""

    status: str
    words: str


class RefusedError(Exception):
    """A connection is refused or ended."""

    def __init__(self, status: str, words: str) -> None:
        super().__init__(words)
        self.refusal = Refusal(status, words)


class Stream:
    """Queue of messages to one worker. ``worker`` is None until its hello message."""

    def __init__(self) -> None:
        self.worker: int | None = None
        self._unsent: deque[AnyToWorker] = deque()
        self._changed = asyncio.Event()
        self._closed: Refusal | None = None

    def say(self, message: AnyToWorker) -> None:
        """Queue a message. A worker that reads too slowly loses its connection."""
        if len(self._unsent) >= MAX_UNSENT:
            self.close("RESOURCE_EXHAUSTED", "the worker reads too slowly")
            return
        self._unsent.append(message)
        self._changed.set()

    def close(self, status: str, words: str) -> None:
        """Close the stream after all queued messages."""
        self._closed = self._closed or Refusal(status, words)
        self._changed.set()

    async def next(self) -> AnyToWorker:
        """Return the next message. Raises RefusedError once the stream is closed and empty."""
        while not self._unsent:
            if self._closed:
                raise RefusedError(*self._closed)
            self._changed.clear()
            await self._changed.wait()
        return self._unsent.popleft()


class Outbox:
    """Passes messages to streams in order; after ``hold`` they wait until the journal is synced.

    Decisions made during a sync share the next one.
    """

    def __init__(self, sync: Callable[[], None], synced: Callable[[float], None]) -> None:
        self._sync, self._synced = sync, synced
        self._held: list[tuple[Stream, AnyToWorker]] = []
        self._holds = False
        self._wanted = asyncio.Event()
        self.is_syncing = False

    def say(self, stream: Stream, message: AnyToWorker) -> None:
        """Send a message after all earlier ones."""
        if self._holds:
            self._held.append((stream, message))
        else:
            stream.say(message)

    def hold(self) -> None:
        """Hold back messages from now on until the journal is synced to disk."""
        self._holds = True
        self._wanted.set()

    async def run(self) -> None:
        """Sync the journal on demand. Raises OSError if that fails."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            ready, self._held = self._held, []
            self.is_syncing = True
            begun = time.monotonic()
            try:
                await asyncio.to_thread(self._sync)
            finally:
                self.is_syncing = False
            self._synced(time.monotonic() - begun)
            self._pass_on(ready)
            if not self._wanted.is_set():
                ready, self._held = self._held, []
                self._holds = False
                self._pass_on(ready)

    @staticmethod
    def _pass_on(ready: list[tuple[Stream, AnyToWorker]]) -> None:
        for stream, message in ready:
            stream.say(message)


class ServiceFailedError(Exception):
    """The service has failed: the journal cannot be written, or the generator raised."""


class _JobClock:
    """Monotonic clock of the job that continues from the journal's last time."""

    def __init__(self, begins_ns: int) -> None:
        self._offset_ns = begins_ns - time.monotonic_ns()

    def now_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns


@dataclass(slots=True)
class _Times:
    """Start times for metrics."""

    asked_at: dict[Worker, float] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)


class Service:
    """Serves one job on one event loop. ``failed`` is set if it cannot continue.

    ``description`` of the generator is sent to workers.
    """

    def __init__(
        self, ledger: Ledger, journal: Journal | None, lease_s: float, max_workers: int, observer: Observer,
        description: str,
    ) -> None:  # fmt: skip
        self._ledger, self._journal, self._observer = ledger, journal, observer
        self._leases, self._absences = Leases(lease_s), Absences()
        self._max_workers, self._description = max_workers, description
        self._clock = _JobClock(ledger.now_ns)
        self._streams: dict[Worker, Stream] = {}
        self._times = _Times()
        self._outbox = Outbox(self._sync, observer.synced)
        self._tasks: list[asyncio.Task[None]] = []
        self._waking: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        """Start serving; workers in the journal have one lease to reconnect."""
        now = time.monotonic()
        for member in self._ledger.members:
            self._leases.renew(member.worker, now)
            self._absences.returned(member.worker, now)
        self._apply(events.Booted(now_ns=self._clock.now_ns(), boot=secrets.token_hex(4)))
        for member in self._ledger.members:  # waiting workers have lost their connections
            self._withdraw(member.worker)
        for work in (self._outbox.run(), self._look()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def end(self) -> None:
        """Stop; messages held back are dropped, since the journal has them."""
        if self._waking:
            self._waking.cancel()
        for task in self._tasks:
            task.cancel()
        for stream in self._streams.values():
            stream.close("UNAVAILABLE", "the coordinator is shutting down")

    def welcome(self, hello: messages.Hello, stream: Stream) -> None:
        """Accept a worker's hello. Raises RefusedError if it cannot be a member."""
        if hello.protocol != messages.PROTOCOL:
            raise RefusedError(
                "FAILED_PRECONDITION",
                f"worker and coordinator run incompatible versions of Headway: protocol {hello.protocol}, "
                f"expected {messages.PROTOCOL}",
            )
        worker = hello.member.worker
        resumed = self._is_same(hello)
        if resumed:
            if before := self._streams.pop(worker, None):
                before.close("ABORTED", "the worker has opened another connection")
            self._withdraw(worker)
        else:
            self._join(hello)
        self._streams[worker] = stream
        stream.worker = worker
        self._leases.renew(worker, time.monotonic())
        member = self._ledger.member(worker)
        assert member is not None
        running = self._ledger.running_with(member)
        self._outbox.say(
            stream,
            messages.Welcome(
                incarnation=member.incarnation,
                resumed=resumed,
                lease_s=self._leases.lease_s,
                members=[messages.MemberModel.of(peer) for peer in self._ledger.members if peer != member],
                running=messages.Start.of(running) if running else None,
                generator=self._description,
            ),
        )
        self._observer.joined(worker, resumed=resumed)
        self._observer.members(len(self._ledger.members))

    def heard(self, stream: Stream, message: messages.AnyToCoordinator) -> None:
        """Handle a member's message. Raises RefusedError if it is not allowed."""
        begun = time.monotonic()
        worker = stream.worker
        if worker is None or self._streams.get(worker) is not stream:
            return  # superseded or expired: this connection is about to be closed
        self._leases.renew(worker, begun)
        match message:
            case messages.Ask():
                self._times.asked_at.setdefault(worker, begun)
                self._absences.note_ask(worker, begun)
                event = events.Asked(now_ns=self._clock.now_ns(), worker=worker, iteration=message.iteration)
                self._apply(event)
            case messages.Vote():
                self._vote(worker, stream, message)
            case messages.AskOutcome():
                self._answer(stream, message.number, message.key)
            case messages.Beat():
                self._beat(worker, stream, message)
            case messages.Leave():
                self._leave(worker, "left")
            case messages.Hello():
                raise RefusedError("INVALID_ARGUMENT", "unexpected second hello")
        self._observer.heard(message.kind, time.monotonic() - begun)

    def lost(self, stream: Stream) -> None:
        """Handle the end of a connection."""
        worker = stream.worker
        if worker is not None and self._streams.get(worker) is stream:
            del self._streams[worker]
            self._withdraw(worker)

    def _is_same(self, hello: messages.Hello) -> bool:
        """Whether the worker resumes its membership."""
        member = self._ledger.member(hello.member.worker)
        place = (hello.member.address, hello.member.host)
        return (
            member is not None
            and (member.address, member.host) == place
            and self._ledger.session(member.worker) == hello.session
        )

    def _join(self, hello: messages.Hello) -> None:
        worker = hello.member.worker
        if self._ledger.member(worker):
            if hello.member.incarnation and self._ledger.session(worker) != hello.session:
                raise RefusedError(
                    "FAILED_PRECONDITION", f"another process has taken the place of worker {worker}"
                )
            self._leave(worker, "replaced")
        if len(self._ledger.members) >= self._max_workers:
            raise RefusedError(
                "RESOURCE_EXHAUSTED", f"the job already has {self._max_workers} workers, the maximum"
            )
        self._apply(
            events.Joined(
                now_ns=self._clock.now_ns(), worker=worker, session=hello.session,
                address=hello.member.address, host=hello.member.host,
            )
        )  # fmt: skip
        come = self._absences.returned if hello.member.incarnation else self._absences.joined
        come(worker, time.monotonic())

    def _leave(self, worker: Worker, reason: events.Reason) -> None:
        words = {
            "left": "the worker has left",
            "lease": "the worker's lease expired, so it is considered dead",
            "replaced": "another process has taken the worker's place",
        }
        if stream := self._streams.pop(worker, None):
            stream.close("FAILED_PRECONDITION" if reason == "replaced" else "ABORTED", words[reason])
        self._leases.drop(worker)
        self._absences.gone(worker)
        self._times.asked_at.pop(worker, None)
        self._apply(events.Left(now_ns=self._clock.now_ns(), worker=worker, reason=reason))
        self._observer.gone(worker, reason)
        self._observer.members(len(self._ledger.members))

    def _withdraw(self, worker: Worker) -> None:
        self._times.asked_at.pop(worker, None)
        if self._ledger.waits(worker):
            self._apply(events.Withdrew(now_ns=self._clock.now_ns(), worker=worker))
            self._absences.freed(worker, time.monotonic())  # it continues alone, perhaps into a barrier

    def _vote(self, worker: Worker, stream: Stream, vote: messages.Vote) -> None:
        member = self._ledger.member(worker)
        assert member is not None
        if self._ledger.may_vote(member, vote.number, vote.key):
            self._apply(
                events.Voted(
                    now_ns=self._clock.now_ns(), worker=worker,
                    number=vote.number, key=vote.key, reduced=vote.reduced,
                )
            )  # fmt: skip
            return
        self._answer(stream, vote.number, vote.key)

    def _answer(self, stream: Stream, number: int, key: str | None) -> None:
        committed, runs = self._ledger.decision(number, key), self._ledger.runs(number, key)
        self._outbox.say(stream, messages.Decided(number=number, key=key, committed=committed, runs=runs))

    def _beat(self, worker: Worker, stream: Stream, beat: messages.Beat) -> None:
        self._outbox.say(stream, messages.Beaten(number=beat.number))
        if beat.round_trip_s is not None:
            self._observer.round_trip(beat.round_trip_s)
        if beat.metrics:
            self._observer.reported(worker, beat.metrics)

    def _apply(self, event: events.AnyEvent) -> None:
        if self.failed.done():
            raise ServiceFailedError
        try:
            answers = self._ledger.apply(event)
            if self._journal:
                self._journal.append(event, answers)
        except Exception as failure:
            self._fail(failure)
            raise ServiceFailedError from failure
        for answer in answers:
            self._tell(answer)
        self._plan_waking()

    def _tell(self, answer: Answer) -> None:
        now = time.monotonic()
        running = self._ledger.running
        message: messages.AnyToWorker
        if isinstance(answer, GroupStart):
            message = messages.Start.of(answer)
            self._times.started[answer.number] = now
            self._observer.started(len(answer.members), running)
            for member in answer.members:
                self._observer.waited(now - self._times.asked_at.pop(member.worker, now))
            if len(answer.members) == 1:
                del self._times.started[answer.number]
                self._absences.freed(answer.members[0].worker, now)
                self._observer.averaged([answer.members[0].worker])
        else:
            assert isinstance(answer, Decision)
            if self._journal:
                self._outbox.hold()
            message = messages.Decided(number=answer.number, key=answer.key, committed=answer.committed)
            for member in answer.members:
                self._absences.freed(member.worker, now)
            took_s = now - self._times.started.pop(answer.number, now)
            self._observer.decided(answer.committed, took_s, running)
            if answer.committed:
                self._observer.averaged([member.worker for member in answer.members])
        self._say_to(answer.members, message)

    def _say_to(self, members: Sequence[Member], message: messages.AnyToWorker) -> None:
        for member in members:
            if stream := self._streams.get(member.worker):
                self._outbox.say(stream, message)

    def _plan_waking(self) -> None:
        if self._waking:
            self._waking.cancel()
            self._waking = None
        wake_ns = self._ledger.wake_ns
        if wake_ns is not None:
            wait_s = max(0, wake_ns - self._clock.now_ns()) / 1e9
            self._waking = asyncio.get_running_loop().call_later(wait_s, self._wake)

    def _wake(self) -> None:
        self._waking = None
        now_ns, wake_ns = self._clock.now_ns(), self._ledger.wake_ns
        try:
            if wake_ns is not None and wake_ns <= now_ns:
                self._apply(events.Woke(now_ns=now_ns))
            else:
                self._plan_waking()
        except ServiceFailedError:
            pass  # ``failed`` is set

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._leases.look_s)
            for worker in self._leases.ended(time.monotonic()):
                self._leave(worker, "lease")
            for worker in self._absences.absent(time.monotonic()):
                if self._ledger.computes(worker):
                    self._apply(events.Absented(now_ns=self._clock.now_ns(), worker=worker))
            if self._journal and self._journal.is_due and not self._outbox.is_syncing:
                self._journal.compact(self._ledger)

    def _sync(self) -> None:
        assert self._journal is not None
        self._journal.sync()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()):
            self._fail(failure if isinstance(failure, Exception) else RuntimeError(str(failure)))

    def _fail(self, failure: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(failure)
