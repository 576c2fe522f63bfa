"""The order of candidates, and which of them to take: the recorded plan, unless another is really better."""

from __future__ import annotations

from collections.abc import Sequence

from headway.optimization.candidate import Candidate
from headway.optimization.memory_limit import needed_bytes
from headway.replayer.expectation import SAME_SHARE


def best_first(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """By predicted time; of equals the recorded plan, then less memory, fewer changes and fewer collectives."""

    def key(candidate: Candidate) -> tuple[float, int, int, int]:
        return (
            candidate.predicted_ms,
            candidate.peak_bytes or 0 if candidate.changed else -1,
            candidate.change_count,
            candidate.schedule.collectives,
        )

    return tuple(sorted(candidates, key=key))


def best_to_take(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of ``candidates``, best first, or one that ties with it and needs less memory or fewer changes.

    Plans that train as recorded are preferred among those that tie. Memory counts where predicted peaks can be told
    apart.
    """
    fastest = candidates[0]
    tied = [each for each in candidates if is_tied(each, fastest)]
    tied = [each for each in tied if not each.changes_training] or tied
    least_bytes = min(needed_bytes(each) for each in tied)
    tied = [each for each in tied if (each.peak_bytes or 0) <= least_bytes]
    return min(tied, key=lambda each: each.change_count)


def is_tied(one: Candidate, other: Candidate) -> bool:
    """Whether it cannot be said which is faster.

    Predictions of one kind of strategy share most of their error: they differ by what predictions of the recorded
    strategy may be off by. Those of different kinds may be off by ± each.
    """
    if one.strategy.family == other.strategy.family:
        return abs(one.predicted_ms - other.predicted_ms) <= SAME_SHARE * other.predicted_ms
    return one.expected.like(other.expected)


def gains(candidate: Candidate) -> bool:
    """Whether it is faster than what was recorded by more than ±."""
    return not candidate.expected.may_gain_nothing
