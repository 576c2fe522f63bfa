"""Ranks that average their models in groups: how long they stand still for that, for whom, and how models mix."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headway.diagnosis.breakdown import NS_A_MS
from headway.diagnosis.findings import Finding, listed, milliseconds, of_each_step, ranked
from headway.strategies.partial_all_reduce.matrices import iterations_to_mix
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.trace.format import AveragingRound, Trace

COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class Group:
    """A group as its recorded members saw it; times are nanoseconds on rank 0's clock.

    ``members`` are ranks. ``asked_ns`` is when each recorded member asked. ``relative_distance`` is the root of the
    mean squared distance of the members' models from their mean, relative to the norm of that.
    """

    number: int
    members: tuple[int, ...]
    iterations: tuple[int, ...]
    asked_ns: Mapping[int, int]
    begun_ns: int
    ended_ns: int
    committed: bool
    relative_distance: float

    @property
    def last(self) -> int:
        """The recorded member that asked last, for which the others waited."""
        return max(self.asked_ns, key=lambda rank: (self.asked_ns[rank], rank))

    @property
    def iterations_apart(self) -> int:
        """By how many iterations its members differ."""
        return max(self.iterations, default=0) - min(self.iterations, default=0)


@dataclass(frozen=True)
class Averaging:
    """What is known of the groups of a recording, ``groups`` in the order of their ends.

    ``standing_ms[rank]`` is how long a rank stands still for its groups in a step, ``forming_ms[rank]`` how much of the
    time from its question it takes until the group begins. ``waited_for_ms[rank]`` is how long others have waited in a
    step of theirs, in the mean, until that rank asked as the last of a group. ``staleness`` counts groups by the steps
    that their means were late, ``alone`` rounds without a group, ``dropped`` those that were not kept.
    ``mixing_iterations`` are those that a mean rank finishes until ranks have mixed; None where they have not.
    """

    changes_training: str
    groups: tuple[Group, ...]
    standing_ms: Mapping[int, float]
    forming_ms: Mapping[int, float]
    waited_for_ms: Mapping[int, float]
    hosts: Mapping[int, str]
    staleness: Mapping[int, int]
    alone: int
    dropped: int
    mixing_iterations: float | None

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """How many groups had how many members."""
        return dict(sorted(Counter(len(group.members) for group in self.groups).items()))

    @property
    def failed(self) -> int:
        """How many groups did not take their mean."""
        return sum(not group.committed for group in self.groups)

    @property
    def iterations_apart(self) -> tuple[float, int]:
        """By how many iterations the members of a group differ: in the mean, and at most."""
        apart = [group.iterations_apart for group in self.groups if group.iterations]
        return (sum(apart) / len(apart), max(apart)) if apart else (0.0, 0)

    @cached_property
    def distances(self) -> Sequence[tuple[int, float]]:
        """When groups that took their mean ended, and how far apart their members' models were before."""
        return [(group.ended_ns, group.relative_distance) for group in self.groups if group.committed]

    @cached_property
    def mean_standing_ms(self) -> float:
        """How long a rank stands still in a step, in the mean over ranks."""
        return sum(self.standing_ms.values()) / max(1, len(self.standing_ms))

    @cached_property
    def hosts_waited_for_ms(self) -> Mapping[str, float]:
        """The same as ``waited_for_ms`` by host, the most first."""
        found: dict[str, float] = defaultdict(float)
        for rank, own_ms in self.waited_for_ms.items():
            found[self.hosts.get(rank, "")] += own_ms
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def describe(self) -> str:
        """Groups, distances and mixing in a sentence."""
        sizes = ", ".join(f"{count} of {size}" for size, count in self.sizes.items()) or "none"
        failed = f", of which {self.failed} failed" if self.failed else ""
        alone = f"; {self.alone} rounds without a group" if self.alone else ""
        mean_apart, most_apart = self.iterations_apart
        last = f"{self.distances[-1][1]:.2g}" if self.distances else "unknown"
        mixed = (
            "not all ranks have mixed within the recording"
            if self.mixing_iterations is None
            else f"ranks have mixed after {self.mixing_iterations:.1f} iterations"
        )
        return (
            f"Groups: {sizes}{failed}{alone}. Their members differ by {mean_apart:.1f} iterations (at most "
            f"{most_apart}); their models were {last} of their norm apart in the last group; {mixed}."
        )

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it; times of ``consensus_distance`` begin with the first group."""
        mean_apart, most_apart = self.iterations_apart
        begin_ns = self.distances[0][0] if self.distances else 0
        return {
            "changes_training": self.changes_training,
            "groups": len(self.groups),
            "groups_failed": self.failed,
            "rounds_alone": self.alone,
            "rounds_dropped": self.dropped,
            "group_sizes": {str(size): count for size, count in self.sizes.items()},
            "standing_ms": _rounded(self.standing_ms),
            "forming_ms": _rounded(self.forming_ms),
            "waited_for_ms": _rounded(self.waited_for_ms),
            "hosts_waited_for_ms": _rounded(self.hosts_waited_for_ms),
            "iterations_apart_mean": mean_apart,
            "iterations_apart_most": most_apart,
            "staleness": {str(late): count for late, count in self.staleness.items()},
            "consensus_distance": [
                {"ms": round((ended_ns - begin_ns) / NS_A_MS, 6), "relative": distance}
                for ended_ns, distance in self.distances
            ],
            "mixing_iterations": self.mixing_iterations,
        }


def _rounded(values: Mapping[Any, float]) -> dict[str, float]:
    return {str(key): round(value, 6) for key, value in values.items()}


def find_averaging(trace: Trace) -> Averaging | None:
    """What ``trace`` says of groups that average models; None where no rank's model was averaged."""
    if not trace.rounds:
        return None
    rank_of = {round_.worker: rank for rank, round_ in trace.rounds.items()}
    steps = max(1, len(trace.steps))
    groups = _groups(trace, rank_of)
    waited_ns: dict[int, int] = defaultdict(int)
    for group in groups:
        waited_ns[group.last] += sum(
            group.asked_ns[group.last] - asked_ns for asked_ns in group.asked_ns.values()
        )
    every = [each for own in trace.rounds.values() for each in own.rounds]
    alone = [(each.ended_ns, (rank,)) for rank, own in trace.rounds.items() for each in _alone(own.rounds)]
    mixed = [(each.ended_ns, each.members if each.committed else each.members[:1]) for each in groups]
    places = {rank: place for place, rank in enumerate(sorted(trace.rounds))}
    order = [[places[rank] for rank in members if rank in places] for _, members in sorted([*mixed, *alone])]
    return Averaging(
        changes_training=_changes(trace),
        groups=groups,
        standing_ms=_a_step(trace, steps, lambda each: each.blocked_ns),
        forming_ms=_a_step(trace, steps, lambda each: each.begun_ns - each.asked_ns),
        waited_for_ms={
            rank: own_ns / NS_A_MS / steps / len(trace.rounds) for rank, own_ns in sorted(waited_ns.items())
        },
        hosts=trace.hosts,
        staleness=dict(sorted(Counter(each.staleness for each in every if each.ending == COMMITTED).items())),
        alone=len(alone),
        dropped=sum(own.dropped for own in trace.rounds.values()),
        mixing_iterations=iterations_to_mix(order, len(places)),
    )


def _a_step(trace: Trace, steps: int, of: Any) -> dict[int, float]:
    return {rank: sum(map(of, own.rounds)) / NS_A_MS / steps for rank, own in sorted(trace.rounds.items())}


def _alone(rounds: Iterable[AveragingRound]) -> list[AveragingRound]:
    return [round_ for round_ in rounds if len(round_.members) < 2]


def _groups(trace: Trace, rank_of: Mapping[int, int]) -> tuple[Group, ...]:
    """Every group that a recorded rank was in, seen by all that were: one number and members are one group."""
    seen: dict[tuple[int, tuple[int, ...]], dict[int, AveragingRound]] = defaultdict(dict)
    for rank, round_ in trace.rounds.items():
        for each in round_.rounds:
            if len(each.members) > 1:
                # Of an undecided group the last word counts, but its times are those of the group.
                before = seen[each.number, each.members].get(rank)
                seen[each.number, each.members][rank] = each if before is None else _later(before, each)
    groups = [_group(number, members, views, rank_of) for (number, members), views in seen.items()]
    return tuple(sorted(groups, key=lambda each: (each.ended_ns, each.number)))


def _later(before: AveragingRound, after: AveragingRound) -> AveragingRound:
    return before.model_copy(update={"ending": after.ending})


def _group(
    number: int, members: tuple[int, ...], views: Mapping[int, AveragingRound], rank_of: Mapping[int, int]
) -> Group:
    committed = any(each.ending == COMMITTED for each in views.values())
    squares = [view.relative_distance**2 for view in views.values()]
    told = next((each.iterations for each in views.values() if each.iterations), ())
    return Group(
        number=number,
        members=tuple(rank_of.get(worker, worker) for worker in members),
        iterations=told,
        asked_ns={rank: each.asked_ns for rank, each in sorted(views.items())},
        begun_ns=min(each.begun_ns for each in views.values()),
        ended_ns=max(each.ended_ns for each in views.values()),
        committed=committed,
        relative_distance=math.sqrt(sum(squares) / len(squares)) if committed else 0.0,
    )


def _changes(trace: Trace) -> str:
    for info in trace.manifest.ranks:
        options = info.strategy.get(PartialAllReduceStrategy.name)
        if options is not None:
            return PartialAllReduceStrategy.model_validate(options).changes_training
    return PartialAllReduceStrategy().changes_training


STANDS_OUT = 0.10  # of the step
NAMED = 0.4  # of the time until groups begin, for which one rank is named
EXPLAINED = ("communication", "moving_imbalance")
"""Causes that a job whose ranks average in groups does not have: the groups are its communication."""
NOT_TOGETHER = (
    "Ranks do not take their steps together: a step has one number on all, and a time of its own on each."
)


def of_groups(findings: Sequence[Finding], found: Averaging, step_ms: float) -> list[Finding]:
    """``findings`` with what groups cost, in the place of what is said of collectives that all ranks share."""
    if step_ms <= 0:
        return list(findings)
    kept = [finding for finding in findings if finding.cause not in EXPLAINED]
    return ranked([*kept, averaging_finding(found, step_ms)], step_ms)


def averaging_finding(found: Averaging, step_ms: float) -> Finding:
    """What groups cost a step, and for whom ranks wait."""
    standing_ms = found.mean_standing_ms
    total_ms = sum(found.waited_for_ms.values())
    worst = max(found.waited_for_ms, key=lambda rank: found.waited_for_ms[rank], default=None)
    named: tuple[int, ...] = ()
    waits = "each time for a different one"
    if worst is not None and total_ms > 0 and found.waited_for_ms[worst] >= NAMED * total_ms:
        named = (worst,)
        host = f" on {found.hosts[worst]}" if found.hosts.get(worst) else ""
        waits = f"most for {listed(named)}{host} ({milliseconds(found.waited_for_ms[worst])})"
    advice = (
        "look at what slows that rank down, or let groups begin without it (groups: first-come)"
        if named
        else "smaller groups, or staleness: 1, wait less"
    )
    sentence = (
        f"Ranks stand still for their groups for {of_each_step(standing_ms, step_ms)}; members wait "
        f"{milliseconds(total_ms)} for the last of their group to come, {waits}; {advice}."
    )
    return Finding("groups", standing_ms, sentence, named, standing_ms >= STANDS_OUT * step_ms)
