"""The order of candidates."""

from __future__ import annotations

from headway.optimization.candidate import Candidate

TIE = 0.01
ROUNDING = 1e-9
"""What is expected of the recorded plan is the recorded step, but for the last bits of a product."""


def best_first(candidates: list[Candidate], baseline_ms: float) -> tuple[Candidate, ...]:
    """By predicted time; of plans within TIE of each other the one with fewer buckets, and less risk, comes first.

    Of these in turn come first those that change nothing of what is trained.
    No plan that is slower than the recorded job, which took ``baseline_ms``, comes before it.
    """
    best_ms = min(candidate.predicted_ms for candidate in candidates)

    def key(candidate: Candidate) -> tuple[int, bool, bool, int, float]:
        band = int((candidate.predicted_ms / best_ms - 1) / TIE)
        slower = candidate.predicted_ms > baseline_ms * (1 + ROUNDING)
        changes = bool(candidate.changes_training)
        return band, slower, changes, candidate.schedule.collectives, candidate.predicted_ms

    return tuple(sorted(candidates, key=key))
