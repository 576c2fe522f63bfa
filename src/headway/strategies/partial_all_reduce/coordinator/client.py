"""Client of a coordinator in another process, possibly on another host: connection, heartbeats and votes."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import random
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import TYPE_CHECKING, Any, TypeVar

from headway.errors import CommunicationError, UnsupportedError, one_line
from headway.strategies.partial_all_reduce.coordinator import messages, transport
from headway.strategies.partial_all_reduce.coordinator.messages import GroupStart, Member

if TYPE_CHECKING:
    import grpc.aio


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0


# One event loop for all coordinators of a process: with several, grpc.aio logs spurious errors.


def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop for coordinators, which runs on a daemon thread.

    Raises UnsupportedError in a process forked from one that has such a loop: gRPC does not work there.
    """
    global _loop, _owner
    with _lock:
        if _loop is not None and _owner != os.getpid():
            raise UnsupportedError(
                "a coordinator cannot be used in a process forked from one that already uses it",
                fix="Start the process with the spawn method.",
            )
        if _loop is None:
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="headway-coordination", daemon=True).start()
        return _loop


FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
CONNECT_S = 5.0
BEATS_A_LEASE = 4
MAX_UNSENT = 1024
FINAL = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Statuses after which retrying is pointless."""
MOST_REFUSED = 5
"""Connections in a row (about two seconds) that may fail over a wrong secret, since an earlier coordinator may linger."""


class LinkLostError(Exception):
    """A connection has ended."""


class Link:
    """Keeps one worker connected, on one event loop. Callbacks must not block.

    ``welcomed`` is called with each welcome and ``heard`` with each later message. ``lost`` is called with the reason
    whenever a connection ends or fails, and with ``final`` True if it will not be retried.
    """

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        member: Member,
        *,
        welcomed: Callable[[messages.Welcome], None],
        heard: Callable[[messages.AnyToWorker], None],
        lost: Callable[[str, bool], None],
    ) -> None:
        transport.require_grpc()
        self._host, self._port = transport.parse_address(address)
        transport.check_secret(self._host, secret)
        self._credentials = transport.client_credentials(secret)
        self._member = member
        self._session = secrets.token_hex(16)
        self._incarnation = 0
        self._welcomed, self._heard, self._lost = welcomed, heard, lost
        self._unsent: asyncio.Queue[messages.AnyToCoordinator] | None = None
        self._metrics: dict[str, float] | None = None
        self._round_trip_s: float | None = None
        self._beats: tuple[int, float] = (0, 0.0)
        self._heard_at = 0.0
        self._refused = 0  # times in a row
        self._has_left = False

    def say(self, message: messages.AnyToCoordinator) -> None:
        """Send a message if connected."""
        if self._unsent is not None:
            with suppress(asyncio.QueueFull):  # the connection is dead, which its silence will reveal
                self._unsent.put_nowait(message)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Send these metrics with the next heartbeat."""
        self._metrics = {**(self._metrics or {}), **metrics}

    async def run(self) -> None:
        """Stay connected until cancelled, or until reconnecting is pointless."""
        try:
            async with transport.channel(self._host, self._port, self._credentials) as channel:
                await self._stay_connected(channel)
        except Exception as failure:  # a defect: wake callers that wait for an answer
            self._lost(f"{type(failure).__name__}: {failure}", True)
            raise
        finally:
            self._unsent = None

    async def _stay_connected(self, channel: grpc.aio.Channel) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            begun = time.monotonic()
            reason, final = await self._connected(channel)
            final = final or self._has_left  # another hello would make it a member again
            self._unsent = None
            self._lost(reason, final)
            if final:
                return
            if time.monotonic() - begun > MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _connected(self, channel: grpc.aio.Channel) -> tuple[str, bool]:
        """Serve one connection; returns why it ended, and whether that is final."""
        import grpc.aio

        call: Any = channel.stream_stream(f"/{transport.SERVICE}/{transport.METHOD}")()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(CONNECT_S):
                lease_s = await self._greet(call)
            tasks = [
                asyncio.create_task(work)
                for work in (self._read(call), self._write(call), self._beat(lease_s))
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except grpc.aio.AioRpcError as failure:
            self._refused = self._refused + 1 if _shows_another_secret(failure) else 0
            hopeless = not self._incarnation and self._refused >= MOST_REFUSED
            return _reason(failure), hopeless or failure.code().name in FINAL
        except asyncio.InvalidStateError as failure:  # written to after its end
            return str(failure), False
        except TimeoutError:
            return "no answer in time", False
        except (LinkLostError, messages.MalformedError) as failure:
            return str(failure), False
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
        raise AssertionError("unreachable")

    async def _greet(self, call: Any) -> float:
        """Exchange hello and welcome; returns the lease."""
        member = self._member
        model = messages.MemberModel(
            worker=member.worker, incarnation=self._incarnation, address=member.address, host=member.host
        )
        hello = messages.Hello(protocol=messages.PROTOCOL, session=self._session, member=model)
        await call.write(messages.encode(hello))
        welcome = await self._next(call)
        if not isinstance(welcome, messages.Welcome):
            raise LinkLostError("the coordinator did not accept the worker")
        self._incarnation = welcome.incarnation
        self._unsent = asyncio.Queue(MAX_UNSENT)
        self._welcomed(welcome)
        return welcome.lease_s

    async def _next(self, call: Any) -> messages.AnyToWorker:
        import grpc.aio

        data = await call.read()
        if data is grpc.aio.EOF:
            code, details = await call.code(), await call.details()
            raise grpc.aio.AioRpcError(
                code, await call.initial_metadata(), await call.trailing_metadata(), details
            )
        self._heard_at = time.monotonic()
        return messages.for_worker(data)

    async def _read(self, call: Any) -> None:
        while True:
            message = await self._next(call)
            if isinstance(message, messages.Beaten):
                number, sent_at = self._beats
                if message.number == number:
                    self._round_trip_s = self._heard_at - sent_at
            else:
                self._heard(message)

    async def _write(self, call: Any) -> None:
        unsent = self._unsent
        assert unsent is not None
        while True:
            message = await unsent.get()
            await call.write(messages.encode(message))
            if isinstance(message, messages.Leave):
                self._has_left = True
                await call.done_writing()

    async def _beat(self, lease_s: float) -> None:
        """Send heartbeats. Raises LinkLostError if the coordinator is silent for a lease."""
        while True:
            now = time.monotonic()
            if now - self._heard_at > lease_s:
                raise LinkLostError("the coordinator is silent")
            number = self._beats[0] + 1
            self._beats = (number, now)
            metrics, self._metrics = self._metrics, None
            self.say(messages.Beat(number=number, round_trip_s=self._round_trip_s, metrics=metrics))
            await asyncio.sleep(lease_s / BEATS_A_LEASE)


def _shows_another_secret(failure: grpc.aio.AioRpcError) -> bool:
    return "SSL_ERROR_SSL" in (failure.details() or "")


def _reason(failure: grpc.aio.AioRpcError) -> str:
    """Return why a connection ended, without gRPC's internal details."""
    if _shows_another_secret(failure):
        return "the server at this address has a different secret, or none"
    words = failure.details() or failure.code().name
    brief = re.sub(r"^failed to connect .*?ipv[46]:\S+ (Failed to connect to remote host: )?", "", words)
    if "handshake" in words.lower() or "Socket closed" in words:
        return f"{brief}; check that it has the same secret"
    return brief


MAX_REMEMBERED = 1024
"""Number of groups, and of decisions about them, that a worker remembers."""
LEAVE_S = 2.0
NOTICE_S = 5.0
"""A worker warns after this time that it still waits for its coordinator."""
_METRIC_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}", re.ASCII)
_Value = TypeVar("_Value")
_log = logging.getLogger("headway")


@dataclass(slots=True)
class _State:
    """State shared by the event loop and the training thread, under one lock."""

    connected: bool = False
    leaving: bool = False
    ended: str | None = None  # why there will be no further connection
    last_failure: str = "no answer"
    incarnation: int = 0
    generator: str | None = None
    rejoined: int = 0
    peers: tuple[Member, ...] = ()
    is_asking: bool = False
    granted: GroupStart | None = None  # not yet taken
    current: GroupStart | None = None  # taken and undecided
    votes: OrderedDict[int, messages.Vote] = field(default_factory=OrderedDict)
    keys: OrderedDict[int, str] = field(default_factory=OrderedDict)
    decisions: OrderedDict[int, bool] = field(default_factory=OrderedDict)
    unknown: set[int] = field(default_factory=set)  # groups that the coordinator does not know

    @property
    def is_settled(self) -> bool:
        """Whether joining has succeeded or failed."""
        return self.connected or self.ended is not None


class _Running:
    """A link running in the background."""

    def __init__(self, link: Link) -> None:
        self._process = os.getpid()
        self._over = Event()
        self._future = asyncio.run_coroutine_threadsafe(self._run(link), loop())

    async def _run(self, link: Link) -> None:
        try:
            await link.run()
        finally:
            self._over.set()

    def stop(self) -> None:
        """Stop the link, unless this process was forked from its owner."""
        if os.getpid() == self._process:
            self._future.cancel()
            self._over.wait(LEAVE_S)


class CoordinatorClient:
    """Client of the coordinator at HOST:PORT; implements ``Coordinator``.

    Raises UserError if gRPC is missing, or if a non-loopback address is used without a secret.
    """

    def __init__(self, address: str, secret: bytes | None = None) -> None:
        self._address, self._secret = address, secret
        self._condition = Condition()
        self._state = _State()
        self._link: Link | None = None
        self._running: _Running | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether the coordinator answers at present."""
        return self._state.connected

    @property
    def incarnation(self) -> int:
        """This worker's incarnation; 0 before it joins. It grows if the coordinator considered it dead."""
        return self._state.incarnation

    @property
    def generator(self) -> str | None:
        """The coordinator's generator, as ``str`` of a ``GeneratorChoice``; None before this worker joins."""
        return self._state.generator

    @property
    def rejoined(self) -> int:
        """How often this worker was considered dead or forgotten and has rejoined by itself."""
        return self._state.rejoined

    def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Join the job and return the workers already present. The coordinator chooses the incarnation.

        Raises CommunicationError after ``timeout_s``, or if the worker is refused.
        """
        self._stop()
        self._state = state = _State()
        link = Link(
            self._address, self._secret, member,
            welcomed=lambda welcome: self._on_welcome(state, welcome),
            heard=lambda message: self._on_message(state, message),
            lost=lambda reason, final: self._on_lost(state, reason, final),
        )  # fmt: skip
        self._link = link
        self._running = _Running(link)
        atexit.register(self._stop)
        with self._condition:
            self._wait(lambda: state.is_settled, min(NOTICE_S, timeout_s))
            if not state.is_settled and timeout_s > NOTICE_S:
                _log.warning(
                    "worker %d cannot reach its coordinator %s (%s): retrying for %.0f s",
                    member.worker, self._address, one_line(state.last_failure), timeout_s - NOTICE_S,
                )  # fmt: skip
                self._wait(lambda: state.is_settled, timeout_s - NOTICE_S)
            if state.connected:
                return state.peers
            reason = state.ended or state.last_failure
        self._stop()
        raise CommunicationError(
            f"worker {member.worker} cannot join the job at its coordinator {self._address}: {one_line(reason)}"
        )

    def ask(self, iteration: int) -> None:
        """Request a group after an iteration. Returns immediately.

        If this worker was granted a group and has not voted on it, it votes that it lacks the mean.
        """
        with self._condition:
            state = self._state
            if state.current and state.current.number not in state.votes:
                self._say(_vote(state.current, reduced=False))
            state.current = None
            if not state.connected or state.is_asking or state.granted:
                return
            state.is_asking = True
            self._say(messages.Ask(iteration=iteration))

    def granted(self, timeout_s: float) -> GroupStart | None:
        """Wait for the group of the last ``ask``. A group of one member means that the worker continues alone.

        Returns None after ``timeout_s``, when it may be called again, and immediately if the coordinator was lost.
        """
        with self._condition:
            state = self._state
            self._wait(lambda: state.granted is not None or not state.is_asking, timeout_s)
            start, state.granted = state.granted, None
            if start is not None and len(start.members) > 1:
                state.current = start
            return start

    def vote(self, number: int, reduced: bool, timeout_s: float) -> bool:
        """Vote whether this member holds the group's mean; returns True if all members do and therefore apply it.

        If the connection is lost, the vote is repeated on the next one within ``timeout_s``. Returns False after
        ``timeout_s``, when the group may still be undecided: see ``outcome``.
        """
        with self._condition:
            state = self._state
            if number not in state.decisions and state.current and state.current.number == number:
                message = _vote(state.current, reduced=reduced)
                _remember(state.votes, number, message)
                self._say(message)
                self._wait(lambda: number in state.decisions or state.current is None, timeout_s)
            return state.decisions.get(number, False)

    def outcome(self, number: int, timeout_s: float) -> bool | None:
        """Return the decision about a group; None if it is undecided, unknown, or not answered in time."""
        with self._condition:
            state = self._state
            deadline = time.monotonic() + timeout_s
            if number not in state.decisions and timeout_s > 0:
                self._wait(lambda: state.connected or state.ended is not None, timeout_s)
                state.unknown.discard(number)
                self._say(messages.AskOutcome(number=number, key=state.keys.get(number)))
                self._wait(
                    lambda: number in state.decisions or number in state.unknown or not state.connected,
                    deadline - time.monotonic(),
                )
                state.unknown.discard(number)
            return state.decisions.get(number)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Report metrics of this worker with the next heartbeat. Returns immediately.

        Only the first 32 are sent, without those that are not finite or have no plain name.
        """
        plain = {
            name: float(value)
            for name, value in metrics.items()
            if _METRIC_NAME.fullmatch(name) and math.isfinite(value)
        }
        kept = {name: plain[name] for name in sorted(plain)[: messages.MAX_REPORTED]}
        if (link := self._link) is not None:
            loop().call_soon_threadsafe(link.report, kept)

    def leave(self) -> None:
        """Leave the job: groups that have not begun proceed without this worker."""
        with self._condition:
            state = self._state
            if state.connected:
                state.leaving = True
                self._say(messages.Leave())
                self._wait(lambda: not state.connected, LEAVE_S)
        self._stop()

    def _stop(self) -> None:
        """End the connection, if any, without telling the coordinator."""
        running, self._running = self._running, None
        self._link = None
        if running is None:
            return
        atexit.unregister(self._stop)
        running.stop()
        with self._condition:
            self._state.connected = False
            self._state.ended = self._state.ended or "the worker has left"
            self._state.is_asking = False
            self._state.granted = self._state.current = None
            self._condition.notify_all()

    def _say(self, message: messages.AnyToCoordinator) -> None:
        if (link := self._link) is not None:  # another thread may end it
            loop().call_soon_threadsafe(link.say, message)

    def _wait(self, until: Callable[[], bool], timeout_s: float) -> None:
        self._condition.wait_for(until, max(0.0, timeout_s))

    def _on_welcome(self, state: _State, welcome: messages.Welcome) -> None:
        with self._condition:
            before, state.incarnation = state.incarnation, welcome.incarnation
            state.connected, state.generator = True, welcome.generator
            state.peers = tuple(member.value() for member in welcome.members)
            # Where the welcome to a new incarnation was lost, the next one resumes it.
            if before and (not welcome.resumed or welcome.incarnation != before):
                state.rejoined += 1
                state.current = None
                _log.warning(
                    "the coordinator considered this worker dead or lost its state: "
                    "the worker has rejoined as incarnation %d",
                    welcome.incarnation,
                )
            if welcome.running:
                self._on_running(state, welcome.running.value())
            elif state.current:
                self._say(messages.AskOutcome(number=state.current.number, key=state.current.key))
            self._condition.notify_all()

    def _on_running(self, state: _State, running: GroupStart) -> None:
        """Handle a group that is running with this worker after a reconnection."""
        voted = state.votes.get(running.number)
        if voted and voted.key == running.key:
            self._say(voted)
        elif state.current is None or state.current.key != running.key:
            self._say(_vote(running, reduced=False))  # this worker no longer waits for that group

    def _on_message(self, state: _State, message: messages.AnyToWorker) -> None:
        with self._condition:
            if isinstance(message, messages.Start):
                start = message.value()
                if state.keys.get(start.number) != start.key:  # the coordinator has restarted its numbers
                    state.votes.pop(start.number, None)
                    state.decisions.pop(start.number, None)
                _remember(state.keys, start.number, start.key)
                if state.is_asking:
                    state.is_asking, state.granted = False, start
                elif len(start.members) > 1:
                    self._say(_vote(start, reduced=False))
            elif isinstance(message, messages.Decided):
                self._on_decided(state, message)
            self._condition.notify_all()

    def _on_decided(self, state: _State, decided: messages.Decided) -> None:
        number, committed = decided.number, decided.committed
        if decided.key is not None and state.keys.get(number, decided.key) != decided.key:
            return
        if committed is None:
            state.unknown.add(number)
        else:
            _remember(state.decisions, number, committed)
        if state.current and state.current.number == number and not decided.runs:
            state.current = None
        if state.granted and state.granted.number == number:
            state.granted = None

    def _on_lost(self, state: _State, reason: str, final: bool) -> None:
        with self._condition:
            if state.connected and not state.leaving:
                _log.warning("lost the coordinator (%s): this worker trains alone", reason)
            state.connected = False
            state.last_failure = reason
            state.ended = reason if final else state.ended
            state.is_asking = False
            if state.granted and len(state.granted.members) > 1:
                state.granted = None
            if final:
                state.current = None
            self._condition.notify_all()


def _vote(start: GroupStart, *, reduced: bool) -> messages.Vote:
    return messages.Vote(number=start.number, key=start.key, reduced=reduced)


def _remember(values: OrderedDict[int, _Value], number: int, value: _Value) -> None:
    values[number] = value
    while len(values) > MAX_REMEMBERED:
        values.popitem(last=False)
