"""Looks up details of a rank's collectives in its companion documents (execution trace, flight recorder)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headway.arrays import Ints
from headway.interop.readers.execution_trace import ExecutedCommunication
from headway.interop.readers.flight_recorder import LaunchedCommunication
from headway.interop.readers.foreign import Companion
from headway.interop.readers.torch_json import ranks_of

SLACK_NS = 200_000  # a flight recorder's launch time may lie this far outside the profiler's call


class Row(NamedTuple):
    """The details of one collective; -1 and "" mean unknown."""

    name: str
    group: str = ""
    sequence: int = -1
    size_bytes: int = -1  # the whole tensor's
    peer: int = -1

    def filled_from(self, fallback: Row | None) -> Row:
        """This row with missing fields taken from ``fallback``; group and sequence are kept together."""
        if fallback is None:
            return self
        is_complete = self.group and self.sequence >= 0
        return Row(
            self.name,
            self.group if is_complete or not fallback.group else fallback.group,
            self.sequence if is_complete or fallback.sequence < 0 else fallback.sequence,
            self.size_bytes if self.size_bytes >= 0 else fallback.size_bytes,
            self.peer if self.peer >= 0 else fallback.peer,
        )


class RankCompanions:
    """The companion documents of one rank."""

    def __init__(
        self, executed: Sequence[ExecutedCommunication], recorded: Sequence[LaunchedCommunication]
    ) -> None:
        self.groups: dict[str, tuple[int, ...]] = {}
        self.notes: list[str] = []
        self._looked_up: set[str] = set()
        self._by_call: dict[int, Row] = {}
        for trace in executed:
            self.groups |= trace.groups
            rows = [Row(*row) for row in zip(*_columns(trace), strict=True)]
            for ids in (trace.annotation, trace.call):
                self._by_call |= {
                    number: row for number, row in zip(ids.tolist(), rows, strict=True) if number >= 0
                }
        self._recorded: list[Row] = []
        created = [np.zeros(0, dtype=np.int64)]
        for dump in recorded:
            self.groups |= dump.groups
            self._recorded += [Row(*row) for row in zip(*_columns(dump), strict=True)]
            created.append(dump.created_ns)
        moments = np.concatenate(created)
        order = np.argsort(moments, kind="stable")
        self._created_ns: Ints = moments[order]
        self._recorded = [self._recorded[position] for position in order.tolist()]

    def take_group(self, name: str, ranks: object, size: object) -> None:
        """Remember a group's ranks from a collective's arguments, unless they are known."""
        if not name or name in self._looked_up:
            return
        self._looked_up.add(name)
        if name not in self.groups and ranks is not None and (members := ranks_of(ranks, size)):
            self.groups[name] = members

    @classmethod
    def of_rank(cls, rank: int | None, companions: Sequence[Companion]) -> RankCompanions:
        """Collect the companions of ``rank``; None collects those without a rank."""
        contents = [companion.content for companion in companions if companion.rank == rank]
        return cls(
            [content for content in contents if isinstance(content, ExecutedCommunication)],
            [content for content in contents if isinstance(content, LaunchedCommunication)],
        )

    def of_call(self, record_function: object) -> Row | None:
        """The execution trace's row for this record-function id."""
        return self._by_call.get(record_function) if isinstance(record_function, int) else None

    def in_order(self, starts_ns: Ints, ends_ns: Ints) -> list[Row | None]:
        """The flight recorder's rows for calls with these starts and ends.

        Each call takes the first entry that no earlier call took, if it lies within the call.
        """
        rows: list[Row | None] = [None] * len(starts_ns)
        free = 0
        for call in np.argsort(starts_ns, kind="stable").tolist():
            first = int(np.searchsorted(self._created_ns, starts_ns[call] - SLACK_NS))
            free = max(free, first)
            if free < len(self._created_ns) and self._created_ns[free] <= ends_ns[call] + SLACK_NS:
                rows[call] = self._recorded[free]
                free += 1
        return rows


def _columns(source: ExecutedCommunication | LaunchedCommunication) -> tuple[list[object], ...]:
    columns = (source.name, source.group, source.sequence, source.size_bytes, source.peer)
    return tuple(column.tolist() for column in columns)
