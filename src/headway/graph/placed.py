"""What ranks do together, as it is placed in a graph: collectives of all of them or of some, and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.collectives.selection import Selection
from headway.errors import UserError


@dataclass(slots=True)
class Communication:
    """What ``members`` do together: each has one begin and one end (operations), in the members' order."""

    name: str
    step: int  # of the member that asked first
    size_bytes: int
    members: Sequence[int]
    begins: list[int]
    ends: list[int]
    channel: int
    asked_by: set[int] = field(default_factory=set, init=False)

    def begin_of(self, rank: int) -> int:
        """The begin of a member. Raises ValueError where it is none."""
        return self.begins[self.members.index(rank)]

    def end_of(self, rank: int) -> int:
        """The end of a member. Raises ValueError where it is none."""
        return self.ends[self.members.index(rank)]

    def check_asked(self) -> None:
        """Raise UserError where a member has not asked for it: it would begin without that member."""
        if missing := [rank for rank in self.members if rank not in self.asked_by]:
            raise UserError(
                "ranks take part in different collectives, which cannot be replayed",
                got=f"{self.name} of step {self.step}, members {list(self.members)}: ranks {missing} never ask for it",
                fix="Record steps in which all ranks do the same.",
            )


@dataclass(slots=True)
class PlacedCollective(Communication):
    """A collective in the graph."""

    selection: Selection
    bucket: int
    group: tuple[int, ...]  # where it is of some ranks: all of these, of which the members are played
    base: int = -1  # its first operation, once it is expanded


@dataclass(slots=True)
class PlacedTransfer(Communication):
    """A message from one rank, the first member, to another, the second."""

    operation: int
