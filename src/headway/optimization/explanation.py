"""Explains why a plan is faster: a waterfall of its choices, the next bottleneck, and what would help further."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from headway.diagnosis.diagnosis import diagnose
from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.optimization.result import SearchResult
from headway.passes.base import Pass
from headway.replayer.as_trace import replayed_trace
from headway.replayer.replayer import Replayer
from headway.simulator.simulate import Simulation
from headway.simulator.what_if import WhatIf
from headway.strategies.base import Strategy
from headway.strategies.horizon import Outcome
from headway.strategies.registry import plugin_of
from headway.trace.events import Kind

COMPUTATION, COMMUNICATION, WAITING, UPDATE, REST = (
    "computation", "exposed communication", "waiting", "update", "rest",
)  # fmt: skip
_PARTS = {
    Kind.FORWARD: COMPUTATION,
    Kind.BACKWARD: COMPUTATION,
    Kind.FORWARD_PASS: COMPUTATION,
    Kind.BACKWARD_PASS: COMPUTATION,
    Kind.COLLECTIVE: COMMUNICATION,
    Kind.SEND: COMMUNICATION,
    Kind.RECEIVE: COMMUNICATION,
    Kind.WAIT: WAITING,
    Kind.UPDATE: UPDATE,
    Kind.OPTIMIZER: UPDATE,
}


@dataclass(frozen=True, slots=True)
class PathParts:
    """Milliseconds on the critical path of a step, by part and rank.

    A collective counts for the rank on which the path crosses it. Communication on the critical path is exposed: if it
    were hidden, the path would run through the computation that hides it.
    """

    ms: Mapping[tuple[str, int], float] = field(hash=False)

    @property
    def step_ms(self) -> float:
        """The length of the path, which is the step time."""
        return sum(self.ms.values())

    @property
    def parts_ms(self) -> dict[str, float]:
        """Milliseconds by part, longest first."""
        by_part: dict[str, float] = defaultdict(float)
        for (part, _), part_ms in self.ms.items():
            by_part[part] += part_ms
        return dict(sorted(by_part.items(), key=lambda item: -item[1]))

    def rank_of(self, part: str) -> int:
        """The rank with most of ``part`` on the path."""
        rank_ms = {rank: part_ms for (name, rank), part_ms in self.ms.items() if name == part}
        return max(rank_ms, key=rank_ms.__getitem__)

    def scaled_to(self, step_ms: float) -> PathParts:
        """The same proportions for a step of ``step_ms``."""
        factor = step_ms / self.step_ms if self.ms else 1.0
        return PathParts({part_and_rank: part_ms * factor for part_and_rank, part_ms in self.ms.items()})

    def less(self, after: PathParts) -> PathParts:
        """The milliseconds that ``after`` saves by part and rank; negative where it has more."""
        both = {**self.ms, **after.ms}
        return PathParts(
            {
                part_and_rank: self.ms.get(part_and_rank, 0.0) - after.ms.get(part_and_rank, 0.0)
                for part_and_rank in both
            }
        )


def iteration_of(outcome: Outcome) -> PathParts:
    """The mean iteration of asynchronous ranks, split into computation and waiting for groups."""
    count = sum(outcome.iterations)
    duration_ns = outcome.until_ns - outcome.from_ns
    waiting_ms = {
        (WAITING, rank): standing_ns / count / 1e6 for rank, standing_ns in enumerate(outcome.standing_ns)
    }
    own_ms = {
        (COMPUTATION, rank): (duration_ns - standing_ns) / count / 1e6
        for rank, standing_ns in enumerate(outcome.standing_ns)
    }
    return PathParts({**own_ms, **waiting_ms})


def path_of(replayer: Replayer, played: Simulation) -> PathParts:
    """The critical path of the typical replayed step, scaled to the mean step."""
    part_ms: dict[tuple[str, int], float] = defaultdict(float)
    for piece in diagnose(replayed_trace(replayer, played)).critical_path:
        part_ms[_PARTS.get(piece.kind, REST), piece.rank] += piece.ms
    return PathParts(dict(part_ms)).scaled_to(played.step_ms)


BUCKETS = frozenset(
    ("bucket_cap_bytes", "bucket_cap_mb", "bucket_caps_mb", "buckets", "gather_order", "gathers_after")
)
"""Options that only make sense together."""


@dataclass(frozen=True, slots=True)
class Step:
    """One choice on the way to a plan, and the replay with it and all choices before it."""

    name: str
    played: Simulation


def steps_to(replayer: Replayer, target: Strategy, played_target: Simulation) -> tuple[Step, ...]:
    """The choices that lead from the recorded strategy to ``target``, greedily by gain, each added to those before.

    The last step is ``target``, whose replay is ``played_target``. Choices that only work together form one step.
    Returns no steps if ``target`` is what was recorded.
    """
    recorded = replayer.recorded_strategy
    current: Strategy | None = recorded.spelled_out(replayer.job)
    wanted = target.spelled_out(replayer.job)
    taken: list[Step] = []
    if type(recorded) is not type(target):
        current = wanted.with_buckets(recorded.decide(replayer.job), replayer.job)
        name = f"{target.name} instead of {recorded.name}"
        if current is None or current == wanted:
            return (Step(name, played_target),)
        taken.append(Step(name, replayer.replay(current)))
    assert current is not None
    left = _differences(current, wanted)
    if not left and not taken:
        return ()
    while len(left) > 1 and (tried := _tried(replayer, current, left)):
        best = min(tried, key=lambda choice: tried[choice][1].step_ms)
        current, played = tried[best]
        taken.append(Step(best, played))
        del left[best]
    return (*taken, Step(", ".join(left) or f"{target.name} as planned", played_target))


def passes_upon(
    replayer: Replayer, strategy: Strategy, passes: Sequence[Pass], played_all: Simulation
) -> tuple[Step, ...]:
    """One step per pass on top of ``strategy``, in the order of application.

    ``played_all`` is the replay with all of them.
    """
    return tuple(
        Step(
            pass_.describe(),
            played_all if count == len(passes) else replayer.replay(strategy, passes=passes[:count]),
        )
        for count, pass_ in enumerate(passes, start=1)
    )


def _differences(current: Strategy, wanted: Strategy) -> dict[str, Mapping[str, Any]]:
    """The options in which ``wanted`` differs, grouped into choices, by the name of the choice."""
    had, has = dict(current), dict(wanted)
    differ = {name for name in has if has[name] != had.get(name)}
    together = {name for name in differ if name in BUCKETS}
    groups = {"buckets": together} if together else {}
    groups |= {_words(name, has[name]): {name} for name in has if name in differ - together}
    return {words: {name: has[name] for name in group} for words, group in groups.items()}


def _words(name: str, value: object) -> str:
    words = name.replace("_", " ")
    return f"{words} {value}" if isinstance(value, str | int | float) else words


def _tried(
    replayer: Replayer, current: Strategy, left: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[Strategy, Simulation]]:
    """Replays ``current`` with each remaining choice, without those that are not valid by themselves."""
    replayed: dict[str, tuple[Strategy, Simulation]] = {}
    for name, options in left.items():
        try:
            changed = type(current).model_validate({**dict(current), **options})
            replayed[name] = changed, replayer.replay(changed)
        except (ValidationError, UserError):
            continue
    return replayed


MOST = 16.0
HALVINGS = 5
CLOSED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Further:
    """Single changes that would each bring the step to ``target_ms``; None if a change alone is never enough.

    ``bandwidth`` and ``latency`` are factors on the links; ``workers`` is the largest sufficient smaller number.
    ``any_workers`` says whether the plan works with another number of workers.
    """

    target_ms: float
    bandwidth: float | None
    latency: float | None
    workers: int | None
    any_workers: bool = True

    @property
    def sentence(self) -> str:
        """The changes in one sentence."""
        ways = []
        if self.bandwidth is not None:
            ways.append(f"{self.bandwidth:.2g} times the bandwidth")
        if self.latency is not None:
            ways.append(f"{self.latency:.2g} times the latency")
        if self.workers is not None:
            ways.append(f"{self.workers} workers" if self.workers > 1 else "a single worker")
        goal = f"halfway to the bound ({self.target_ms:.1f} ms)"
        if ways:
            return f"To get {goal}, this plan needs {' or '.join(ways)}."
        fewer = "Neither links" if self.any_workers else "Not even links"
        return f"{fewer} {MOST:g} times as fast{' nor fewer workers' * self.any_workers} would bring this plan {goal}."


def further(replayer: Replayer, plan: Candidate, *, bound_ms: float) -> Further:
    """Find what closes half the gap between the prediction for ``plan`` and ``bound_ms``."""
    target_ms = plan.predicted_ms - (plan.predicted_ms - bound_ms) * CLOSED_SHARE

    def reaches(what_if: WhatIf) -> bool | None:
        """None if the plan cannot be replayed with this change."""
        try:
            played = replayer.replay(plan.strategy, what_if, passes=plan.passes)
            return replayer.expect(played).step_ms <= target_ms
        except UserError:
            return None

    def least(what_if: Callable[[float], WhatIf], sign: int) -> float | None:
        if not reaches(what_if(MOST**sign)):
            return None
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if reaches(what_if(MOST ** (sign * middle))):
                high = middle
            else:
                low = middle
        return float(MOST ** (sign * high))

    workers, answers = replayer.trace.world_size // 2, []
    while workers >= 1:
        answers.append(reaches(WhatIf(workers=workers)))
        if answers[-1]:
            break
        workers //= 2
    any_workers = not answers or any(answer is not None for answer in answers)
    bandwidth = least(lambda factor: WhatIf(bandwidth=factor), 1)
    latency = least(lambda factor: WhatIf(latency=factor), -1)
    return Further(target_ms, bandwidth, latency, workers or None, any_workers)


SAME_MS = 1e-6
SAME_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of a plan: the expected step with it and all choices before it, and the time that it saves.

    ``saved_ms`` is negative if the choice costs time; ``saved`` splits it by part and rank of the critical path.
    """

    name: str
    step_ms: float
    saved_ms: float
    saved: PathParts

    @property
    def where(self) -> str:
        """The part of the critical path that shrinks most, or grows most if the choice costs time."""
        sign = 1 if self.saved_ms >= 0 else -1
        parts = {part: sign * ms for part, ms in self.saved.parts_ms.items()}
        part = max(parts, key=parts.__getitem__, default="")
        if not part or parts[part] <= 0:
            return ""
        rank_ms = {rank: sign * ms for (name, rank), ms in self.saved.ms.items() if name == part}
        rank = max(rank_ms, key=rank_ms.__getitem__)
        # If the path moves to another rank, one rank loses what the other gains.
        stays = rank_ms[rank] <= parts[part] * (1 + SAME_SHARE)
        return f"{part}, most on rank {rank}" if stays else part


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan has its predicted step time. All times are expected ms of a mean step.

    ``choices`` lead from ``from_ms``, the recorded step, to ``to_ms``, the predicted one; each adds to those before it.
    ``after`` is the critical path under the plan. Asynchronous strategies have no critical path: ``iterates`` then says
    that ``after`` is the mean iteration of a rank.
    """

    from_ms: float
    to_ms: float
    choices: tuple[Choice, ...]
    after: PathParts
    further: Further | None = None
    iterates: bool = False

    @property
    def next_bottleneck(self) -> str:
        """The composition of the critical path (or iteration) under the plan, in one sentence."""
        parts = self.after.parts_ms
        step_ms = self.after.step_ms
        shares = [f"{ms / step_ms:.0%} {part}" for part, ms in parts.items() if ms >= step_ms / 100]
        first = next(iter(parts))
        return (
            f"Under this plan {'a mean iteration' if self.iterates else 'the critical path'} is {', '.join(shares)}; "
            f"the next bottleneck is {first}, longest on rank {self.after.rank_of(first)}."
        )

    def to_document(self) -> dict[str, Any]:
        """The part ``explanation`` of the document that ``headway optimize --json`` prints."""
        return {
            "from_ms": self.from_ms,
            "to_ms": self.to_ms,
            "choices": [
                {
                    "name": choice.name,
                    "step_ms": choice.step_ms,
                    "saved_ms": choice.saved_ms,
                    "where": choice.where,
                    "saved_parts_ms": choice.saved.parts_ms,
                }
                for choice in self.choices
            ],
            "critical_path_ms": self.after.parts_ms,
            "next_bottleneck": self.next_bottleneck,
            "further": None
            if self.further is None
            else {
                "target_ms": self.further.target_ms,
                "bandwidth": self.further.bandwidth,
                "latency": self.further.latency,
                "workers": self.further.workers,
                "sentence": self.further.sentence,
            },
        }


def explain(
    replayer: Replayer, result: SearchResult, best: Candidate, *, go_further: bool = False
) -> Explanation | None:
    """Explain the predicted time of ``best``; with ``go_further``, also what would bring it closer to the bound.

    Passes are choices on top of the strategy. A pipeline with other stages counts as one choice, and so does an
    asynchronous strategy. Returns None for a plan with another number of micro-batches than was recorded.
    """
    if best.of_other_size:
        return None
    if plugin_of(best.strategy).has_horizon:
        return _over_a_horizon(replayer, best)
    mesh = None if best.recut is None else best.recut.mesh
    target = replayer.replay(best.strategy, passes=best.passes, mesh=mesh)
    if abs(replayer.expect(target).step_ms - best.predicted_ms) > SAME_MS * best.predicted_ms:
        return None
    choices, after = _choices(
        replayer,
        (
            (step.name, replayer.expect(step.played).step_ms, path_of(replayer, step.played))
            for step in _steps(replayer, best, target)
        ),
    )
    more = None
    if (
        go_further
        and result.bound is not None
        and best.recut is None
        and not best.changes_training
        and best.predicted_ms > result.bound_ms
    ):
        more = further(replayer, best, bound_ms=result.bound_ms)
    return Explanation(replayer.recorded_step_ms, best.predicted_ms, choices, after, more)


def _over_a_horizon(replayer: Replayer, best: Candidate) -> Explanation | None:
    """The strategy as one choice, then each pass; None if the recorded strategy is asynchronous already."""
    recorded = replayer.recorded_strategy
    if plugin_of(recorded).has_horizon:
        return None
    names = [f"{best.strategy.name} instead of {recorded.name}", *(pass_.describe() for pass_ in best.passes)]
    outcomes = []
    for count in range(len(names)):
        outcome = replayer.replay_horizon(best.strategy, passes=best.passes[:count])
        assert outcome is not None
        outcomes.append(outcome)
    expected_ms = [replayer.expect_outcome(outcome_so_far).step_ms for outcome_so_far in outcomes]
    if abs(expected_ms[-1] - best.predicted_ms) > SAME_MS * best.predicted_ms:
        return None
    choices, after = _choices(replayer, zip(names, expected_ms, map(iteration_of, outcomes), strict=True))
    return Explanation(replayer.recorded_step_ms, best.predicted_ms, choices, after, iterates=True)


def _choices(
    replayer: Replayer, steps: Iterable[tuple[str, float, PathParts]]
) -> tuple[tuple[Choice, ...], PathParts]:
    """Turn steps (name, expected ms, replayed path) into choices; also returns the path under the last step."""
    before_ms = replayer.recorded_step_ms
    before = path_of(replayer, replayer.base).scaled_to(before_ms)
    choices = []
    for name, step_ms, replayed in steps:
        after = replayed.scaled_to(step_ms)
        choices.append(Choice(name, step_ms, before_ms - step_ms, before.less(after)))
        before, before_ms = after, step_ms
    return tuple(choices), before


def _steps(replayer: Replayer, best: Candidate, played: Simulation) -> tuple[Step, ...]:
    """The choices of the strategy, then the passes; ``played`` is the replay of the complete plan."""
    if not best.changed:
        return ()
    if best.recut is not None:
        return (Step(best.name, played),)
    without_passes = replayer.replay(best.strategy) if best.passes else played
    strategy_steps = steps_to(replayer, best.strategy, without_passes)
    return (*strategy_steps, *passes_upon(replayer, best.strategy, best.passes, played))
