"""The graph as a group of ranks sees it: what a strategy lays out for all ranks is laid out for the group's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import Selection
from headway.graph.build import GraphBuilder, RankCursor, S


class GroupGraph(GraphBuilder[S]):
    """A view of the ``whole`` graph in which ``members`` are all ranks there are, under a ``schedule`` of their own.

    Everything is laid out in ``whole``, which alone may be closed or played. Cursors have the ranks of ``whole``, and
    each collective is one of the members. Of several views with the same members this is the one of ``number`` (below
    ``views``), whose collectives are its own.
    """

    def __init__(
        self, whole: GraphBuilder[Any], schedule: S, members: Sequence[int], number: int = 0, views: int = 1
    ) -> None:
        vars(self).update(vars(whole))  # all that is laid out is shared
        self.schedule = schedule
        self.world_size = len(members)
        self._whole = whole
        self._members = tuple(members)
        self._number, self._views = number, views

    @property
    def hosts(self) -> Hosts:
        """Which members share a host, by their numbers among the members."""
        host_of_rank = self.cluster.host_of_rank
        return Hosts.of_places([host_of_rank[member] for member in self._members])

    def launch(
        self,
        cursor: RankCursor,
        name: str,
        key: int,
        size_bytes: int,
        *,
        bucket: int,
        selection: Selection,
        channel: int = 0,
        after: Sequence[int] = (),
        after_work: Sequence[int] = (),
        members: Sequence[int] | None = None,
    ) -> int:
        """As of the whole graph, with the members for all ranks: they use a key once."""
        return self._whole.launch(
            cursor, name, key * self._views + self._number, size_bytes, bucket=bucket, selection=selection,
            channel=channel, after=after, after_work=after_work,
            members=self._members if members is None else members,
        )  # fmt: skip
