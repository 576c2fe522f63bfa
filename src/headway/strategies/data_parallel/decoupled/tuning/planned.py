"""Headway's own proposals: predicted from the recorded step by rank 0, a few of them to be confirmed by measuring."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from headway.model import ModelSpec
from headway.planning import planner
from headway.planning.surrogate import Predictor
from headway.scheduling import fusion
from headway.scheduling.buckets import BucketSchedule, GatherMode, forward_gather_order, make_buckets
from headway.strategies.data_parallel.decoupled.tuning.proposals import (
    Candidate,
    Learned,
    Setting,
    Trial,
    TuningEndedError,
)

MOST_PLANNED = 3
GUESSED_SHARES = (1, 2, 4, 8, 16)  # the same where nothing can be predicted
CAP_SHARES = (4, 16)  # fixed caps, as parts of the model, in case that predictions are far off
FORM_GAIN = 0.02  # another form moves the optimizer's state, so it must promise as much
TIE = 0.005
CLOSE = 0.05  # the best two are measured again where they are no further apart
EFFORT = 200


class Shortlist(BaseModel):
    """What rank 0 tells the others: what to try, or why nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidates: tuple[Candidate, ...] = ()
    problem: str = ""


class PlannedProposer:
    """Tries the best few of the planner's schedules, the one in force and a few fixed caps; then the best two again."""

    learns = True

    def __init__(self) -> None:
        self._left: list[Candidate] = []
        self._told: dict[Candidate, list[float]] = defaultdict(list)
        self._repeated = False

    def begin(self, setting: Setting) -> None:
        """Have rank 0 plan; every rank gets its shortlist."""
        text = setting.agreement.text_from_rank_0(_planned(setting) if setting.agreement.rank == 0 else "")
        short = Shortlist.model_validate_json(text)
        if short.problem:
            raise TuningEndedError(short.problem)
        self._left = list(short.candidates)
        self._told.clear()
        self._repeated = False

    def propose(self) -> Candidate | None:
        """The next of the list; behind it the best two once more, if they are close."""
        if not self._left and not self._repeated:
            self._repeated = True
            self._left = close_ones([Trial(c, statistics.mean(times)) for c, times in self._told.items()])
        return self._left.pop(0) if self._left else None

    def tell(self, candidate: Candidate, measured_ms: float) -> None:
        """Keep what was measured."""
        self._told[candidate].append(measured_ms)

    def choose(self, trials: Sequence[Trial]) -> int:
        """The fastest; see ``choose``."""
        return choose(trials)


def choose(trials: Sequence[Trial]) -> int:
    """The fastest trial. Of those within ``TIE`` of it one that gathers parameters, then the better predicted."""
    best_ms = min(trial.measured_ms for trial in trials)

    def preference(index: int) -> tuple[bool, float, float]:
        candidate = trials[index].candidate
        predicted_ms = float("inf") if candidate.predicted_ms is None else candidate.predicted_ms
        return candidate.strategy.gather != "parameters", predicted_ms, trials[index].measured_ms

    return min((i for i, t in enumerate(trials) if t.measured_ms <= best_ms * (1 + TIE)), key=preference)


def close_ones(trials: Sequence[Trial]) -> list[Candidate]:
    """The two fastest, if their difference may be noise."""
    ranked = sorted(trials, key=lambda trial: trial.measured_ms)[:2]
    if len(ranked) < 2 or ranked[1].measured_ms > ranked[0].measured_ms * (1 + CLOSE):
        return []
    return [trial.candidate for trial in ranked]


def shortlist(setting: Setting, learned: Learned) -> list[Candidate]:
    """What is worth a measurement: the schedule in force, the planner's best, fixed caps; each schedule once."""
    model = ordered(setting.model, learned)
    predictor = Predictor(model, learned.profile, learned.cluster)
    channels = min(2, setting.channels)
    found = planner.plan(
        learned.job(model), forms=setting.forms, channels=range(1, channels + 1), effort=EFFORT
    )
    home = setting.in_force.gather
    schedules = [("in force", setting.in_force)]
    schedules += [("planned", schedule) for schedule in _worth_trying(found, home)]
    schedules += [("fixed cap", schedule) for schedule in _capped(model, home, channels, CAP_SHARES)]
    seen: set[BucketSchedule] = set()
    candidates = []
    for name, schedule in schedules:
        if schedule not in seen:
            seen.add(schedule)
            predicted_ms = predictor.predict(schedule) / 1e6
            candidates.append(Candidate.of(name, schedule, model, predicted_ms))
    return candidates


def guesses(setting: Setting) -> list[Candidate]:
    """What to measure where nothing was learned: the schedule in force, and caps of several sizes."""
    model, home = setting.model, setting.in_force
    capped = _capped(model, home.gather, min(2, setting.channels), GUESSED_SHARES)
    schedules = dict.fromkeys([home, *capped])
    return [
        Candidate.of("fixed cap" if number else "in force", schedule, model)
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


def _planned(setting: Setting) -> str:
    try:
        found = guesses(setting) if setting.learned is None else shortlist(setting, setting.learned)
        short = Shortlist(candidates=tuple(found))
    except Exception as error:  # the other ranks wait for an answer, and training goes on without a plan
        short = Shortlist(problem=f"planning failed: {type(error).__name__}: {error}")
    return short.model_dump_json()


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


def _capped(
    model: ModelSpec, gather: GatherMode, channels: int, shares: Sequence[int]
) -> Iterator[BucketSchedule]:
    for share in shares:
        buckets = make_buckets(fusion.fixed(model, max(1, -(-model.size_bytes // share))), model)
        order = forward_gather_order(model, buckets)
        yield BucketSchedule(buckets, order, gather, channels)
