"""Messages between workers and their coordinator, and the ``Coordinator`` protocol that a worker uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from headway.strategies.partial_all_reduce.generators.generator import Worker


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of a job: ``incarnation`` grows whenever a worker of this number joins again.

    ``address`` is where peers reach it (host:port), ``host`` the machine that it is on.
    """

    worker: Worker
    incarnation: int
    address: str
    host: str


@dataclass(frozen=True, slots=True)
class GroupStart:
    """``members`` (by worker) average now. ``key`` is unique over the life of the job, including restarts."""

    number: int
    key: str
    members: Sequence[Member]


class Coordinator(Protocol):
    """A worker's view of the coordinator. Calls block no longer than their timeout, and none raises for an outage.

    During an outage (``is_reachable`` is False) a worker trains alone; the connection is restored in the background,
    and earlier requests are void.
    """

    @property
    def is_reachable(self) -> bool:
        """Whether the coordinator answers at present."""

    @property
    def incarnation(self) -> int:
        """This worker's incarnation as the coordinator counts it; 0 before it joins."""

    def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Join the job and return the workers already present. Raises CommunicationError after ``timeout_s``."""

    def ask(self, iteration: int) -> None:
        """Request a group after an iteration. Returns immediately."""

    def granted(self, timeout_s: float) -> GroupStart | None:
        """Wait for the group of the last ``ask``. A group of one member means that the worker continues alone.

        Returns None after ``timeout_s`` and if the coordinator was lost.
        """

    def vote(self, number: int, reduced: bool, timeout_s: float) -> bool:
        """Vote whether this member holds the group's mean; returns True if all live members do and therefore apply it.

        Returns False if one does not, after ``timeout_s``, and if the coordinator was lost before the decision. A
        member that was disconnected in between learns the decision later from ``outcome``.
        """

    def outcome(self, number: int, timeout_s: float) -> bool | None:
        """Return the decision about a group; None if it is undecided or unknown."""

    def report(self, metrics: Mapping[str, float]) -> None:
        """Report metrics of this worker. Returns immediately."""

    def leave(self) -> None:
        """Leave the job: groups that have not begun proceed without this worker."""


PROTOCOL = 1
MAX_WORKERS = 4096
MAX_TO_COORDINATOR_BYTES = 16 * 2**10
MAX_TO_WORKER_BYTES = 4 * 2**20
MAX_REPORTED = 32
"""Largest number of metrics in a report."""

WorkerNumber = Annotated[int, Field(ge=0, lt=MAX_WORKERS)]
Counter = Annotated[int, Field(ge=0, lt=2**62)]
Address = Annotated[str, Field(min_length=1, max_length=300)]
Key = Annotated[str, Field(min_length=1, max_length=100)]
SessionName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
MetricName = Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class MalformedError(ValueError):
    """A message is malformed or has values out of range."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MemberModel(_Model):
    """A ``Member``."""

    worker: WorkerNumber
    incarnation: Counter
    address: Address
    host: Address

    @classmethod
    def of(cls, member: Member) -> MemberModel:
        """Convert ``member`` to a message."""
        return cls(
            worker=member.worker, incarnation=member.incarnation, address=member.address, host=member.host
        )

    def value(self) -> Member:
        """Convert the message to a ``Member``."""
        return Member(self.worker, self.incarnation, self.address, self.host)


class Hello(_Model):
    """First message of a worker. ``session`` names its client; the member's incarnation is the last it knew, or 0."""

    kind: Literal["hello"] = "hello"
    protocol: int
    session: SessionName
    member: MemberModel


class Ask(_Model):
    """The worker has finished an iteration and wants to average."""

    kind: Literal["ask"] = "ask"
    iteration: Counter


class Vote(_Model):
    """Whether the worker holds the mean of a group."""

    kind: Literal["vote"] = "vote"
    number: Counter
    key: Key
    reduced: bool


class AskOutcome(_Model):
    """Request the decision about a group. ``key`` is None if the worker does not know it."""

    kind: Literal["ask_outcome"] = "ask_outcome"
    number: Counter
    key: Key | None


class Beat(_Model):
    """Heartbeat, with the round-trip time of the last one and new metrics, if any."""

    kind: Literal["beat"] = "beat"
    number: Counter
    round_trip_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    metrics: Annotated[dict[MetricName, Finite], Field(max_length=MAX_REPORTED)] | None = None


class Leave(_Model):
    """The worker leaves."""

    kind: Literal["leave"] = "leave"


class Start(_Model):
    """A group begins."""

    kind: Literal["start"] = "start"
    number: Counter
    key: Key
    members: Annotated[list[MemberModel], Field(min_length=1, max_length=MAX_WORKERS)]

    @classmethod
    def of(cls, start: GroupStart) -> Start:
        """Convert ``start`` to a message."""
        return cls(
            number=start.number, key=start.key, members=[MemberModel.of(member) for member in start.members]
        )

    def value(self) -> GroupStart:
        """Convert the message to a ``GroupStart``."""
        return GroupStart(self.number, self.key, tuple(member.value() for member in self.members))


class Welcome(_Model):
    """The worker is a member, with ``incarnation``; ``members`` are the others, ``running`` is its running group.

    ``resumed``: it keeps the membership from before its connection was lost. ``generator`` describes the group
    generator, with its options and seed.
    """

    kind: Literal["welcome"] = "welcome"
    incarnation: Counter
    resumed: bool
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    members: Annotated[list[MemberModel], Field(max_length=MAX_WORKERS)]
    running: Start | None
    generator: Annotated[str, Field(max_length=1000)] | None = None


class Decided(_Model):
    """Decision about a group; ``committed`` is None if it still ``runs`` or is unknown."""

    kind: Literal["decided"] = "decided"
    number: Counter
    key: Key | None
    committed: bool | None
    runs: bool = False


class Beaten(_Model):
    """The answer to a beat."""

    kind: Literal["beaten"] = "beaten"
    number: Counter


ToCoordinator = Annotated[Hello | Ask | Vote | AskOutcome | Beat | Leave, Field(discriminator="kind")]
ToWorker = Annotated[Start | Welcome | Decided | Beaten, Field(discriminator="kind")]
AnyToCoordinator = Hello | Ask | Vote | AskOutcome | Beat | Leave
AnyToWorker = Start | Welcome | Decided | Beaten

_Message = TypeVar("_Message")
_to_coordinator: TypeAdapter[AnyToCoordinator] = TypeAdapter(ToCoordinator)
_to_worker: TypeAdapter[AnyToWorker] = TypeAdapter(ToWorker)


def encode(message: AnyToCoordinator | AnyToWorker) -> bytes:
    """Encode a message."""
    return message.model_dump_json().encode()


def for_coordinator(data: bytes) -> AnyToCoordinator:
    """Decode a message from a worker. Raises MalformedError."""
    return _parsed(_to_coordinator, data, MAX_TO_COORDINATOR_BYTES)


def for_worker(data: bytes) -> AnyToWorker:
    """Decode a message from a coordinator. Raises MalformedError."""
    return _parsed(_to_worker, data, MAX_TO_WORKER_BYTES)


def _parsed(adapter: TypeAdapter[_Message], data: bytes, limit_bytes: int) -> _Message:
    if len(data) > limit_bytes:
        raise MalformedError(f"a message of {len(data)} bytes; expected at most {limit_bytes}")
    try:
        return adapter.validate_json(data)
    except ValidationError as failure:
        complaint = failure.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in complaint["loc"])
        raise MalformedError(f"{where or 'message'}: {complaint['msg']}") from None
