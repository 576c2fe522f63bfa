"""Which decoupled schedules are worth a measurement while a job trains: predicted from the steps that were watched."""

from __future__ import annotations

from functools import cache, partial

from headway.model import ModelSpec
from headway.scheduling import fusion
from headway.scheduling.buckets import BucketSchedule, GatherMode, forward_gather_order, make_buckets
from headway.strategies.candidates import IN_FORCE, OTHER_FORM, Candidate, Learned, Question
from headway.strategies.decoupled.planner import search as planner
from headway.strategies.decoupled.planner.surrogate import Predictor, predict_disturbed, undisturbed
from headway.strategies.decoupled.policy import strategy_of

MOST_PLANNED = 3
GUESSED_SHARES = (1, 2, 4, 8, 16)  # the same where nothing can be predicted
FIXED_CAPS = ((4, 2), (16, 1))
"""As parts of the model, and in how many channels: in case that predictions are far off. Busy cores bear many
buckets in several channels least."""
FORM_GAIN = 0.005  # another form moves the optimizer's state and may need more memory: not for nothing
EFFORT = 200


def worth_trying(question: Question) -> list[Candidate]:
    """The shortlist; of fixed caps alone where nothing was learned. What is in force comes first."""
    return guesses(question) if question.learned is None else shortlist(question, question.learned)


def candidate(
    name: str, schedule: BucketSchedule, model: ModelSpec, predicted_ms: float | None = None
) -> Candidate:
    """The candidate that decides ``schedule``."""
    return Candidate(name=name, strategy=strategy_of(schedule, model), predicted_ms=predicted_ms)


def shortlist(question: Question, learned: Learned) -> list[Candidate]:
    """What is worth a measurement: what is in force, the planner's best, fixed caps, then the best of another form.

    There is no schedule twice.
    """
    model = ordered(question.model, learned)
    # Steps as they were seen, slowed down by what was in flight, are about what those that are planned are like.
    seen = Predictor(model, learned.profile, learned.cluster)
    channels = min(2, question.channels)
    profile = undisturbed(seen, question.in_force)
    predict = cache(partial(predict_disturbed, Predictor(model, profile, learned.cluster, costs=seen.costs)))
    found = planner.plan(
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
            candidates[schedule] = candidate(name, schedule, model, predicted_ms)
    return sorted(candidates.values(), key=lambda each: each.name == OTHER_FORM)


def guesses(question: Question) -> list[Candidate]:
    """What to measure where nothing was learned: the schedule in force, and caps of several sizes."""
    model, home = question.model, question.in_force
    channels = min(2, question.channels)
    capped = [_capped(model, home.gather, channels, share) for share in GUESSED_SHARES]
    schedules = dict.fromkeys([home, *capped])
    return [
        candidate("fixed cap" if number else IN_FORCE, schedule, model)
        for number, schedule in enumerate(schedules)
    ]


def ordered(model: ModelSpec, learned: Learned) -> ModelSpec:
    """``model`` with the orders that the profile shows."""
    needs_ns, ready_ns = learned.profile.needs_ns, learned.profile.ready_ns
    orders = {
        "forward_order": tuple(sorted(needs_ns, key=needs_ns.__getitem__)),
        "ready_order": tuple(sorted(ready_ns, key=ready_ns.__getitem__)),
    }
    return model.model_copy(update=orders)


def _worth_trying(found: planner.Planned, home: GatherMode) -> list[BucketSchedule]:
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


def _of_other_form(found: planner.Planned, home: GatherMode) -> list[BucketSchedule]:
    """For each number of channels the best of another form, where that promises to be faster with as many channels."""
    best: dict[tuple[bool, int], planner.PlannedSchedule] = {}
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
