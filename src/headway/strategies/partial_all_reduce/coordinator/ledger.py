"""Members, running groups and decisions of a job: a pure state machine around one generator.

The server tells it what happens and carries out what it answers; the journal tells it the same events again after a
crash, and gets the same answers. It has no clock and no randomness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from headway.strategies.partial_all_reduce.coordinator.messages import (
    Address,
    Counter,
    GroupStart,
    Key,
    Member,
    MemberModel,
    SessionName,
    Start,
    WorkerNumber,
)
from headway.strategies.partial_all_reduce.generators.generator import Grant, GroupGenerator, Worker

Reason = Literal["left", "lease", "replaced"]


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    now_ns: Counter


class Booted(_Event):
    """A coordinator has started; ``boot`` is a unique name that is part of its groups' keys."""

    kind: Literal["booted"] = "booted"
    boot: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class Joined(_Event):
    """A worker has joined under a new incarnation."""

    kind: Literal["joined"] = "joined"
    worker: WorkerNumber
    session: SessionName
    address: Address
    host: Address


class Left(_Event):
    """A member has left: by itself, because its lease expired, or because another process took its number."""

    kind: Literal["left"] = "left"
    worker: WorkerNumber
    reason: Reason


class Asked(_Event):
    """A member has finished an iteration and wants to average."""

    kind: Literal["asked"] = "asked"
    worker: WorkerNumber
    iteration: Counter


class Withdrew(_Event):
    """A member has lost its connection: its request is void."""

    kind: Literal["withdrew"] = "withdrew"
    worker: WorkerNumber


class Absented(_Event):
    """A member has not asked for long: until it does, groups that have not begun proceed without it."""

    kind: Literal["absented"] = "absented"
    worker: WorkerNumber


class Voted(_Event):
    """A member has voted whether it holds the mean of a group."""

    kind: Literal["voted"] = "voted"
    worker: WorkerNumber
    number: Counter
    key: Key
    reduced: bool


class Woke(_Event):
    """The generator's wake-up time has come."""

    kind: Literal["woke"] = "woke"


AnyEvent = Booted | Joined | Left | Asked | Withdrew | Absented | Voted | Woke
Event: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerRecord(_Record):
    """A member. ``admitted``: known to the generator. ``waits``: waiting in the generator. ``asks``: has asked before it
    was admitted. ``absent``: not admitted until it asks.
    """

    member: MemberModel
    session: SessionName
    admitted: bool
    waits: bool
    asks: bool
    absent: bool = False


class GroupRecord(_Record):
    """A running group, and the workers that voted that they hold its mean."""

    start: Start
    reduced: list[WorkerNumber]


class Snapshot(_Record):
    """Complete state of a ``Ledger``."""

    job: str
    boot: str
    now_ns: Counter
    workers: list[WorkerRecord]
    incarnations: dict[WorkerNumber, Counter]
    groups: list[GroupRecord]
    decisions: dict[Counter, tuple[Key, bool]]
    generator: dict[str, Any]


MAX_DECISIONS = 16_384
"""Number of decisions that are remembered."""


class Decision(NamedTuple):
    """A group has ended; ``members`` are to be notified."""

    number: int
    key: str
    committed: bool
    members: tuple[Member, ...]


Answer = GroupStart | Decision


@dataclass(slots=True)
class _Live:
    """A worker that is a member."""

    member: Member
    session: str
    admitted: bool = False  # known to the generator
    waits: bool = False  # waiting in the generator
    asks: bool = False  # asked before it was admitted
    absent: bool = False  # until it asks


@dataclass(slots=True)
class _Group:
    start: GroupStart
    reduced: set[Worker] = field(default_factory=set)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(member.worker for member in self.start.members)


MakeGenerator = Callable[[Mapping[Worker, str]], GroupGenerator]
"""Creates a generator, always of the same class and options, given a mapping of workers to hosts."""


class Ledger:
    """State of the job named ``job``: members, running groups and decisions."""

    def __init__(self, make_generator: MakeGenerator, job: str) -> None:
        self._hosts: dict[Worker, str] = {}
        self._generator = make_generator(self._hosts)
        self.job = job
        self.boot = ""
        self.now_ns = 0
        self._live: dict[Worker, _Live] = {}
        self._incarnations: dict[Worker, int] = {}  # the last of each worker
        self._groups: dict[int, _Group] = {}
        self._busy: dict[Worker, int] = {}  # worker to its running group
        self._decisions: OrderedDict[int, tuple[str, bool]] = OrderedDict()  # with the groups' keys
        self._answers: list[Answer] = []

    @property
    def members(self) -> Sequence[Member]:
        """Members, ordered by worker."""
        return [self._live[worker].member for worker in sorted(self._live)]

    @property
    def running(self) -> int:
        """Number of running groups."""
        return len(self._groups)

    @property
    def wake_ns(self) -> int | None:
        """When ``Woke`` is due, on the job's clock."""
        return self._generator.wake_ns

    def member(self, worker: Worker) -> Member | None:
        """Return the member with this number, or None."""
        live = self._live.get(worker)
        return live.member if live else None

    def session(self, worker: Worker) -> str | None:
        """Return the session of the member with this number, or None."""
        live = self._live.get(worker)
        return live.session if live else None

    def computes(self, worker: Worker) -> bool:
        """Whether a member neither waits nor is in a running group."""
        return worker in self._live and not self.waits(worker) and worker not in self._busy

    def waits(self, worker: Worker) -> bool:
        """Whether a member has asked and has no group yet."""
        live = self._live.get(worker)
        return live is not None and (live.waits or live.asks)

    def running_with(self, member: Member) -> GroupStart | None:
        """Return the running group of this member and incarnation."""
        number = self._busy.get(member.worker)
        start = None if number is None else self._groups[number].start
        return start if start and member in start.members else None

    def decision(self, number: int, key: str | None) -> bool | None:
        """Return the decision about a group; None if it is unknown or ``key`` does not match."""
        decided_key, committed = self._decisions.get(number, (None, None))
        return committed if key is None or key == decided_key else None

    def runs(self, number: int, key: str | None) -> bool:
        """Whether a group is running and matches ``key``, if given."""
        group = self._groups.get(number)
        return group is not None and key in (None, group.start.key)

    def may_vote(self, member: Member, number: int, key: str) -> bool:
        """Whether this member may still vote on the group."""
        group = self._groups.get(number)
        return group is not None and group.start.key == key and member in group.start.members

    def apply(self, event: AnyEvent) -> Sequence[Answer]:
        """Apply ``event`` and return the answers to send to members, in order.

        The caller has checked the worker's identity and ``may_vote``. Raises ValueError if time goes backwards.
        """
        if event.now_ns < self.now_ns:
            raise ValueError("the job's clock goes backwards")
        self.now_ns = event.now_ns
        self._answers = []
        match event:
            case Booted():
                self.boot = event.boot
            case Joined():
                self._join(event)
            case Left():
                self._leave(event.worker)
            case Asked():
                self._live[event.worker].asks = not self._live[event.worker].waits
                self._live[event.worker].absent = False
                self._admit_where_free(event.worker)
                self._ask_where_free(event.worker)
            case Withdrew():
                self._withdraw(event.worker)
            case Absented():
                self._absent(event.worker)
            case Voted():
                self._vote(event)
            case Woke():
                self._begin(self._generator.wake(self.now_ns))
        return self._answers

    def _join(self, event: Joined) -> None:
        worker = event.worker
        incarnation = self._incarnations.get(worker, 0) + 1
        self._incarnations[worker] = incarnation
        member = Member(worker, incarnation, event.address, event.host)
        self._live[worker] = _Live(member, event.session)
        self._hosts[worker] = event.host
        self._admit_where_free(worker)

    def _leave(self, worker: Worker) -> None:
        live = self._live.pop(worker)
        if live.admitted:
            self._begin(self._generator.leave(worker, self.now_ns))
        del self._hosts[worker]
        number = self._busy.get(worker)
        if number is None:
            return
        group = self._groups[number]
        if live.member in group.start.members and worker not in group.reduced:
            self._decide(number, committed=False)

    def _withdraw(self, worker: Worker) -> None:
        live = self._live[worker]
        live.asks = False
        if live.waits:
            live.waits = live.admitted = False
            self._begin(self._generator.leave(worker, self.now_ns))
            self._admit_where_free(worker)

    def _absent(self, worker: Worker) -> None:
        live = self._live[worker]
        live.absent = True
        if live.admitted:
            live.admitted = False
            self._begin(self._generator.leave(worker, self.now_ns))

    def _vote(self, event: Voted) -> None:
        group = self._groups[event.number]
        if not event.reduced:
            self._decide(event.number, committed=False)
            return
        group.reduced.add(event.worker)
        if len(group.reduced) == len(group.start.members):
            self._decide(event.number, committed=True)

    def _decide(self, number: int, *, committed: bool) -> None:
        group = self._groups.pop(number)
        self._decisions[number] = (group.start.key, committed)
        while len(self._decisions) > MAX_DECISIONS:
            self._decisions.popitem(last=False)
        for worker in group.workers:
            del self._busy[worker]
        recipients = tuple(member for member in group.start.members if self.member(member.worker) == member)
        self._answers.append(Decision(number, group.start.key, committed, recipients))
        self._begin(self._generator.ended(number, self.now_ns))
        for worker in group.workers:
            self._admit_where_free(worker)
            self._ask_where_free(worker)

    def _admit_where_free(self, worker: Worker) -> None:
        """Admit a worker to the generator, unless a group with an earlier incarnation of it is running."""
        live = self._live.get(worker)
        if live and not live.admitted and not live.absent and worker not in self._busy:
            live.admitted = True
            self._begin(self._generator.join(worker, self.now_ns))

    def _ask_where_free(self, worker: Worker) -> None:
        live = self._live.get(worker)
        if live and live.asks and live.admitted and not live.waits and worker not in self._busy:
            live.asks, live.waits = False, True
            self._begin(self._generator.ask(worker, self.now_ns))

    def _begin(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            lives = [self._live[worker] for worker in grant.members]
            for live in lives:
                assert live.waits, f"worker {live.member.worker} was granted a group that it did not ask for"
                live.waits = False
            members = tuple(live.member for live in lives)
            start = GroupStart(grant.number, f"{self.job}-{self.boot}-{grant.number}", members)
            if len(members) > 1:
                self._groups[grant.number] = _Group(start)
                self._busy.update(dict.fromkeys(grant.members, grant.number))
            self._answers.append(start)

    def snapshot(self) -> Snapshot:
        """Return the complete state."""
        return Snapshot(
            job=self.job,
            boot=self.boot,
            now_ns=self.now_ns,
            workers=[
                WorkerRecord(
                    member=MemberModel.of(live.member), session=live.session,
                    admitted=live.admitted, waits=live.waits, asks=live.asks, absent=live.absent,
                )
                for live in self._live.values()
            ],
            incarnations=dict(self._incarnations),
            groups=[
                GroupRecord(start=Start.of(group.start), reduced=sorted(group.reduced))
                for group in self._groups.values()
            ],
            decisions=dict(self._decisions),
            generator=dict(self._generator.state()),
        )  # fmt: skip

    @classmethod
    def restored(cls, make_generator: MakeGenerator, snapshot: Snapshot) -> Ledger:
        """Restore a ledger from ``snapshot``, with a new generator of the same class and options.

        Raises ValueError if the generator cannot restore its state.
        """
        ledger = cls(make_generator, snapshot.job)
        ledger.boot, ledger.now_ns = snapshot.boot, snapshot.now_ns
        for worker in snapshot.workers:
            live = _Live(
                worker.member.value(),
                worker.session,
                worker.admitted,
                worker.waits,
                worker.asks,
                worker.absent,
            )
            ledger._live[live.member.worker] = live
            ledger._hosts[live.member.worker] = live.member.host
        ledger._generator.restore(snapshot.generator)
        ledger._incarnations = dict(snapshot.incarnations)
        for record in snapshot.groups:
            group = _Group(record.start.value(), set(record.reduced))
            ledger._groups[group.start.number] = group
            ledger._busy.update(dict.fromkeys(group.workers, group.start.number))
        ledger._decisions = OrderedDict(snapshot.decisions)
        return ledger
