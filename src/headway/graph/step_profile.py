"""Step profiles: when a step readies each gradient and needs each module, without any wait.

What a planner has to know of a recorded step. It can be taken from recorded timelines, or written from the times of a
model's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.graph.timeline import Item, Part, Point, Timeline


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of computation on the rank that has the most of it. All times are nanoseconds.

    ``needs_ns`` says for each module when forward first needs its parameters, after forward's start; ``ready_ns`` for
    each parameter when its gradient is complete, after backward's start. ``between_ns`` lies between forward's end and
    backward's start, ``tail_ns`` between backward's end and the optimizer's step, ``rest_ns`` from there to the next
    forward. ``optimizer_ns`` is one update of all parameters by one rank, and is in none of the others. What reads of
    gradients take is in none: it depends on the strategy.
    """

    forward_ns: int
    backward_ns: int
    needs_ns: Mapping[str, int]
    ready_ns: Mapping[str, int]
    between_ns: int = 0
    tail_ns: int = 0
    rest_ns: int = 0
    optimizer_ns: int = 0

    @property
    def computation_ns(self) -> int:
        """The whole step without the optimizer's update."""
        return self.forward_ns + self.between_ns + self.backward_ns + self.tail_ns + self.rest_ns

    def timeline(self, rank: int = 0, step: int = 0) -> Timeline:
        """A step of which this is the profile, without anything that the script reads."""
        uses = sorted(self.needs_ns.items(), key=lambda pair: pair[1])
        readies = sorted(self.ready_ns.items(), key=lambda pair: pair[1])
        items = [
            *_along(Part.FORWARD, Point.USE, uses, self.forward_ns),
            Item(Part.REST, "", self.between_ns),
            *_along(Part.BACKWARD, Point.READY, readies, self.backward_ns),
            Item(Point.BACKWARD_END),
            Item(Part.REST, "", self.tail_ns),
            Item(Point.STEP),
            Item(Part.OPTIMIZER, "", self.optimizer_ns),
            Item(Part.REST, "", self.rest_ns),
        ]
        return Timeline(rank, step, tuple(items))


def _along(part: str, point: str, moments: Sequence[tuple[str, int]], length_ns: int) -> list[Item]:
    """``length_ns`` of a pass, with points at their moments."""
    items = []
    before = 0
    for name, moment in moments:
        items += [Item(part, "", moment - before), Item(point, name)]
        before = moment
    return [*items, Item(part, "", length_ns - before)]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """How long one module computes in forward and in backward, and the parameters that are its own.

    ``kept_bytes`` is what its forward leaves for backward, and ``cut_bytes`` what is passed on where the model is cut
    behind it: 0 where they are not known, and where it is not to be cut.
    """

    module: str
    parameters: tuple[str, ...]
    forward_ns: int
    backward_ns: int
    kept_bytes: int = 0
    cut_bytes: int = 0


def profile_of(timelines: Mapping[int, Sequence[Timeline]]) -> StepProfile:
    """The mean step of the slowest of the recorded ranks (``timelines[rank][position]``).

    In a step of several passes, forward is the first use of a module and backward the last one that readies gradients.
    What lies between them counts to ``between_ns``. Steps that readied nothing are left out, unless all did.
    """
    means = [_mean([_one(timeline) for timeline in steps]) for steps in timelines.values()]
    return max(means, key=lambda profile: profile.computation_ns + profile.optimizer_ns)


def _one(timeline: Timeline) -> StepProfile:
    """One step's profile. Time is that of its computation, without waits and without the optimizer's update."""
    forward_at = forward_end = backward_at = backward_end = step_at = None
    uses: dict[str, int] = {}
    ready: dict[str, int] = {}
    before = ""  # the last pass that computed
    now = 0
    for item in timeline.items:
        match item.kind:
            case Point.USE:
                forward_at = now if forward_at is None else forward_at
                uses.setdefault(item.name, now)
            case Part.FORWARD:
                forward_at = now if forward_at is None else forward_at
                forward_end = now + item.duration_ns if backward_at is None else forward_end
            case Part.BACKWARD if before != Part.BACKWARD:
                backward_at = now
            case Point.READY:
                ready[item.name] = now
            case Point.BACKWARD_END:
                backward_end = now
            case Point.STEP:
                step_at = now if step_at is None else step_at
        if item.kind in (Part.FORWARD, Part.BACKWARD) and item.duration_ns:
            before = item.kind
        if item.kind not in (Part.READ, Part.OPTIMIZER, Part.FINALIZE):
            now += item.duration_ns
    begin, end_forward, at, end, step = _ordered(forward_at, forward_end, backward_at, backward_end, step_at)
    return StepProfile(
        forward_ns=end_forward - begin,
        between_ns=at - end_forward,
        backward_ns=end - at,
        tail_ns=step - end,
        rest_ns=now - step + begin,
        needs_ns={name: moment - begin for name, moment in uses.items()},
        ready_ns={name: max(0, moment - at) for name, moment in ready.items()},
        optimizer_ns=timeline.optimizer_ns,
    )


def _ordered(*moments: int | None) -> list[int]:
    """The moments, none before the one before it; those that are unknown fall on it."""
    found = [0]
    for moment in moments:
        found.append(found[-1] if moment is None else max(found[-1], moment))
    return found[1:]


def _mean(profiles: Sequence[StepProfile]) -> StepProfile:
    profiles = [profile for profile in profiles if profile.ready_ns] or profiles
    lengths = {
        name: round(float(np.mean([getattr(profile, name) for profile in profiles])))
        for name in ("forward_ns", "backward_ns", "between_ns", "tail_ns", "rest_ns", "optimizer_ns")
    }
    return StepProfile(
        needs_ns=_mean_of(profile.needs_ns for profile in profiles),
        ready_ns=_mean_of(profile.ready_ns for profile in profiles),
        **lengths,
    )


def _mean_of(offsets: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The mean of every name's offsets, over the steps that have it, in the order of time."""
    known: dict[str, list[int]] = {}
    for each in offsets:
        for name, offset in each.items():
            known.setdefault(name, []).append(offset)
    means = {name: round(float(np.mean(values))) for name, values in known.items()}
    return dict(sorted(means.items(), key=lambda pair: pair[1]))
