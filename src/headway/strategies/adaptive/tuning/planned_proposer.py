"""The proposer of Headway's own schedules: rank 0 plans, while training goes on, and measurements decide."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from headway.errors import one_line
from headway.strategies.adaptive.tuning.planned import (
    OTHER_FORM,
    choose,
    close_ones,
    guesses,
    undecided,
)
from headway.strategies.adaptive.tuning.planning import Shortlist, planned
from headway.strategies.adaptive.tuning.planning_process import PlanningProcess
from headway.strategies.adaptive.tuning.proposals import (
    Alternative,
    Candidate,
    Question,
    Setting,
    Trial,
    TuningEndedError,
)
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy

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
            candidates = tuple(guesses(question))
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

    def _is_like_the_best(self, strategy: Alternative) -> bool:
        """Whether ours is the fastest so far, in as many channels."""
        if not self._told:
            return False
        best = min(self._told, key=lambda each: self._told[each][0]).strategy
        if not isinstance(best, DecoupledStrategy) or not isinstance(strategy, DecoupledStrategy):
            return False
        return best.channels == strategy.channels

    def _is_slower_already(self, strategy: Alternative) -> bool:
        """Whether stock DDP lost time already on the way from the script's buckets to those of ``strategy``, not by
        what a busy machine's measurements differ by. Where others are far ahead, it has to have gained that much.
        """
        told = {
            each.strategy.largest_cap_bytes: times[0]
            for each, times in self._told.items()
            if isinstance(each.strategy, DistributedDataParallelStrategy)
        }
        if not isinstance(strategy, DistributedDataParallelStrategy) or not told:
            return False
        own, wanted = next(iter(told)), strategy.largest_cap_bytes
        way = [ms for cap, ms in told.items() if own <= cap < wanted or wanted < cap <= own]
        if len(way) < 2:
            return False
        *before, last = way
        others = [times[0] for each, times in self._told.items() if not each.is_stock]
        is_far_behind = bool(others) and min(way) > min(others) * (1 + FAR)
        return last > min(before) * (1 - NOISE if is_far_behind else 1 + NOISE)

    def tell(self, candidate: Candidate, measured_ms: float) -> None:
        """Keep what was measured."""
        self._told[candidate].append(measured_ms)

    def choose(self, trials: Sequence[Trial]) -> int:
        """The fastest, but for ties; see ``choose``."""
        return choose(trials)


def _is_planned_in_place(question: Question) -> bool:
    return question.learned is None or len(question.model.parameters) <= PLANNED_IN_PLACE
