"""Computes throughput over a time horizon, for ranks that do not finish steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.simulation.engine import PlayedTimes


def steps_finished(
    boundaries: Mapping[int, Sequence[int]], played: PlayedTimes, until_ns: int
) -> tuple[int, ...]:
    """The number of steps that each rank has finished at ``until_ns``.

    ``boundaries`` (``GraphBuilder.boundaries``) has the last operation of each step on every rank, -1 if a rank lacks
    the step. Steps that were not played to their end do not count.
    """
    ranks = max((len(ends) for ends in boundaries.values()), default=0)
    finished = [0] * ranks
    for ends in boundaries.values():
        for rank, operation in enumerate(ends):
            finished[rank] += operation >= 0 and int(played.end_ns[operation]) <= until_ns
    return tuple(finished)


def steps_per_s(
    boundaries: Mapping[int, Sequence[int]], played: PlayedTimes, from_ns: int, until_ns: int
) -> float:
    """The steps per second of all ranks together that finish after ``from_ns``, up to ``until_ns``.

    The time before ``from_ns`` is a warm-up. Raises ValueError unless ``until_ns`` is later than ``from_ns``.
    """
    if until_ns <= from_ns:
        raise ValueError(f"until_ns must be after from_ns: got {from_ns} ns and {until_ns} ns")
    before, after = (sum(steps_finished(boundaries, played, time_ns)) for time_ns in (from_ns, until_ns))
    return (after - before) / (until_ns - from_ns) * 1e9
