"""Why a plan is faster: a waterfall of its choices, the bottleneck that it leaves, and what would go further."""

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
    """Milliseconds of the critical path of a step, by part and rank; a collective counts with the rank it was seen on.

    Communication on the critical path is exposed: were it hidden, the path would go through what hides it.
    """

    ms: Mapping[tuple[str, int], float] = field(hash=False)

    @property
    def step_ms(self) -> float:
        """The length of the path: the step of which it is one."""
        return sum(self.ms.values())

    @property
    def parts_ms(self) -> dict[str, float]:
        """The same by part alone, longest first."""
        found: dict[str, float] = defaultdict(float)
        for (part, _), part_ms in self.ms.items():
            found[part] += part_ms
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def rank_of(self, part: str) -> int:
        """The rank on which the path has most of ``part``."""
        own = {rank: part_ms for (name, rank), part_ms in self.ms.items() if name == part}
        return max(own, key=own.__getitem__)

    def scaled_to(self, step_ms: float) -> PathParts:
        """The same shares of a step that takes ``step_ms``."""
        factor = step_ms / self.step_ms if self.ms else 1.0
        return PathParts({each: part_ms * factor for each, part_ms in self.ms.items()})

    def less(self, after: PathParts) -> PathParts:
        """What ``after`` has less of; below 0 where it has more."""
        both = {**self.ms, **after.ms}
        return PathParts({each: self.ms.get(each, 0.0) - after.ms.get(each, 0.0) for each in both})


def iteration_of(outcome: Outcome) -> PathParts:
    """A mean iteration of a rank, where each takes its own: what all compute in it, and stand still for groups."""
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
    """The critical path of the typical replayed step, in the proportion in which it makes up the mean step."""
    found: dict[tuple[str, int], float] = defaultdict(float)
    for piece in diagnose(replayed_trace(replayer, played)).critical_path:
        found[_PARTS.get(piece.kind, REST), piece.rank] += piece.ms
    return PathParts(dict(found)).scaled_to(played.step_ms)


BUCKETS = frozenset(
    ("bucket_cap_bytes", "bucket_cap_mb", "bucket_caps_mb", "buckets", "gather_order", "gathers_after")
)
"""Options that mean something only with each other."""


@dataclass(frozen=True, slots=True)
class Step:
    """A choice that was taken: what it is, and the job from then on, under the strategy that is then in force."""

    name: str
    played: Simulation


def steps_to(replayer: Replayer, target: Strategy, played_target: Simulation) -> tuple[Step, ...]:
    """The choices from the recorded strategy to ``target``, each upon those before it: that which gains most is next.

    The last step is ``target``, whose replay is ``played_target``. Choices that cannot be made one by one are one.
    There are none where ``target`` is what was recorded.
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
        best = min(tried, key=lambda each: tried[each][1].step_ms)
        current, played = tried[best]
        taken.append(Step(best, played))
        del left[best]
    return (*taken, Step(", ".join(left) or f"{target.name} as planned", played_target))


def passes_upon(
    replayer: Replayer, strategy: Strategy, passes: Sequence[Pass], played_all: Simulation
) -> tuple[Step, ...]:
    """``passes`` one after the other upon ``strategy``, in the order in which they are applied.

    ``played_all`` is the replay of all of them.
    """
    return tuple(
        Step(
            pass_.describe(),
            played_all if count == len(passes) else replayer.replay(strategy, passes=passes[:count]),
        )
        for count, pass_ in enumerate(passes, start=1)
    )


def _differences(current: Strategy, wanted: Strategy) -> dict[str, Mapping[str, Any]]:
    """What ``wanted`` has otherwise, in choices of options that go together, by their names."""
    had, has = dict(current), dict(wanted)
    differ = {name for name in has if has[name] != had.get(name)}
    together = {name for name in differ if name in BUCKETS}
    groups = {"buckets": together} if together else {}
    groups |= {_words(name, has[name]): {name} for name in has if name in differ - together}
    return {said: {name: has[name] for name in group} for said, group in groups.items()}


def _words(name: str, value: object) -> str:
    words = name.replace("_", " ")
    return f"{words} {value}" if isinstance(value, str | int | float) else words


def _tried(
    replayer: Replayer, current: Strategy, left: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[Strategy, Simulation]]:
    """What each of the choices that are left makes of ``current``; without those that cannot be made by themselves."""
    found: dict[str, tuple[Strategy, Simulation]] = {}
    for name, options in left.items():
        try:
            changed = type(current).model_validate({**dict(current), **options})
            found[name] = changed, replayer.replay(changed)
        except (ValidationError, UserError):
            continue
    return found


MOST = 16.0
HALVINGS = 5
CLOSED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Further:
    """What alone would bring the step to ``target_ms``; None for what does not, however much of it there is.

    ``bandwidth`` and ``latency`` are factors of the links', ``workers`` the largest smaller number of workers;
    ``any_workers`` says whether the plan can have others than it was made for.
    """

    target_ms: float
    bandwidth: float | None
    latency: float | None
    workers: int | None
    any_workers: bool = True

    @property
    def sentence(self) -> str:
        """The same in words."""
        ways = []
        if self.bandwidth is not None:
            ways.append(f"{self.bandwidth:.2g} times the bandwidth")
        if self.latency is not None:
            ways.append(f"{self.latency:.2g} times the latency")
        if self.workers is not None:
            ways.append(f"{self.workers} workers" if self.workers > 1 else "a single worker")
        goal = f"halfway to the bound ({self.target_ms:.1f} ms)"
        if ways:
            return f"To get {goal}, this plan would need {' or '.join(ways)}."
        fewer = "Neither links" if self.any_workers else "Not even links"
        return f"{fewer} {MOST:g} times as fast{' nor fewer workers' * self.any_workers} would bring this plan {goal}."


def further(replayer: Replayer, plan: Candidate, *, bound_ms: float) -> Further:
    """What closes half of the distance from what is predicted of ``plan`` to ``bound_ms``."""
    target_ms = plan.predicted_ms - (plan.predicted_ms - bound_ms) * CLOSED_SHARE

    def reaches(what_if: WhatIf) -> bool | None:
        """None where the plan cannot be replayed so."""
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
    """A choice of a plan: the expected step with it and all before it, and what it saves; below 0 what it costs.

    ``saved`` is by part and rank of the critical path, and adds up to ``saved_ms``.
    """

    name: str
    step_ms: float
    saved_ms: float
    saved: PathParts

    @property
    def where(self) -> str:
        """Where on the critical path most of it is saved, or what grows most."""
        sign = 1 if self.saved_ms >= 0 else -1
        parts = {part: sign * ms for part, ms in self.saved.parts_ms.items()}
        part = max(parts, key=parts.__getitem__, default="")
        if not part or parts[part] <= 0:
            return ""
        own = {rank: sign * ms for (name, rank), ms in self.saved.ms.items() if name == part}
        rank = max(own, key=own.__getitem__)
        # Where the path goes by way of another rank than before, what one has less the other has more.
        stays = own[rank] <= parts[part] * (1 + SAME_SHARE)
        return f"{part}, most on rank {rank}" if stays else part


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan takes the step that it does. All times are expected ms, of a mean step.

    ``choices`` lead from ``from_ms``, the recorded step, to ``to_ms``, the one predicted of the plan; each is added to
    those before it. ``after`` is the critical path that is left. Where ranks do not wait for each
    other in every step there is none: then it is a mean iteration of a rank, and ``iterates`` says so.
    """

    from_ms: float
    to_ms: float
    choices: tuple[Choice, ...]
    after: PathParts
    further: Further | None = None
    iterates: bool = False

    @property
    def next_bottleneck(self) -> str:
        """What the critical path, or an iteration, is made of under the plan, in a sentence."""
        parts = self.after.parts_ms
        whole = self.after.step_ms
        shares = [f"{ms / whole:.0%} {part}" for part, ms in parts.items() if ms >= whole / 100]
        first = next(iter(parts))
        return (
            f"Under this plan {'a mean iteration' if self.iterates else 'the critical path'} is {', '.join(shares)}; "
            f"next to shorten is {first}, which is longest on rank {self.after.rank_of(first)}."
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
    replayer: Replayer, found: SearchResult, best: Candidate, *, go_further: bool = False
) -> Explanation | None:
    """Why ``best`` is as fast as it is; with ``go_further`` also what would bring it closer to the bound.

    A plan's passes are choices upon its strategy; other stages are one choice with the pipeline that has them, and so
    is a strategy whose ranks do not wait for each other in every step. None for plans of another number of
    micro-batches than was recorded.
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
        and found.bound is not None
        and best.recut is None
        and not best.changes_training
        and best.predicted_ms > found.bound_ms
    ):
        more = further(replayer, best, bound_ms=found.bound_ms)
    return Explanation(replayer.recorded_step_ms, best.predicted_ms, choices, after, more)


def _over_a_horizon(replayer: Replayer, best: Candidate) -> Explanation | None:
    """The strategy as one choice, then each pass; None for what was recorded so already."""
    recorded = replayer.recorded_strategy
    if plugin_of(recorded).has_horizon:
        return None
    names = [f"{best.strategy.name} instead of {recorded.name}", *(pass_.describe() for pass_ in best.passes)]
    outcomes = []
    for count in range(len(names)):
        outcome = replayer.replay_horizon(best.strategy, passes=best.passes[:count])
        assert outcome is not None
        outcomes.append(outcome)
    expected_ms = [replayer.expect_outcome(each).step_ms for each in outcomes]
    if abs(expected_ms[-1] - best.predicted_ms) > SAME_MS * best.predicted_ms:
        return None
    choices, after = _choices(replayer, zip(names, expected_ms, map(iteration_of, outcomes), strict=True))
    return Explanation(replayer.recorded_step_ms, best.predicted_ms, choices, after, iterates=True)


def _choices(
    replayer: Replayer, steps: Iterable[tuple[str, float, PathParts]]
) -> tuple[tuple[Choice, ...], PathParts]:
    """Steps that lead away from the recorded one as choices, and the path that is left.

    Of each it is given the name, the expected ms, and the replayed path, which is brought to these.
    """
    before_ms = replayer.recorded_step_ms
    before = path_of(replayer, replayer.base).scaled_to(before_ms)
    choices = []
    for name, step_ms, replayed in steps:
        after = replayed.scaled_to(step_ms)
        choices.append(Choice(name, step_ms, before_ms - step_ms, before.less(after)))
        before, before_ms = after, step_ms
    return tuple(choices), before


def _steps(replayer: Replayer, best: Candidate, played: Simulation) -> tuple[Step, ...]:
    """The choices of the strategy, then the passes; all of them replay as ``played``."""
    if not best.changed:
        return ()
    if best.recut is not None:
        return (Step(best.name, played),)
    without_passes = replayer.replay(best.strategy) if best.passes else played
    own = steps_to(replayer, best.strategy, without_passes)
    return (*own, *passes_upon(replayer, best.strategy, best.passes, played))
