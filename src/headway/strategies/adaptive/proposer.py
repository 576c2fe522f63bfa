"""The proposers of Headway's schedules: rank 0 plans, while training goes on, and measurements decide."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

from headway.errors import one_line
from headway.strategies.adaptive.planning_process import PlanningProcess, Shortlist, planned
from headway.strategies.adaptive.policy import HOME
from headway.strategies.adaptive.proposals import Setting, Trial
from headway.strategies.adaptive.shortlist import choose, close_ones, shortlist, undecided
from headway.strategies.base import Strategy
from headway.strategies.candidates import OTHER_FORM, Candidate, Question, TuningEndedError
from headway.strategies.registry import plugin_of

MOST_REMATCHES = 2
NOISE = 0.03  # of one measurement of three steps, where cores are busy
FAR = 0.1  # as much as other buckets seldom gain
PLANNED_IN_PLACE = 32
"""Up to so many parameters planning is over before a process would have begun."""
ASKED_EVERY = 4
"""So many steps lie between two questions whether rank 0 has a plan."""
_log = logging.getLogger("headway")


class PlannedProposer:
    """Tries what is in force, stock DDP, the best few of the planner's schedules and a few fixed caps.

    Then once more, in turns, what cannot be told apart: the best two, and stock DDP, which stays unless one is faster,
    with the two best of its buckets.
    """

    learns = True

    def __init__(self) -> None:
        self._left: list[Candidate] = []
        self._told: dict[Candidate, list[float]] = defaultdict(list)
        self._rematches = 0
        self._setting: Setting | None = None
        self._planning: PlanningProcess | None = None  # on rank 0
        self._asked = 0

    def begin(self, setting: Setting) -> None:
        """Have rank 0 plan: a large model in a process of its own, so that training goes on."""
        self._setting = setting
        self._told.clear()
        self._rematches = self._asked = 0
        if self._planning is not None:  # for what is trained no more
            self._planning.stop()
            self._planning = None
        if setting.agreement.rank == 0 and not _is_planned_in_place(setting.question):
            self._planning = PlanningProcess(setting.question)

    def is_ready(self) -> bool:
        """Whether rank 0 has planned; every rank has its shortlist then, and where planning failed fixed caps.

        Raises TuningEndedError where not even these can be had.
        """
        assert self._setting is not None
        agreement, question = self._setting.agreement, self._setting.question
        self._asked += 1
        if _is_planned_in_place(question):
            text = planned(question) if agreement.rank == 0 else ""
        elif self._asked % ASKED_EVERY:
            return False
        else:
            text = "" if self._planning is None else self._planning.answer()
        if not agreement.number_from_rank_0(len(text)):
            return False
        short = Shortlist.model_validate_json(agreement.text_from_rank_0(text))
        candidates = short.candidates
        if short.problem:
            if question.learned is None:  # then these were what failed
                raise TuningEndedError(short.problem)
            if agreement.rank == 0:
                _log.warning("%s: caps are measured that nothing is predicted of", one_line(short.problem))
            candidates = tuple(shortlist(question, by_guess=True))
        self._left = self._worth_trying(candidates)
        return True

    def _worth_trying(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Which of the shortlist, of which the first is in force, are tried."""
        return list(candidates)

    def propose(self) -> Candidate | None:
        """The next of the list; behind it those that are close once more, and again if that has not parted them."""
        while self._left and not self._is_worth_trying(self._left[0]):
            del self._left[0]
        if not self._left and self._rematches < MOST_REMATCHES:
            self._rematches += 1
            trials = [Trial.of(candidate, times) for candidate, times in self._told.items()]
            self._left = close_ones(trials) if self._rematches == 1 else undecided(trials)
        return self._left.pop(0) if self._left else None

    def _is_worth_trying(self, candidate: Candidate) -> bool:
        """After what was measured; what was measured itself is tried again whenever that is wanted."""
        if candidate in self._told:
            return True
        if candidate.name == OTHER_FORM:
            return self._is_like_the_best(candidate.strategy)
        return not self._is_slower_already(candidate.strategy)

    def _is_like_the_best(self, strategy: Strategy) -> bool:
        """Whether ours is the fastest so far, in as many channels."""
        if not self._told:
            return False
        best: Any = min(self._told, key=lambda candidate: self._told[candidate][0]).strategy
        return best.name == strategy.name == HOME and bool(best.channels == cast("Any", strategy).channels)

    def _is_slower_already(self, strategy: Strategy) -> bool:
        """Whether stock DDP lost time already on the way from the script's buckets to those of ``strategy``, not by
        what a busy machine's measurements differ by. Where others are far ahead, it has to have gained that much.
        """
        stock_ms = {
            _cap_bytes(candidate.strategy): times[0]
            for candidate, times in self._told.items()
            if candidate.is_stock
        }
        if not any(
            candidate.strategy.name == strategy.name for candidate in self._told if candidate.is_stock
        ):
            return False
        script_cap, wanted = next(iter(stock_ms)), _cap_bytes(strategy)
        way = [ms for cap, ms in stock_ms.items() if script_cap <= cap < wanted or wanted < cap <= script_cap]
        if len(way) < 2:
            return False
        *before, last = way
        other_ms = [times[0] for candidate, times in self._told.items() if not candidate.is_stock]
        is_far_behind = bool(other_ms) and min(way) > min(other_ms) * (1 + FAR)
        return last > min(before) * (1 - NOISE if is_far_behind else 1 + NOISE)

    def tell(self, candidate: Candidate, measured_ms: float) -> None:
        """Keep what was measured."""
        self._told[candidate].append(measured_ms)

    def choose(self, trials: Sequence[Trial]) -> int:
        """The fastest, but for ties; see ``choose``."""
        return choose(trials)


def _cap_bytes(stock: Any) -> int:
    """How much a bucket of stock DDP's takes at most."""
    cap_bytes: int = stock.largest_cap_bytes
    return cap_bytes


def _is_planned_in_place(question: Question) -> bool:
    return question.learned is None or len(question.model.parameters) <= PLANNED_IN_PLACE


LEAST_PREDICTED_GAIN = 0.02
MOST_TRIED = 2


class CautiousProposer(PlannedProposer):
    """Tries what is in force and the best few that are predicted to be faster by ``LEAST_GAIN``; else nothing.

    Stock DDP and servers, of which nothing is predicted, are tried too; and where one of them is in force, the best
    few. Buckets of stock DDP are the script's, or those in force.
    """

    def _worth_trying(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        home, *rest = (
            candidate for candidate in candidates if candidate.name != OTHER_FORM
        )  # which waits for what others show
        limit_ms = math.inf if home.predicted_ms is None else home.predicted_ms * (1 - LEAST_PREDICTED_GAIN)
        better = [
            (candidate.predicted_ms, number)
            for number, candidate in enumerate(rest)
            if candidate.predicted_ms is not None
        ]
        tried = [
            rest[number] for predicted_ms, number in sorted(better)[:MOST_TRIED] if predicted_ms < limit_ms
        ]
        assert self._setting is not None
        question = self._setting.question
        tried += [candidate for candidate in rest if _is_carried(candidate)]
        tried += [
            candidate for candidate in rest if candidate.strategy in (question.stock, question.script_stock)
        ][:1]
        return [home, *tried] if tried else []


def _is_carried(candidate: Candidate) -> bool:
    """Whether stock DDP does its steps, with something else than all-reduces of its own."""
    steps = plugin_of(candidate.strategy).on_stock_ddp(candidate.strategy)
    return steps is not None and steps.carry is not None
