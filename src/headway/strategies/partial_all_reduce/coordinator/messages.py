"""What a worker and its coordinator say to each other, whatever carries it."""

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
    """``members`` (by worker) average now. ``key`` is unique in the life of the job, restarts of all included."""

    number: int
    key: str
    members: Sequence[Member]


class Coordinator(Protocol):
    """One worker's side of the coordinator. Calls do not block longer than they say; none raises for an outage.

    During an outage of the coordinator (``is_reachable`` False) a worker trains on alone; the connection is made again
    in the background, and what was asked before counts no more.
    """

    @property
    def is_reachable(self) -> bool:
        """Whether the coordinator answers at present."""

    @property
    def incarnation(self) -> int:
        """This worker's, as it is counted there since it has joined; 0 where none is."""

    def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Become a worker of the job; returns the others that are there. Raises CommunicationError after the time."""

    def ask(self, iteration: int) -> None:
        """Say that this worker has finished an iteration and wants to average. Returns immediately."""

    def granted(self, timeout_s: float) -> GroupStart | None:
        """The group that the last ``ask`` was granted, once it is there: of one member, the worker goes on alone.

        None after the time, and where the coordinator was lost.
        """

    def vote(self, number: int, reduced: bool, timeout_s: float) -> bool:
        """Say whether this member holds the group's mean; returns whether all of its live members do, and take it.

        False where one does not, after the time, and where the coordinator was lost before it had decided; a member
        that was lost in between learns the decision when it joins again (``outcome``).
        """

    def outcome(self, number: int, timeout_s: float) -> bool | None:
        """What was decided about a group; None where nothing was, or nobody knows."""

    def report(self, metrics: Mapping[str, float]) -> None:
        """Numbers about this worker for whoever watches the job. Returns immediately."""

    def leave(self) -> None:
        """End the membership: groups that have not begun go on without this worker."""


PROTOCOL = 1
MAX_WORKERS = 4096
MAX_TO_COORDINATOR_BYTES = 16 * 2**10
MAX_TO_WORKER_BYTES = 4 * 2**20
MAX_REPORTED = 32
"""How many numbers a worker reports at most."""

WorkerNumber = Annotated[int, Field(ge=0, lt=MAX_WORKERS)]
Counter = Annotated[int, Field(ge=0, lt=2**62)]
Address = Annotated[str, Field(min_length=1, max_length=300)]
Key = Annotated[str, Field(min_length=1, max_length=100)]
SessionName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
MetricName = Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class MalformedError(ValueError):
    """A message that is none, or says what none may say."""


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
        """The model of ``member``."""
        return cls(
            worker=member.worker, incarnation=member.incarnation, address=member.address, host=member.host
        )

    def value(self) -> Member:
        """The member that this is the model of."""
        return Member(self.worker, self.incarnation, self.address, self.host)


class Hello(_Model):
    """The first message of a worker. ``session`` names its client; ``incarnation`` is the last it knew, 0 at first."""

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
    """What was decided about a group? ``key`` is None where the worker does not know it."""

    kind: Literal["ask_outcome"] = "ask_outcome"
    number: Counter
    key: Key | None


class Beat(_Model):
    """The worker is alive. ``round_trip_s`` is what its last beat took, ``metrics`` what it has to report, if new."""

    kind: Literal["beat"] = "beat"
    number: Counter
    round_trip_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    metrics: Annotated[dict[MetricName, Finite], Field(max_length=MAX_REPORTED)] | None = None


class Leave(_Model):
    """The worker ends its membership."""

    kind: Literal["leave"] = "leave"


class Start(_Model):
    """A group begins."""

    kind: Literal["start"] = "start"
    number: Counter
    key: Key
    members: Annotated[list[MemberModel], Field(min_length=1, max_length=MAX_WORKERS)]

    @classmethod
    def of(cls, start: GroupStart) -> Start:
        """The message of ``start``."""
        return cls(
            number=start.number, key=start.key, members=[MemberModel.of(member) for member in start.members]
        )

    def value(self) -> GroupStart:
        """The start that this is the message of."""
        return GroupStart(self.number, self.key, tuple(member.value() for member in self.members))


class Welcome(_Model):
    """The worker is a member: ``incarnation`` is its own, ``members`` the others, ``running`` a group that has begun.

    ``resumed``: it is the membership that it had before its connection was lost. ``generator`` says who forms groups,
    with its options and seed.
    """

    kind: Literal["welcome"] = "welcome"
    incarnation: Counter
    resumed: bool
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    members: Annotated[list[MemberModel], Field(max_length=MAX_WORKERS)]
    running: Start | None
    generator: Annotated[str, Field(max_length=1000)] | None = None


class Decided(_Model):
    """What was decided about a group; ``committed`` is None where it still ``runs``, or nobody knows it."""

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
    """``message`` as it is sent."""
    return message.model_dump_json().encode()


def for_coordinator(data: bytes) -> AnyToCoordinator:
    """A message of a worker. Raises MalformedError where ``data`` is none."""
    return _parsed(_to_coordinator, data, MAX_TO_COORDINATOR_BYTES)


def for_worker(data: bytes) -> AnyToWorker:
    """A message of a coordinator. Raises MalformedError where ``data`` is none."""
    return _parsed(_to_worker, data, MAX_TO_WORKER_BYTES)


def _parsed(adapter: TypeAdapter[_Message], data: bytes, limit_bytes: int) -> _Message:
    if len(data) > limit_bytes:
        raise MalformedError(f"{len(data)} bytes; at most {limit_bytes} are read")
    try:
        return adapter.validate_json(data)
    except ValidationError as failure:
        complaint = failure.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in complaint["loc"])
        raise MalformedError(f"{where or 'message'}: {complaint['msg']}") from None
