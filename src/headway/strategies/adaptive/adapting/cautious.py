"""What is tried while a job adapts: only what is predicted to be worth it, and stock DDP. Every trial costs steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.strategies.adaptive.tuning.planned import OTHER_FORM, SERVERS
from headway.strategies.adaptive.tuning.planned_proposer import PlannedProposer
from headway.strategies.adaptive.tuning.proposals import Candidate

LEAST_GAIN = 0.02
MOST_TRIED = 2


class CautiousProposer(PlannedProposer):
    """Tries what is in force and the best few that are predicted to be faster by ``LEAST_GAIN``; else nothing.

    Stock DDP and servers, of which nothing is predicted, are tried too; and where one of them is in force, the best
    few. Buckets of stock DDP are the script's, or those in force.
    """

    def _worth_trying(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        home, *others = (
            each for each in candidates if each.name != OTHER_FORM
        )  # which waits for what others show
        limit_ms = math.inf if home.predicted_ms is None else home.predicted_ms * (1 - LEAST_GAIN)
        better = [
            (each.predicted_ms, number) for number, each in enumerate(others) if each.predicted_ms is not None
        ]
        tried = [
            others[number] for predicted_ms, number in sorted(better)[:MOST_TRIED] if predicted_ms < limit_ms
        ]
        assert self._setting is not None
        question = self._setting.question
        tried += [each for each in others if each.name == SERVERS]
        tried += [each for each in others if each.strategy in (question.stock, question.script_stock)][:1]
        return [home, *tried] if tried else []
