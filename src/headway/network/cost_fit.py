"""From measured times of a collective to what it costs on top of the ideal of its messages (``AlgorithmCost``)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from headway.cluster import AlgorithmCost, Cluster, MessageCost
from headway.collectives.dataflow import repeated
from headway.collectives.program import ProgramOf
from headway.simulation.engine import play

LARGE = 2  # sizes that decide about bytes
HALVINGS = 10  # to a thousandth
FACTORS = (1.0, 100.0)
MOST_SPEEDUP = 4.0  # over the links as they were measured


class Measured(NamedTuple):
    """Collectives of ``size_bytes``, ``turns`` of which followed each other: seconds of each, of a rank's cores too.

    ``spread`` is by how much their median may be off, as a share of it.
    """

    size_bytes: int
    seconds: float
    cpu_s: float = 0.0
    turns: int = 4
    spread: float = 0.0


def replayed_seconds(
    cluster: Cluster, programs: Sequence[ProgramOf], size_bytes: int, cost: AlgorithmCost, turns: int = 4
) -> float:
    """What replay says of each of ``turns`` collectives that follow each other; the mean over ``programs``.

    The first finds links that have rested; from the third on they are taken to be alike.
    """

    def seconds(program: ProgramOf, count: int) -> float:
        return float(play(repeated(cluster, program, size_bytes, cost, count)).end_ns.max()) / 1e9

    def total(program: ProgramOf) -> float:
        if turns <= 4:
            return seconds(program, turns)
        two, four = seconds(program, 2), seconds(program, 4)
        return two + (turns - 2) * (four - two) / 2

    return statistics.fmean(total(program) for program in programs) / turns


def fit_cost(cluster: Cluster, programs: Sequence[ProgramOf], measured: Sequence[Measured]) -> AlgorithmCost:
    """The cost with which replay takes as long as was ``measured``, at growing sizes of which the first is tiny.

    The tiny size says what a message costs, since its bytes take no time. With that the largest sizes say what bytes
    cost, and of them the fastest, since what disturbs a measurement only adds to it; but no less than links take to
    carry them, or a slower link would seem faster than it is. What is left at each size is laid to messages of that
    size.
    """
    fit = _Fit(cluster, programs)
    cost, ratios = fit.bytes_and_messages(measured[0], measured[-min(LARGE, len(measured)) :])
    factor = min(max(min(ratios), FACTORS[0]), FACTORS[1])
    cost = cost.model_copy(update={"byte_factor": factor})
    by_size = tuple(
        MessageCost(
            size_bytes=max(1, round(fit.message_bytes(each))),
            **fit.message(each, cost).model_dump(include={"message_us", "message_cpu_us"}),
        )
        for each in measured
    )
    cost = cost.model_copy(update={"by_size": by_size})
    errors = [max(abs(fit.seconds(each, cost) / each.seconds - 1), each.spread) for each in measured]
    return cost.model_copy(update={"fit_error": _by_time(errors, measured)})


def _by_time(errors: Sequence[float], measured: Sequence[Measured]) -> float:
    """The mean error of the time that collectives take. Tiny ones vary most, and take next to nothing of a step."""
    total_s = sum(each.seconds for each in measured)
    return sum(error * each.seconds for error, each in zip(errors, measured, strict=True)) / total_s


def as_fast_as_seen(
    cluster: Cluster, rings: Sequence[tuple[Sequence[ProgramOf], Sequence[Measured]]]
) -> Cluster:
    """``cluster`` with links that carry bytes at least as fast as ``rings`` (programs, what was measured) did.

    Goodput that was measured while something disturbed the machine is too low, and everything would be laid to
    links that are not so slow.
    """
    taken = [_Fit(cluster, programs).bytes_and_messages(seen[0], seen[-1:])[1][0] for programs, seen in rings]
    factor = max(min(taken, default=1.0), 1 / MOST_SPEEDUP)
    if factor >= 1:
        return cluster
    if len(cluster.hosts) == 1:
        return cluster.model_copy(update={"local_gbps": cluster.local_gbps / factor})
    rates = (
        {"up_gbps": host.up_gbps / factor, "down_gbps": host.down_gbps / factor} for host in cluster.hosts
    )
    hosts = tuple(host.model_copy(update=own) for host, own in zip(cluster.hosts, rates, strict=True))
    return cluster.model_copy(update={"hosts": hosts})


class _Fit:
    """Programs of one algorithm on a cluster."""

    def __init__(self, cluster: Cluster, programs: Sequence[ProgramOf]) -> None:
        self._cluster = cluster
        self._programs = programs
        firsts = [program(0, cluster.world_size) for program in programs]
        self._messages = max(1.0, statistics.fmean(len(program.steps) for program in firsts))
        self._message_share = statistics.fmean(each.message_share for each in firsts)

    def message_bytes(self, measured: Measured) -> float:
        """How large a message is, in the mean."""
        return measured.size_bytes * self._message_share

    def seconds(self, measured: Measured, cost: AlgorithmCost) -> float:
        """What replay says."""
        return replayed_seconds(self._cluster, self._programs, measured.size_bytes, cost, measured.turns)

    def bytes_and_messages(
        self, tiny: Measured, large: Sequence[Measured]
    ) -> tuple[AlgorithmCost, list[float]]:
        """What ``tiny`` says of messages, and how many times as long as links take ``large`` ones took in addition."""
        cost = self.message(tiny, AlgorithmCost())
        return cost, [each.seconds / self.seconds(each, cost) for each in large]

    def message(self, measured: Measured, cost: AlgorithmCost) -> AlgorithmCost:
        """``cost`` with what messages take for replay to say what was measured: by halving."""
        work_us = measured.cpu_s / self._messages * 1e6

        def with_message(message_us: float) -> AlgorithmCost:
            taken = {"message_us": message_us, "message_cpu_us": min(message_us, work_us)}
            return cost.model_copy(update=taken)

        least_us, most_us = 0.0, measured.seconds * 1e6
        for _ in range(HALVINGS):
            middle_us = (least_us + most_us) / 2
            if self.seconds(measured, with_message(middle_us)) < measured.seconds:
                least_us = middle_us
            else:
                most_us = middle_us
        return with_message((least_us + most_us) / 2)
