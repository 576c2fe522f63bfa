"""What other documents of the same rank say of its collectives, joined to Kineto's own account of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headway.arrays import Ints
from headway.interop.readers.execution_trace import ExecutedCommunication
from headway.interop.readers.flight_recorder import Recorded
from headway.interop.readers.foreign import Companion
from headway.interop.readers.torch_json import ranks_of

SLACK_NS = 200_000  # the flight recorder's moment may lie this far outside of the call as the profiler saw it


class Row(NamedTuple):
    """What is known of one collective; -1 and "" stand for what is not."""

    name: str
    group: str = ""
    sequence: int = -1
    size_bytes: int = -1  # the whole tensor's
    peer: int = -1

    def filled_from(self, other: Row | None) -> Row:
        """This row, with what it lacks taken from ``other``. A group and a sequence belong together."""
        if other is None:
            return self
        whole = self.group and self.sequence >= 0
        return Row(
            self.name,
            self.group if whole or not other.group else other.group,
            self.sequence if whole or other.sequence < 0 else other.sequence,
            self.size_bytes if self.size_bytes >= 0 else other.size_bytes,
            self.peer if self.peer >= 0 else other.peer,
        )


class Known:
    """What companions say of one rank."""

    def __init__(self, executed: Sequence[ExecutedCommunication], recorded: Sequence[Recorded]) -> None:
        self.groups: dict[str, tuple[int, ...]] = {}
        self.notes: list[str] = []
        self._looked_up: set[str] = set()
        self._by_call: dict[int, Row] = {}
        for one in executed:
            self.groups |= one.groups
            rows = [Row(*row) for row in zip(*_columns(one), strict=True)]
            for ids in (one.annotation, one.call):
                self._by_call |= {
                    number: row for number, row in zip(ids.tolist(), rows, strict=True) if number >= 0
                }
        self._recorded: list[Row] = []
        created = [np.zeros(0, dtype=np.int64)]
        for two in recorded:
            self.groups |= two.groups
            self._recorded += [Row(*row) for row in zip(*_columns(two), strict=True)]
            created.append(two.created_ns)
        moments = np.concatenate(created)
        order = np.argsort(moments, kind="stable")
        self._created_ns: Ints = moments[order]
        self._recorded = [self._recorded[position] for position in order.tolist()]

    def take_group(self, name: str, ranks: object, size: object) -> None:
        """Keep what a collective's own arguments say of its group, unless that is known."""
        if not name or name in self._looked_up:
            return
        self._looked_up.add(name)
        if name not in self.groups and ranks is not None and (members := ranks_of(ranks, size)):
            self.groups[name] = members

    @classmethod
    def of_rank(cls, rank: int | None, companions: Sequence[Companion]) -> Known:
        """Collect what is said of ``rank``; of everybody where neither side knows whose it is."""
        mine = [companion.content for companion in companions if companion.rank == rank]
        return cls(
            [content for content in mine if isinstance(content, ExecutedCommunication)],
            [content for content in mine if isinstance(content, Recorded)],
        )

    def of_call(self, record_function: object) -> Row | None:
        """What an execution trace says of the call with this record-function id."""
        return self._by_call.get(record_function) if isinstance(record_function, int) else None

    def in_order(self, starts_ns: Ints, ends_ns: Ints) -> list[Row | None]:
        """What the flight recorder says of collectives that calls asked for between these moments.

        Each of its entries is of one call: the first that no earlier call took, if it lies within the call.
        """
        found: list[Row | None] = [None] * len(starts_ns)
        free = 0
        for call in np.argsort(starts_ns, kind="stable").tolist():
            first = int(np.searchsorted(self._created_ns, starts_ns[call] - SLACK_NS))
            free = max(free, first)
            if free < len(self._created_ns) and self._created_ns[free] <= ends_ns[call] + SLACK_NS:
                found[call] = self._recorded[free]
                free += 1
        return found


def _columns(said: ExecutedCommunication | Recorded) -> tuple[list[object], ...]:
    columns = (said.name, said.group, said.sequence, said.size_bytes, said.peer)
    return tuple(column.tolist() for column in columns)
