"""From measured times of a collective to what it costs beside the ideal of its messages (``AlgorithmCost``)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.dataflow import repeated
from headway.collectives.program import ProgramOf
from headway.replay.engine import play

REPLAYED = 3  # collectives that follow each other: the first of them finds links that have rested
LARGE = 2  # sizes that decide about bytes
HALVINGS = 10  # to a thousandth
FACTORS = (0.1, 100.0)


class Measured(NamedTuple):
    """Collectives of ``size_bytes`` that followed each other: seconds of each, and seconds of a rank's cores."""

    size_bytes: int
    seconds: float
    cpu_s: float = 0.0


def replayed_seconds(
    cluster: Cluster, programs: Sequence[ProgramOf], size_bytes: int, cost: AlgorithmCost
) -> float:
    """What replay says of each of several collectives that follow each other; the mean over ``programs``."""
    ends_s = [
        float(play(repeated(cluster, program, size_bytes, cost, REPLAYED)).end_ns.max()) / 1e9
        for program in programs
    ]
    return statistics.fmean(ends_s) / REPLAYED


def fit_cost(cluster: Cluster, programs: Sequence[ProgramOf], measured: Sequence[Measured]) -> AlgorithmCost:
    """The cost with which replay takes as long as was ``measured``, at growing sizes of which the first is tiny.

    The tiny size says what a message costs, since its bytes take no time; the largest say what bytes cost, and of them
    the quickest, since what disturbs a measurement only adds to it. All of them say how well that fits (``fit_error``).
    """
    tiny, large = measured[0], measured[-min(LARGE, len(measured)) :]
    messages = statistics.fmean(len(program(0, cluster.world_size).steps) for program in programs)
    work_s = tiny.cpu_s / max(1.0, messages)
    message_s = _message_seconds(cluster, programs, tiny, work_s)
    cost = AlgorithmCost(message_us=message_s * 1e6, message_cpu_us=min(message_s, work_s) * 1e6)
    ratios = [m.seconds / replayed_seconds(cluster, programs, m.size_bytes, cost) for m in large]
    factor = min(max(min(ratios), FACTORS[0]), FACTORS[1])
    cost = cost.model_copy(update={"byte_factor": factor})
    errors = [abs(replayed_seconds(cluster, programs, m.size_bytes, cost) / m.seconds - 1) for m in measured]
    return cost.model_copy(update={"fit_error": statistics.median(errors)})


def _message_seconds(cluster: Cluster, programs: Sequence[ProgramOf], tiny: Measured, work_s: float) -> float:
    """What each message takes, of that ``work_s`` work, so that replay says ``tiny.seconds``: by halving."""

    def takes_s(message_s: float) -> float:
        cost = AlgorithmCost(message_us=message_s * 1e6, message_cpu_us=min(message_s, work_s) * 1e6)
        return replayed_seconds(cluster, programs, tiny.size_bytes, cost)

    least_s, most_s = 0.0, tiny.seconds
    for _ in range(HALVINGS):
        middle_s = (least_s + most_s) / 2
        if takes_s(middle_s) < tiny.seconds:
            least_s = middle_s
        else:
            most_s = middle_s
    return (least_s + most_s) / 2
