"""What is tried while a job adapts: only what is predicted to be worth it, and stock DDP. Every trial costs steps."""

from __future__ import annotations

import math

from headway.strategies.data_parallel.decoupled.tuning.planned import PlannedProposer
from headway.strategies.data_parallel.decoupled.tuning.proposals import Setting

LEAST_GAIN = 0.02
MOST_TRIED = 2


class CautiousProposer(PlannedProposer):
    """Tries what is in force and the best few that are predicted to be faster by ``LEAST_GAIN``; else nothing.

    Stock DDP, of which nothing is predicted, is tried too; and where that is in force, the best few.
    """

    def begin(self, setting: Setting) -> None:
        """As ``PlannedProposer``, of whose list most is left out."""
        super().begin(setting)
        home, *others = self._left
        limit_ms = math.inf
        if not home.is_stock:
            limit_ms = (home.predicted_ms or 0.0) * (1 - LEAST_GAIN)
        better = [
            (each.predicted_ms, number) for number, each in enumerate(others) if each.predicted_ms is not None
        ]
        tried = [
            others[number] for predicted_ms, number in sorted(better)[:MOST_TRIED] if predicted_ms < limit_ms
        ]
        tried += [each for each in others if each.is_stock][:1]
        self._left = [home, *tried] if tried else []
