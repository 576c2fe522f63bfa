"""All that a coordinator knows at one moment, as its journal begins with it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from headway.coordination.messages import Counter, Key, MemberModel, SessionName, Start, WorkerNumber


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerRecord(_Record):
    """A member. ``admitted``: the generator knows it; ``waits``: there; ``asks``: before it may be asked.

    ``absent``: until it asks.
    """

    member: MemberModel
    session: SessionName
    admitted: bool
    waits: bool
    asks: bool
    absent: bool = False


class GroupRecord(_Record):
    """A group that runs, and the workers that have said that they hold its mean."""

    start: Start
    reduced: list[WorkerNumber]


class Snapshot(_Record):
    """All that the ``Ledger`` of a job knows."""

    job: str
    boot: str
    now_ns: Counter
    workers: list[WorkerRecord]
    incarnations: dict[WorkerNumber, Counter]
    groups: list[GroupRecord]
    decisions: dict[Counter, tuple[Key, bool]]
    generator: dict[str, Any]
