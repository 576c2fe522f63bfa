"""Departure: ranks tell one another, through the job's store, that they have no more use for something they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

PRESENCE_EVERY_S = 1.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.2


class Departure:
    """Who of ``world_size`` ranks has left. ``key`` is the same on all of them, and no other's in ``store``.

    ``is_there`` says whether another rank can be reached at all: one that ended without a word has left, too.
    """

    def __init__(
        self, store: Any, key: str, rank: int, world_size: int, is_there: Callable[[int], bool] | None = None
    ) -> None:
        self._store = store
        self._key = key
        self._rank, self._world_size = rank, world_size
        self._is_there = is_there
        self.left = False  # whether this rank has

    def leave(self) -> None:
        """Tell the other ranks that this one has left."""
        self.left = True
        with suppress(Exception):  # the store may have gone down with its host
            self._store.set(self._left(self._rank), b"")

    def everyone_left(self, timeout_s: float = 0.0) -> bool:
        """Whether all ranks have left; waits for the others up to ``timeout_s``."""
        if not self.left:
            return False
        present = [rank for rank in range(self._world_size) if rank != self._rank]
        now = look = time.monotonic()
        deadline = now + timeout_s
        pause_s = SHORTEST_PAUSE_S
        with suppress(Exception):  # a store that went down served everybody's last question
            while present := self._not_left(present):
                if self._is_there is not None and now >= look:
                    present = [rank for rank in present if self._is_there(rank)]
                    look = now + PRESENCE_EVERY_S
                if present and now >= deadline:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                now = time.monotonic()
        return True

    def _not_left(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([self._left(rank)])]

    def _left(self, rank: int) -> str:
        return f"{self._key}/gone/{rank}"
