"""The choices of a plan one after the other: strategies on the way from the recorded one to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from headway.errors import UserError
from headway.passes.base import Pass
from headway.replayer.replayer import Replayer
from headway.replayer.simulate import Simulation
from headway.scheduling.buckets import BucketSchedule
from headway.strategies.base import Strategy
from headway.strategies.decoupled.policy import DecoupledStrategy, options_of

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
        current = _in_the_form_of(replayer, wanted)
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
            each.describe(),
            played_all if count == len(passes) else replayer.replay(strategy, passes=passes[:count]),
        )
        for count, each in enumerate(passes, start=1)
    )


def _in_the_form_of(replayer: Replayer, wanted: Strategy) -> Strategy | None:
    """The recorded buckets under the strategy of ``wanted``; None where that cannot be said."""
    decided = replayer.recorded_strategy.decide(replayer.job)
    if not isinstance(wanted, DecoupledStrategy) or not isinstance(decided, BucketSchedule):
        return None
    options = options_of(decided, replayer.job.model) | {"gather_order": ()}
    return DecoupledStrategy.model_validate(options).spelled_out(replayer.job)


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
