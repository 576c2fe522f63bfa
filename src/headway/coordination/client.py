"""CoordinatorClient: a worker's side of a coordinator that is another process, perhaps on another host."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import TypeVar

from headway.coordination import background, messages
from headway.coordination.link import Link
from headway.coordination.membership import GroupStart, Member
from headway.errors import CommunicationError, one_line

MAX_REMEMBERED = 1024
"""How many groups, and decisions about them, a worker remembers."""
LEAVE_S = 2.0
NOTICE_S = 5.0
"""After so long a worker says that it still waits for its coordinator."""
_METRIC_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}", re.ASCII)
_Value = TypeVar("_Value")
_log = logging.getLogger("headway")


@dataclass(slots=True)
class _State:
    """What the thread that talks to the coordinator and the one that trains share, under one lock."""

    connected: bool = False
    leaving: bool = False
    ended: str | None = None  # why there will be no connection again
    last_failure: str = "nobody answers"
    incarnation: int = 0
    generator: str | None = None
    rejoined: int = 0
    others: tuple[Member, ...] = ()
    asked: bool = False
    granted: GroupStart | None = None  # and not yet taken
    current: GroupStart | None = None  # taken, and its decision not heard
    votes: OrderedDict[int, messages.Vote] = field(default_factory=OrderedDict)
    keys: OrderedDict[int, str] = field(default_factory=OrderedDict)
    decisions: OrderedDict[int, bool] = field(default_factory=OrderedDict)
    unknown: set[int] = field(default_factory=set)  # numbers of which the coordinator has just said so

    @property
    def is_settled(self) -> bool:
        """Whether it is known if the worker can join."""
        return self.connected or self.ended is not None


class _Running:
    """A link that runs in the background."""

    def __init__(self, link: Link) -> None:
        self._process = os.getpid()
        self._over = Event()
        self._future = asyncio.run_coroutine_threadsafe(self._run(link), background.loop())

    async def _run(self, link: Link) -> None:
        try:
            await link.run()
        finally:
            self._over.set()

    def stop(self) -> None:
        """End it; a process that was forked has none."""
        if os.getpid() == self._process:
            self._future.cancel()
            self._over.wait(LEAVE_S)


class CoordinatorClient:
    """One worker's side of the coordinator at HOST:PORT; implements ``Coordinator``.

    Raises UserError where gRPC is missing, or an address that other hosts reach is used without a secret.
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
        """This worker's incarnation, 0 before it has joined. It grows where the coordinator took it for dead."""
        return self._state.incarnation

    @property
    def generator(self) -> str | None:
        """Who forms the coordinator's groups, as ``str`` of a ``GeneratorChoice``; None before this worker joined."""
        return self._state.generator

    @property
    def rejoined(self) -> int:
        """How often this worker was taken for dead, or forgotten, and has joined again by itself."""
        return self._state.rejoined

    def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Become a worker of the job; returns the others that are there. The coordinator chooses the incarnation.

        Raises CommunicationError after the time, or where the worker cannot be one.
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
                    "worker %d does not reach its coordinator %s (%s): it goes on trying for %.0f s",
                    member.worker, self._address, one_line(state.last_failure), timeout_s - NOTICE_S,
                )  # fmt: skip
                self._wait(lambda: state.is_settled, timeout_s - NOTICE_S)
            if state.connected:
                return state.others
            reason = state.ended or state.last_failure
        self._stop()
        raise CommunicationError(
            f"worker {member.worker} cannot join the job at its coordinator {self._address}: {one_line(reason)}"
        )

    def ask(self, iteration: int) -> None:
        """Say that this worker has finished an iteration and wants to average. Returns immediately.

        A group that this worker was granted and has not voted on counts as not reduced.
        """
        with self._condition:
            state = self._state
            if state.current and state.current.number not in state.votes:
                self._say(_vote(state.current, reduced=False))
            state.current = None
            if not state.connected or state.asked or state.granted:
                return
            state.asked = True
            self._say(messages.Ask(iteration=iteration))

    def granted(self, timeout_s: float) -> GroupStart | None:
        """The group that the last ``ask`` was granted, once it is there: of one member, the worker goes on alone.

        None after the time, when it can be asked for again, and at once where the coordinator was lost.
        """
        with self._condition:
            state = self._state
            self._wait(lambda: state.granted is not None or not state.asked, timeout_s)
            start, state.granted = state.granted, None
            if start is not None and len(start.members) > 1:
                state.current = start
            return start

    def vote(self, number: int, reduced: bool, timeout_s: float) -> bool:
        """Say whether this member holds the group's mean; returns whether all of its members do, and take it.

        Where the connection is lost, the vote is repeated on the next one as long as there is time. False after the
        time, when nothing may have been decided yet: ``outcome`` tells.
        """
        with self._condition:
            state = self._state
            if number not in state.decisions and state.current and state.current.number == number:
                said = _vote(state.current, reduced=reduced)
                _remember(state.votes, number, said)
                self._say(said)
                self._wait(lambda: number in state.decisions or state.current is None, timeout_s)
            return state.decisions.get(number, False)

    def outcome(self, number: int, timeout_s: float) -> bool | None:
        """What was decided about a group; None where nothing was, nobody knows, or nobody answers in time."""
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
        """Numbers about this worker for whoever watches the job, sent with the next beat. Returns immediately.

        Only the first 32 are sent, and none that is not finite or has no plain name.
        """
        plain = {
            name: float(value)
            for name, value in metrics.items()
            if _METRIC_NAME.fullmatch(name) and math.isfinite(value)
        }
        kept = {name: plain[name] for name in sorted(plain)[: messages.MAX_REPORTED]}
        if (link := self._link) is not None:
            background.loop().call_soon_threadsafe(link.report, kept)

    def leave(self) -> None:
        """End the membership: groups that have not begun go on without this worker."""
        with self._condition:
            state = self._state
            if state.connected:
                state.leaving = True
                self._say(messages.Leave())
                self._wait(lambda: not state.connected, LEAVE_S)
        self._stop()

    def _stop(self) -> None:
        """End the connection, if there is one; the coordinator is told nothing."""
        running, self._running = self._running, None
        self._link = None
        if running is None:
            return
        atexit.unregister(self._stop)
        running.stop()
        with self._condition:
            self._state.connected = False
            self._state.ended = self._state.ended or "the worker has left"
            self._state.asked = False
            self._state.granted = self._state.current = None
            self._condition.notify_all()

    def _say(self, message: messages.AnyToCoordinator) -> None:
        if (link := self._link) is not None:  # another thread may end it
            background.loop().call_soon_threadsafe(link.say, message)

    def _wait(self, until: Callable[[], bool], timeout_s: float) -> None:
        self._condition.wait_for(until, max(0.0, timeout_s))

    def _on_welcome(self, state: _State, welcome: messages.Welcome) -> None:
        with self._condition:
            before, state.incarnation = state.incarnation, welcome.incarnation
            state.connected, state.generator = True, welcome.generator
            state.others = tuple(member.value() for member in welcome.members)
            # Where the welcome to a new incarnation was lost, the next one resumes it.
            if before and (not welcome.resumed or welcome.incarnation != before):
                state.rejoined += 1
                state.current = None
                _log.warning(
                    "the coordinator took this worker for dead, or has forgotten it: "
                    "it has joined again, as incarnation %d",
                    welcome.incarnation,
                )
            if welcome.running:
                self._on_running(state, welcome.running.value())
            elif state.current:
                self._say(messages.AskOutcome(number=state.current.number, key=state.current.key))
            self._condition.notify_all()

    def _on_running(self, state: _State, running: GroupStart) -> None:
        """A group runs with this worker, which has just got its connection back."""
        voted = state.votes.get(running.number)
        if voted and voted.key == running.key:
            self._say(voted)
        elif state.current is None or state.current.key != running.key:
            self._say(_vote(running, reduced=False))  # it was granted what nobody here asks for any more

    def _on_message(self, state: _State, message: messages.AnyToWorker) -> None:
        with self._condition:
            if isinstance(message, messages.Start):
                start = message.value()
                if state.keys.get(start.number) != start.key:  # of a coordinator that has counted anew
                    state.votes.pop(start.number, None)
                    state.decisions.pop(start.number, None)
                _remember(state.keys, start.number, start.key)
                if state.asked:
                    state.asked, state.granted = False, start
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
                _log.warning("the coordinator is lost (%s): this worker trains on alone", reason)
            state.connected = False
            state.last_failure = reason
            state.ended = reason if final else state.ended
            state.asked = False
            if state.granted and len(state.granted.members) > 1:
                state.granted = None
            if final:
                state.current = None
            self._condition.notify_all()


def _vote(start: GroupStart, *, reduced: bool) -> messages.Vote:
    return messages.Vote(number=start.number, key=start.key, reduced=reduced)


def _remember(known: OrderedDict[int, _Value], number: int, value: _Value) -> None:
    known[number] = value
    while len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
