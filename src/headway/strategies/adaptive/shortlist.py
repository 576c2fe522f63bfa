"""What is tried while a job trains, and which of it stays: every strategy says what is worth a measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from headway.strategies.adaptive.policy import HOME
from headway.strategies.adaptive.proposals import Trial
from headway.strategies.candidates import IN_FORCE, OTHER_FORM, Candidate, Question
from headway.strategies.registry import plugin_named

TIE = 0.005
CLOSE = 0.05  # the best two, and stock DDP, are measured again where they are no further apart
STOCK = "stock DDP"
ON_STOCK_DDP = ("parameter_server", "ddp")
"""The strategies whose steps stock DDP does, in the order in which they are tried."""


def shortlist(question: Question, *, by_guess: bool = False) -> list[Candidate]:
    """What is worth a measurement; what is in force comes first, and what is tried only in some cases last.

    Stock DDP and servers are there where they can be tried, without a prediction. ``by_guess`` says to predict nothing
    of decoupled schedules either.
    """
    asked_first = replace(question, learned=None) if by_guess else question
    ours = list(plugin_named(HOME).worth_trying(asked_first))
    if question.stock is None:
        return ours
    later = [candidate for candidate in ours if candidate.name == OTHER_FORM]
    first, *rest = [candidate for candidate in ours if candidate.name != OTHER_FORM]
    for name in ON_STOCK_DDP:
        rest += plugin_named(name).worth_trying(question)
    stock = Candidate(name=STOCK, strategy=question.stock)
    if question.on_stock_ddp is None:
        return [first, stock, *rest, *later]
    begun = Candidate(name=IN_FORCE, strategy=question.on_stock_ddp)
    earlier = first.model_copy(update={"name": "before"})
    return [begun, earlier, *([] if begun.strategy == stock.strategy else [stock]), *rest, *later]


def choose(trials: Sequence[Trial]) -> int:
    """Stock DDP, unless ours is measured to be faster by more than ``TIE`` and than the measurements of both are apart,
    or it was not tried.

    Of ours the fastest; of those within ``TIE`` of it one that gathers parameters, then the better predicted. If some
    were measured again, it is one of these: of the others nobody knows what their measurement is worth.
    """
    stock, ours = _sides(trials)
    if not ours:
        return _best_stock(trials, stock)
    ours = [i for i in ours if trials[i].uncertainty_ms < math.inf] or ours
    best_ms = min(trials[i].measured_ms for i in ours)

    def preference(index: int) -> tuple[bool, float, float]:
        candidate = trials[index].candidate
        predicted_ms = float("inf") if candidate.predicted_ms is None else candidate.predicted_ms
        other_form = getattr(candidate.strategy, "gather", "") != "parameters"
        return other_form, predicted_ms, trials[index].measured_ms

    chosen = min((i for i in ours if trials[i].measured_ms <= best_ms * (1 + TIE)), key=preference)
    if stock:
        rival = _best_stock(trials, stock)
        pair = trials[chosen], trials[rival]
        is_known = all(trial.uncertainty_ms < math.inf for trial in pair)
        if pair[0].measured_ms >= pair[1].measured_ms * (1 - TIE) or (is_known and _may_be_alike(*pair)):
            return rival
    return chosen


def _best_stock(trials: Sequence[Trial], stock: Sequence[int]) -> int:
    """The fastest of stock DDP's; the first one, whose buckets are the script's, where it is within ``TIE`` of it.

    If some were measured again, it is one of these.
    """
    stock = [i for i in stock if trials[i].uncertainty_ms < math.inf] or stock
    best_ms = min(trials[i].measured_ms for i in stock)
    return next(i for i in stock if trials[i].measured_ms <= best_ms * (1 + TIE))


def close_ones(trials: Sequence[Trial]) -> list[Candidate]:
    """The two fastest of ours where they are close, and stock DDP between them; each at most once.

    Stock DDP is measured again however slow it was: a disturbance is no reason to leave it. Where it may be the best,
    so is the next best of its other buckets, if it is close.
    """
    stock, ours = _sides(trials)
    ranked = sorted((trials[i] for i in ours), key=lambda trial: trial.measured_ms)[:2]
    again = ranked if len(ranked) == 2 and _close(*ranked) else []
    if stock:
        rival = trials[_best_stock(trials, stock)]
        if ranked and _may_be_as_fast(ranked[0], rival):
            again = [ranked[0], rival, *again[1:]]
        ranked_stock = sorted((trials[i] for i in stock), key=lambda trial: trial.measured_ms)
        next_best = [
            candidate for candidate in ranked_stock if candidate is not rival and _close(candidate, rival)
        ][:1]
        if next_best and (not ranked or _may_be_as_fast(rival, ranked[0])):
            again = [*(again if rival in again else [rival, *again]), *next_best]
    return [trial.candidate for trial in again]


def undecided(trials: Sequence[Trial]) -> list[Candidate]:
    """The fastest of ours and stock DDP, where their difference is within what measuring them again has shown."""
    stock, ours = _sides(trials)
    if not stock or not ours:
        return []
    best = min((trials[i] for i in ours), key=lambda trial: trial.measured_ms)
    rival = trials[_best_stock(trials, stock)]
    if not _close(best, rival) or not _may_be_alike(best, rival):
        return []
    return [best.candidate, rival.candidate]


def _sides(trials: Sequence[Trial]) -> tuple[list[int], list[int]]:
    """The indices of stock DDP and of ours."""
    stock = [i for i, trial in enumerate(trials) if trial.candidate.is_stock]
    return stock, [i for i in range(len(trials)) if i not in stock]


def _may_be_alike(first: Trial, second: Trial) -> bool:
    """Whether their measurements do not part them."""
    return abs(first.measured_ms - second.measured_ms) <= math.hypot(
        first.uncertainty_ms, second.uncertainty_ms
    )


def _close(first: Trial, second: Trial) -> bool:
    return _may_be_as_fast(first, second) and _may_be_as_fast(second, first)


def _may_be_as_fast(first: Trial, second: Trial) -> bool:
    return first.measured_ms <= second.measured_ms * (1 + CLOSE)
