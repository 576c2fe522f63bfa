"""Headway's own proposals: predicted from the recorded step by rank 0, a few of them to be confirmed by measuring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial

from headway.model import ModelSpec
from headway.scheduling import fusion
from headway.scheduling.buckets import BucketSchedule, GatherMode, forward_gather_order, make_buckets
from headway.strategies.adaptive.tuning.proposals import (
    Candidate,
    Learned,
    Question,
    Trial,
)
from headway.strategies.adaptive.tuning.servers import servers_for
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.planner import search
from headway.strategies.decoupled.planner.surrogate import Predictor, predict_disturbed, undisturbed
from headway.strategies.decoupled.policy import DecoupledStrategy

MOST_PLANNED = 3
GUESSED_SHARES = (1, 2, 4, 8, 16)  # the same where nothing can be predicted
FIXED_CAPS = ((4, 2), (16, 1))
"""As parts of the model, and in how many channels: in case that predictions are far off. Busy cores bear many
buckets in several channels least."""
STOCK_SHARES = (6, 12, 32)  # the same for stock DDP
FORM_GAIN = 0.005  # another form moves the optimizer's state and may need more memory: not for nothing
TIE = 0.005
CLOSE = 0.05  # the best two, and stock DDP, are measured again where they are no further apart
STOCK, SERVERS, IN_FORCE = "stock DDP", "servers", "in force"
OTHER_FORM = "other form"
EFFORT = 200


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
        strategy = candidate.strategy
        other = not isinstance(strategy, DecoupledStrategy) or strategy.gather != "parameters"
        return other, predicted_ms, trials[index].measured_ms

    chosen = min((i for i in ours if trials[i].measured_ms <= best_ms * (1 + TIE)), key=preference)
    if stock:
        rival = _best_stock(trials, stock)
        pair = trials[chosen], trials[rival]
        is_known = all(each.uncertainty_ms < math.inf for each in pair)
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
        others = sorted((trials[i] for i in stock), key=lambda trial: trial.measured_ms)
        next_best = [each for each in others if each is not rival and _close(each, rival)][:1]
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


def _may_be_alike(one: Trial, other: Trial) -> bool:
    """Whether their measurements do not part them."""
    return abs(one.measured_ms - other.measured_ms) <= math.hypot(one.uncertainty_ms, other.uncertainty_ms)


def _close(one: Trial, other: Trial) -> bool:
    return _may_be_as_fast(one, other) and _may_be_as_fast(other, one)


def _may_be_as_fast(one: Trial, other: Trial) -> bool:
    return one.measured_ms <= other.measured_ms * (1 + CLOSE)


def shortlist(question: Question, learned: Learned) -> list[Candidate]:
    """What is worth a measurement: what is in force, stock DDP, the planner's best, fixed caps; each once.

    ``OTHER_FORM`` is worth one only where as many channels prove to be the best.
    """
    model = ordered(question.model, learned)
    # Steps as they were seen, slowed down by what was in flight, are about what those that are planned are like.
    seen = Predictor(model, learned.profile, learned.cluster)
    channels = min(2, question.channels)
    profile = undisturbed(seen, question.in_force)
    predict = cache(partial(predict_disturbed, Predictor(model, profile, learned.cluster, costs=seen.costs)))
    found = search.plan(
        learned.job(model), forms=question.forms, channels=range(1, channels + 1), effort=EFFORT
    ).predicted_anew(predict)
    home = question.in_force.gather
    schedules = [(IN_FORCE, question.in_force)]
    schedules += [("planned", schedule) for schedule in _worth_trying(found, home)]
    schedules += [
        ("fixed cap", _capped(model, home, min(each, channels), share)) for share, each in FIXED_CAPS
    ]
    schedules += [(OTHER_FORM, schedule) for schedule in _of_other_form(found, home)]
    candidates: dict[BucketSchedule, Candidate] = {}
    for name, schedule in schedules:
        if schedule not in candidates:
            predicted_ms = predict(schedule) / 1e6
            candidates[schedule] = Candidate.of(name, schedule, model, predicted_ms)
    at_once, later = (
        [each for each in candidates.values() if (each.name == OTHER_FORM) == waits]
        for waits in (False, True)
    )
    return [*with_stock(at_once, question), *later]


def with_stock(ours: Sequence[Candidate], question: Question) -> list[Candidate]:
    """``ours``, of which the first is the schedule in force, with stock DDP and servers where they can be tried.

    What is in force comes first. Other buckets than the script's are tried too, without a prediction: where cores are
    busy they are what gains most, and those of a large model may be too many.
    """
    if question.stock is None:
        return list(ours)
    first, *others = ours
    own = [] if question.script_stock in (None, question.stock) else [question.script_stock]
    others += [Candidate(name=SERVERS, strategy=each) for each in servers_for(question)]
    others += [
        Candidate(name=STOCK, strategy=each)
        for each in (*own, *_with_other_buckets(question.stock, question.model))
    ]
    stock = Candidate(name=STOCK, strategy=question.stock)
    if question.on_stock_ddp is None:
        return [first, stock, *others]
    begun = Candidate(name=IN_FORCE, strategy=question.on_stock_ddp)
    earlier = first.model_copy(update={"name": "before"})
    return [begun, earlier, *([] if begun.strategy == stock.strategy else [stock]), *others]


def _with_other_buckets(
    own: DistributedDataParallelStrategy, model: ModelSpec
) -> Iterator[DistributedDataParallelStrategy]:
    """Smaller buckets than those of ``own``, then larger ones; on each side what is nearest to them comes first."""
    own_bytes = min(own.largest_cap_bytes, model.size_bytes)
    others_bytes = [model.size_bytes // share for share in STOCK_SHARES]
    smaller = sorted((each for each in others_bytes if 0 < each < own_bytes), reverse=True)
    larger = sorted(each for each in others_bytes if each > own_bytes)
    for each in (*smaller, *larger):
        yield DistributedDataParallelStrategy(bucket_cap_mb=each / 2**20)


def guesses(question: Question) -> list[Candidate]:
    """What to measure where nothing was learned: the schedule in force, and caps of several sizes."""
    model, home = question.model, question.in_force
    channels = min(2, question.channels)
    capped = [_capped(model, home.gather, channels, share) for share in GUESSED_SHARES]
    schedules = dict.fromkeys([home, *capped])
    ours = [
        Candidate.of("fixed cap" if number else IN_FORCE, schedule, model)
        for number, schedule in enumerate(schedules)
    ]
    return with_stock(ours, question)


def ordered(model: ModelSpec, learned: Learned) -> ModelSpec:
    """``model`` with the orders that the profile shows."""
    needs_ns, ready_ns = learned.profile.needs_ns, learned.profile.ready_ns
    orders = {
        "forward_order": tuple(sorted(needs_ns, key=needs_ns.__getitem__)),
        "ready_order": tuple(sorted(ready_ns, key=ready_ns.__getitem__)),
    }
    return model.model_copy(update=orders)


def _worth_trying(found: search.Planned, home: GatherMode) -> list[BucketSchedule]:
    """The best of the form in force, and of others that promise more, with each number of channels.

    What comes next is left out where it is much like another. Predictions are too close for one number of channels to
    rule out the other.
    """
    best_ns = found.best(home).step_ns
    worth = [
        planned.schedule
        for planned in found.schedules
        if planned.schedule.gather == home or planned.step_ns < best_ns * (1 - FORM_GAIN)
    ]
    manners = [(s.gather, s.channels) for s in worth]
    kinds = [(s.gather, s.channels, len(s.buckets)) for s in worth]
    first = [s for i, s in enumerate(worth) if manners[i] not in manners[:i]]
    other = [s for i, s in enumerate(worth) if kinds[i] not in kinds[:i] and s not in first]
    return [*first, *other][:MOST_PLANNED]


def _of_other_form(found: search.Planned, home: GatherMode) -> list[BucketSchedule]:
    """For each number of channels the best of another form, where that promises to be faster with as many channels."""
    best: dict[tuple[bool, int], search.PlannedSchedule] = {}
    for each in found.schedules:
        best.setdefault((each.schedule.gather == home, each.schedule.channels), each)
    return [
        other.schedule
        for (is_home, channels), other in best.items()
        if not is_home and other.step_ns < best[True, channels].step_ns * (1 - FORM_GAIN)
    ]


def _capped(model: ModelSpec, gather: GatherMode, channels: int, share: int) -> BucketSchedule:
    buckets = make_buckets(fusion.fixed(model, max(1, -(-model.size_bytes // share))), model)
    return BucketSchedule(buckets, forward_gather_order(model, buckets), gather, channels)
