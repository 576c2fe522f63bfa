"""What parameter servers add to the graph: a push, a sum and a pull a key, and one wait after backward."""

from __future__ import annotations

from headway.collectives.algorithms import ALL_REDUCE, SERVERS
from headway.collectives.selection import Selection
from headway.strategies.data_parallel.ddp import reactions as ddp


class Reactions(ddp.Reactions):
    """DDP's reactions, with other all-reduces: each channel has connections of its own and serves one at a time."""

    @property
    def at_a_time(self) -> int:
        """One a channel."""
        return self._graph.schedule.channels

    @property
    def channels_apart(self) -> bool:
        """Every channel has a process group of its own."""
        return True

    def selection(self, size_bytes: int) -> Selection:
        """Push and pull."""
        return Selection(SERVERS, ALL_REDUCE)
