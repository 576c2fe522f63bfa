"""What happens to a coordinator, as its journal has it. Times are those of the job's clock, which never goes back."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from headway.coordination.messages import Address, Counter, Key, SessionName, WorkerNumber

Reason = Literal["left", "lease", "replaced"]


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    now_ns: Counter


class Booted(_Event):
    """A coordinator has begun to serve the job; ``boot`` is a name of its own, part of the keys of its groups."""

    kind: Literal["booted"] = "booted"
    boot: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class Joined(_Event):
    """A worker has become a member, under a new incarnation."""

    kind: Literal["joined"] = "joined"
    worker: WorkerNumber
    session: SessionName
    address: Address
    host: Address


class Left(_Event):
    """A member has gone: by itself, as its lease has ended, or as another process has taken its number."""

    kind: Literal["left"] = "left"
    worker: WorkerNumber
    reason: Reason


class Asked(_Event):
    """A member has finished an iteration and wants to average."""

    kind: Literal["asked"] = "asked"
    worker: WorkerNumber
    iteration: Counter


class Withdrew(_Event):
    """A member has lost its connection: what it asked for counts no more."""

    kind: Literal["withdrew"] = "withdrew"
    worker: WorkerNumber


class Absented(_Event):
    """A member has not asked for long: until it does, groups that have not begun go on without it."""

    kind: Literal["absented"] = "absented"
    worker: WorkerNumber


class Voted(_Event):
    """A member has said whether it holds the mean of a group."""

    kind: Literal["voted"] = "voted"
    worker: WorkerNumber
    number: Counter
    key: Key
    reduced: bool


class Woke(_Event):
    """The time has come that the generator wanted to be called at."""

    kind: Literal["woke"] = "woke"


AnyEvent = Booted | Joined | Left | Asked | Withdrew | Absented | Voted | Woke
Event: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])
