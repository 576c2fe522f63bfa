"""What a worker and its coordinator say to each other, whatever carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.coordination.generator import Worker


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
