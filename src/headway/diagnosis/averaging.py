"""Measures jobs whose ranks average models in groups (partial all-reduce): waiting times, group sizes and mixing."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headway.diagnosis.breakdown import NS_A_MS
from headway.diagnosis.findings import Finding, listed, milliseconds, of_each_step, ordered_findings
from headway.strategies.partial_all_reduce.matrices import iterations_to_mix
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.trace.format import AveragingRound, Trace

COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class Group:
    """One averaging group, merged from the records of its members. Times are nanoseconds on rank 0's clock.

    ``members`` are ranks. ``asked_ns`` maps each recorded member to the time of its request. ``relative_distance`` is
    the RMS distance of the members' models from their mean, divided by the norm of the mean.
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
        """The recorded member that requested the group last; the others waited for it."""
        return max(self.asked_ns, key=lambda rank: (self.asked_ns[rank], rank))

    @property
    def iterations_apart(self) -> int:
        """The largest difference between the members' iteration numbers."""
        return max(self.iterations, default=0) - min(self.iterations, default=0)


@dataclass(frozen=True)
class Averaging:
    """Statistics of all averaging groups in a recording. ``groups`` are sorted by end time; times are ms per step.

    ``standing_ms[rank]`` is how long a rank is blocked on its groups, and ``forming_ms[rank]`` the time from its request
    until the group begins. ``waited_for_ms[rank]`` is how long the other ranks wait, on average, for that rank as the
    last of a group. ``staleness`` counts committed groups by how many steps late their mean was applied; ``alone``
    counts rounds without a group, ``dropped`` rounds that were not recorded. ``mixing_iterations`` is the number of
    iterations of a mean rank until the models have mixed, or None if they have not.
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
        """The number of groups by group size."""
        return dict(sorted(Counter(len(group.members) for group in self.groups).items()))

    @property
    def failed(self) -> int:
        """The number of groups that did not commit their mean."""
        return sum(not group.committed for group in self.groups)

    @property
    def iterations_apart(self) -> tuple[float, int]:
        """The mean and the maximum over groups of the difference between the members' iterations."""
        apart = [group.iterations_apart for group in self.groups if group.iterations]
        return (sum(apart) / len(apart), max(apart)) if apart else (0.0, 0)

    @cached_property
    def distances(self) -> Sequence[tuple[int, float]]:
        """For each committed group: its end in ns, and the distance between its members' models before averaging."""
        return [(group.ended_ns, group.relative_distance) for group in self.groups if group.committed]

    @cached_property
    def mean_standing_ms(self) -> float:
        """How long a rank is blocked per step, averaged over ranks."""
        return sum(self.standing_ms.values()) / max(1, len(self.standing_ms))

    @cached_property
    def hosts_waited_for_ms(self) -> Mapping[str, float]:
        """``waited_for_ms`` summed by host, largest first."""
        by_host: dict[str, float] = defaultdict(float)
        for rank, rank_ms in self.waited_for_ms.items():
            by_host[self.hosts.get(rank, "")] += rank_ms
        return dict(sorted(by_host.items(), key=lambda item: -item[1]))

    def describe(self) -> str:
        """Summarises groups, distances and mixing in a few sentences."""
        sizes = ", ".join(f"{count} of {size}" for size, count in self.sizes.items()) or "none"
        failed = f", of which {self.failed} failed" if self.failed else ""
        alone = f"; {self.alone} rounds found no group" if self.alone else ""
        mean_apart, most_apart = self.iterations_apart
        last = f"{self.distances[-1][1]:.2g}" if self.distances else "unknown"
        mixed = (
            "the models did not mix across all ranks during the recording"
            if self.mixing_iterations is None
            else f"the models mixed across all ranks after {self.mixing_iterations:.1f} iterations"
        )
        return (
            f"Groups: {sizes}{failed}{alone}. Members are {mean_apart:.1f} iterations apart on average (at most "
            f"{most_apart}); in the last group, models differed by {last} of their norm; {mixed}."
        )

    def to_document(self) -> dict[str, Any]:
        """The JSON object of ``headway diagnose --json``; ``consensus_distance`` counts time from the first group."""
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
    """Collects the averaging groups of ``trace``; None if its ranks do not average models."""
    if not trace.rounds:
        return None
    rank_of = {rank_rounds.worker: rank for rank, rank_rounds in trace.rounds.items()}
    steps = max(1, len(trace.steps))
    groups = _groups(trace, rank_of)
    waited_ns: dict[int, int] = defaultdict(int)
    for group in groups:
        waited_ns[group.last] += sum(
            group.asked_ns[group.last] - asked_ns for asked_ns in group.asked_ns.values()
        )
    every_round = [round_ for rank_rounds in trace.rounds.values() for round_ in rank_rounds.rounds]
    alone = [
        (round_.ended_ns, (rank,))
        for rank, rank_rounds in trace.rounds.items()
        for round_ in _alone(rank_rounds.rounds)
    ]
    mixed = [(group.ended_ns, group.members if group.committed else group.members[:1]) for group in groups]
    places = {rank: place for place, rank in enumerate(sorted(trace.rounds))}
    order = [[places[rank] for rank in members if rank in places] for _, members in sorted([*mixed, *alone])]
    return Averaging(
        changes_training=_changes(trace),
        groups=groups,
        standing_ms=_ms_per_step(trace, steps, lambda round_: round_.blocked_ns),
        forming_ms=_ms_per_step(trace, steps, lambda round_: round_.begun_ns - round_.asked_ns),
        waited_for_ms={
            rank: rank_ns / NS_A_MS / steps / len(trace.rounds) for rank, rank_ns in sorted(waited_ns.items())
        },
        hosts=trace.hosts,
        staleness=dict(
            sorted(Counter(round_.staleness for round_ in every_round if round_.ending == COMMITTED).items())
        ),
        alone=len(alone),
        dropped=sum(rank_rounds.dropped for rank_rounds in trace.rounds.values()),
        mixing_iterations=iterations_to_mix(order, len(places)),
    )


def _ms_per_step(trace: Trace, steps: int, length_ns: Callable[[AveragingRound], int]) -> dict[int, float]:
    return {
        rank: sum(map(length_ns, rank_rounds.rounds)) / NS_A_MS / steps
        for rank, rank_rounds in sorted(trace.rounds.items())
    }


def _alone(rounds: Iterable[AveragingRound]) -> list[AveragingRound]:
    return [round_ for round_ in rounds if len(round_.members) < 2]


def _groups(trace: Trace, rank_of: Mapping[int, int]) -> tuple[Group, ...]:
    """Merges the ranks' records into groups: records with the same number and members belong to one group."""
    seen: dict[tuple[int, tuple[int, ...]], dict[int, AveragingRound]] = defaultdict(dict)
    for rank, rank_rounds in trace.rounds.items():
        for round_ in rank_rounds.rounds:
            if len(round_.members) > 1:
                # A group left undecided is recorded twice: the last ending counts, with the times of the first.
                views = seen[round_.number, round_.members]
                views[rank] = _later(views[rank], round_) if rank in views else round_
    groups = [_group(number, members, views, rank_of) for (number, members), views in seen.items()]
    return tuple(sorted(groups, key=lambda group: (group.ended_ns, group.number)))


def _later(before: AveragingRound, after: AveragingRound) -> AveragingRound:
    return before.model_copy(update={"ending": after.ending})


def _group(
    number: int, members: tuple[int, ...], views: Mapping[int, AveragingRound], rank_of: Mapping[int, int]
) -> Group:
    committed = any(view.ending == COMMITTED for view in views.values())
    squares = [view.relative_distance**2 for view in views.values()]
    iterations = next((view.iterations for view in views.values() if view.iterations), ())
    return Group(
        number=number,
        members=tuple(rank_of.get(worker, worker) for worker in members),
        iterations=iterations,
        asked_ns={rank: view.asked_ns for rank, view in sorted(views.items())},
        begun_ns=min(view.begun_ns for view in views.values()),
        ended_ns=max(view.ended_ns for view in views.values()),
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
NAMED = 0.4  # share of all waiting from which a single rank is named
EXPLAINED = ("communication", "moving_imbalance")
"""Causes replaced by the finding on groups: in such a job, the groups are the communication."""
NOT_TOGETHER = "Ranks run their steps independently: step N happens at a different time on each rank."


def with_group_finding(findings: Sequence[Finding], averaging: Averaging, step_ms: float) -> list[Finding]:
    """Replaces the findings on shared collectives with one on averaging groups."""
    if step_ms <= 0:
        return list(findings)
    kept = [finding for finding in findings if finding.cause not in EXPLAINED]
    return ordered_findings([*kept, averaging_finding(averaging, step_ms)], step_ms)


def averaging_finding(averaging: Averaging, step_ms: float) -> Finding:
    """Says how much step time the groups cost, and which rank they wait for."""
    standing_ms = averaging.mean_standing_ms
    total_ms = sum(averaging.waited_for_ms.values())
    worst = max(averaging.waited_for_ms, key=lambda rank: averaging.waited_for_ms[rank], default=None)
    named: tuple[int, ...] = ()
    waits = "each time for a different one"
    if worst is not None and total_ms > 0 and averaging.waited_for_ms[worst] >= NAMED * total_ms:
        named = (worst,)
        host = f" on {averaging.hosts[worst]}" if averaging.hosts.get(worst) else ""
        waits = f"most for {listed(named)}{host} ({milliseconds(averaging.waited_for_ms[worst])})"
    advice = (
        "find out what slows that rank down, or form groups without it (groups: first-come)"
        if named
        else "to wait less, use smaller groups or staleness: 1"
    )
    sentence = (
        f"Ranks are blocked on their averaging groups for {of_each_step(standing_ms, step_ms)}; they wait "
        f"{milliseconds(total_ms)} for the last member of the group, {waits}; {advice}."
    )
    return Finding("groups", standing_ms, sentence, named, standing_ms >= STANDS_OUT * step_ms)
