"""How many steps ranks finish in a time, where they do not finish them together: throughput over a horizon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.simulation.engine import PlayedTimes


def steps_finished(
    boundaries: Mapping[int, Sequence[int]], played: PlayedTimes, until_ns: int
) -> tuple[int, ...]:
    """How many steps each rank has finished at ``until_ns``.

    ``boundaries`` are those of the graph (``GraphBuilder.boundaries``): of each step the operation with which it ends
    on every rank, -1 where a rank does not have the step. A step that was not played to its end is not finished.
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
    """The steps of all ranks together, a second, that are finished after ``from_ns`` and until ``until_ns``.

    What is before ``from_ns`` is a warm-up. Raises ValueError where no time lies between the two.
    """
    if until_ns <= from_ns:
        raise ValueError(f"no time lies between {from_ns} ns and {until_ns} ns")
    before, after = (sum(steps_finished(boundaries, played, time_ns)) for time_ns in (from_ns, until_ns))
    return (after - before) / (until_ns - from_ns) * 1e9
