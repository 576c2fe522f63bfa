"""Result of simulating asynchronous ranks over a time horizon: throughput, waiting, groups and mixing of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupRun:
    """A group that averaged, or failed because a member died (``averaged`` is False).

    ``iterations`` are the iterations that each member had finished when the group began, in the order of members.
    """

    number: int
    members: tuple[int, ...]
    iterations: tuple[int, ...]
    begin_ns: int
    end_ns: int
    averaged: bool


@dataclass(frozen=True)
class Outcome:
    """All times are nanoseconds; the time before ``from_ns`` is a warm-up.

    ``finished_ns[rank]`` are the ends of a rank's iterations. ``standing_ns[rank]`` is how long it waited for groups
    after ``from_ns``, of which ``forming_ns[rank]`` until its group began. ``distance`` and ``spread`` are those of
    ``partial_all_reduce.matrices.Consensus`` for the ranks present at the end; ``mean_spread`` is the mean of the spread
    over time. ``mixing_iterations`` are the mean iterations per rank until all models have mixed
    (``partial_all_reduce.matrices.iterations_to_mix``); None if they have not. ``cost_error`` is the relative error of
    the collective costs used. If ranks update one shared model, ``staleness`` is the mean and the largest number of
    updates that a gradient misses.
    """

    from_ns: int
    until_ns: int
    finished_ns: Sequence[Sequence[int]]
    groups: Sequence[GroupRun]
    standing_ns: Sequence[int]
    forming_ns: Sequence[int]
    distance: float
    spread: float
    mean_spread: float
    operations: int
    cost_error: float = 0.0
    mixing_iterations: float | None = None
    staleness: tuple[float, int] | None = None

    @cached_property
    def iterations(self) -> tuple[int, ...]:
        """Iterations that each rank finished after the warm-up."""
        return tuple(
            sum(self.from_ns < end_ns <= self.until_ns for end_ns in ends_ns) for ends_ns in self.finished_ns
        )

    @property
    def duration_s(self) -> float:
        """Length of the horizon after the warm-up, in seconds."""
        return (self.until_ns - self.from_ns) / 1e9

    @property
    def iterations_per_s(self) -> tuple[float, ...]:
        """Iterations per second of each rank."""
        return tuple(count / self.duration_s for count in self.iterations)

    @property
    def total_per_s(self) -> float:
        """Iterations per second of all ranks together."""
        return sum(self.iterations) / self.duration_s

    @property
    def step_ms(self) -> float:
        """Mean duration of an iteration of a rank, in milliseconds."""
        return len(self.finished_ns) / self.total_per_s * 1e3 if sum(self.iterations) else float("inf")

    @property
    def standing_ms(self) -> float:
        """Mean time per iteration that a rank waits for groups, in milliseconds."""
        return sum(self.standing_ns) / max(1, sum(self.iterations)) / 1e6

    @cached_property
    def counted(self) -> Sequence[GroupRun]:
        """Groups that ended after the warm-up."""
        return [group for group in self.groups if group.end_ns > self.from_ns]

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of groups by size."""
        return dict(sorted(Counter(len(group.members) for group in self.counted).items()))

    @property
    def iterations_apart(self) -> tuple[float, int]:
        """Mean and largest difference in iterations among the members of a group."""
        apart = [max(group.iterations) - min(group.iterations) for group in self.counted]
        return (sum(apart) / len(apart), max(apart)) if apart else (0.0, 0)

    def describe(self) -> str:
        """Describe the simulated behaviour that a mean iteration does not show."""
        if self.staleness is not None:
            return (
                f"ranks do not finish iterations together: the mean over {self.duration_s:.2g} simulated s; gradients "
                f"do not know of {self.staleness[0]:.1f} updates by others (at most {self.staleness[1]}); "
                "it trains otherwise than all-reduce does"
            )
        mean_apart, most_apart = self.iterations_apart
        sizes = ", ".join(f"{count} of {size}" for size, count in self.sizes.items()) or "none"
        return (
            f"ranks do not finish iterations together: the mean over {self.duration_s:.2g} simulated s; "
            f"groups: {sizes}; their members differ by {mean_apart:.1f} iterations (at most {most_apart}), "
            f"models by the updates of {self.mean_spread:.2f} iterations; {self._mixing}; "
            "it trains otherwise than all-reduce does"
        )

    @property
    def _mixing(self) -> str:
        if self.mixing_iterations is None:
            return "not all have mixed"
        return f"all have mixed after {self.mixing_iterations:.1f} iterations"

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document of ``--json``."""
        mean_apart, most_apart = self.iterations_apart
        return {
            "simulated_s": self.duration_s,
            "iterations_per_s": self.total_per_s,
            "rank_iterations_per_s": {str(r): rate for r, rate in enumerate(self.iterations_per_s)},
            "step_ms": self.step_ms,
            "standing_ms": self.standing_ms,
            "forming_ms": sum(self.forming_ns) / max(1, sum(self.iterations)) / 1e6,
            "groups": len(self.counted),
            "groups_failed": sum(not group.averaged for group in self.counted),
            "group_sizes": {str(size): count for size, count in self.sizes.items()},
            "iterations_apart_mean": mean_apart,
            "iterations_apart_most": most_apart,
            "consensus_distance": self.distance if self.staleness is None else None,
            "spread": self.mean_spread if self.staleness is None else None,
            "mixing_iterations": self.mixing_iterations,
            "staleness_mean": None if self.staleness is None else self.staleness[0],
            "staleness_most": None if self.staleness is None else self.staleness[1],
            "operations": self.operations,
        }
