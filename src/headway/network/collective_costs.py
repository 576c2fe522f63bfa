"""Measures what collectives cost on a job's cluster: times every algorithm that a plan may choose, at several sizes.

The costs are fitted so that replay of the same chunk programs on the measured links takes as long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from headway.cluster import AlgorithmCost, Cluster, MessageCost
from headway.collectives.algorithms import ALGORITHMS, RING, cost_name, program_of
from headway.collectives.dataflow import alone, repeated
from headway.collectives.hierarchical import Hosts
from headway.collectives.live import prepare
from headway.collectives.program import ProgramOf, scratch_numel_of
from headway.collectives.selection import Selection, native
from headway.network.interference import Timing, Work, repeat, timed
from headway.simulation.engine import play

LARGE = 2  # number of largest sizes that determine the cost of bytes
HALVINGS = 10  # bisection steps, for a precision of 1/1000
FACTORS = (1.0, 100.0)
MOST_SPEEDUP = 4.0  # largest correction of measured link rates


class Measured(NamedTuple):
    """The time of one collective of ``size_bytes``, in wall-clock and CPU seconds; ``turns`` ran back to back.

    ``spread`` is the relative uncertainty of the median.
    """

    size_bytes: int
    seconds: float
    cpu_s: float = 0.0
    turns: int = 4
    spread: float = 0.0


def replayed_seconds(
    cluster: Cluster, programs: Sequence[ProgramOf], size_bytes: int, cost: AlgorithmCost, turns: int = 4
) -> float:
    """The replayed seconds per collective, for ``turns`` collectives back to back; the mean over ``programs``.

    The first collective finds rested links; from the third on, all are assumed alike.
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
    """Fit the cost with which replay reproduces ``measured``, sorted by size; the first size is tiny.

    The tiny size gives the cost of a message, since its bytes take no time. The fastest of the largest sizes then gives
    the cost of bytes, because disturbances only add time; it is at least what the links need. The remainder at each size
    is attributed to messages of that size.
    """
    fit = _Fit(cluster, programs)
    cost, ratios = fit.bytes_and_messages(measured[0], measured[-min(LARGE, len(measured)) :])
    factor = min(max(min(ratios), FACTORS[0]), FACTORS[1])
    cost = cost.model_copy(update={"byte_factor": factor})
    by_size = tuple(
        MessageCost(
            size_bytes=max(1, round(fit.message_bytes(timing))),
            **fit.message(timing, cost).model_dump(include={"message_us", "message_cpu_us"}),
        )
        for timing in measured
    )
    cost = cost.model_copy(update={"by_size": by_size})
    errors = [max(abs(fit.seconds(timing, cost) / timing.seconds - 1), timing.spread) for timing in measured]
    return cost.model_copy(update={"fit_error": _by_time(errors, measured)})


def _by_time(errors: Sequence[float], measured: Sequence[Measured]) -> float:
    """The mean error, weighted by time: tiny collectives vary most but hardly count in a step."""
    total_s = sum(timing.seconds for timing in measured)
    return sum(error * timing.seconds for error, timing in zip(errors, measured, strict=True)) / total_s


def as_fast_as_seen(
    cluster: Cluster, rings: Sequence[tuple[Sequence[ProgramOf], Sequence[Measured]]]
) -> Cluster:
    """``cluster`` with links at least as fast as measured ``rings`` (programs, measurements) needed.

    Goodput measured under a disturbance is too low, and all collectives would then be attributed to slow links.
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
    hosts = tuple(host.model_copy(update=rate) for host, rate in zip(cluster.hosts, rates, strict=True))
    return cluster.model_copy(update={"hosts": hosts})


class _Fit:
    """Fits the cost of one algorithm's programs on a cluster."""

    def __init__(self, cluster: Cluster, programs: Sequence[ProgramOf]) -> None:
        self._cluster = cluster
        self._programs = programs
        firsts = [program(0, cluster.world_size) for program in programs]
        self._messages = max(1.0, statistics.fmean(len(program.steps) for program in firsts))
        self._message_share = statistics.fmean(first.message_share for first in firsts)

    def message_bytes(self, measured: Measured) -> float:
        """The mean size of a message."""
        return measured.size_bytes * self._message_share

    def seconds(self, measured: Measured, cost: AlgorithmCost) -> float:
        """The replayed seconds."""
        return replayed_seconds(self._cluster, self._programs, measured.size_bytes, cost, measured.turns)

    def bytes_and_messages(
        self, tiny: Measured, large: Sequence[Measured]
    ) -> tuple[AlgorithmCost, list[float]]:
        """The cost of messages from ``tiny``, and the ratios of measured to replayed time of ``large`` with it."""
        cost = self.message(tiny, AlgorithmCost())
        return cost, [timing.seconds / self.seconds(timing, cost) for timing in large]

    def message(self, measured: Measured, cost: AlgorithmCost) -> AlgorithmCost:
        """``cost`` with the message time at which replay matches the measurement, by bisection."""
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


STEADY = 0.03
MOST_BYTES = 2**26  # larger collectives are not measured


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm with the kinds of collectives that share its cost; the kinds run in turn."""

    algorithm: str
    kinds: tuple[str, ...]
    pieces: int = 1

    @property
    def name(self) -> str:
        """The name under which the cluster stores the cost."""
        return cost_name(self.algorithm, self.kinds[0], self.pieces)

    def fits(self, hosts: Hosts) -> bool:
        """Whether the algorithm differs from other candidates on ``hosts``."""
        return ALGORITHMS[self.algorithm].differs(hosts)

    def prepared(
        self, size_bytes: int, hosts: Hosts, second: dist.ProcessGroup | None = None
    ) -> Callable[[], None]:
        """A function that runs one collective of each kind among ranks on ``hosts``.

        ``second`` is for rings (``live.Prepared``).
        """
        group = dist.group.WORLD
        assert group is not None
        flat = torch.ones(-(-size_bytes // (4 * group.size())) * group.size())
        rank, world_size = group.rank(), group.size()
        programs = [program(rank, world_size) for program in self.programs(size_bytes, hosts)]
        scratch = torch.empty(max(scratch_numel_of(program, flat.numel()) for program in programs))
        actions = [
            prepare(Selection(self.algorithm, kind, self.pieces, hosts), flat, group, scratch, second)
            for kind in self.kinds
        ]
        return partial(_in_turn, actions)

    def programs(self, size_bytes: int, hosts: Hosts) -> list[ProgramOf]:
        """The chunk programs of each kind."""
        if ALGORITHMS[self.algorithm].is_library:
            return [native(kind, size_bytes, hosts.world_size).program_of for kind in self.kinds]
        return [program_of(self.algorithm, kind, self.pieces, hosts) for kind in self.kinds]

    def ideal_s(self, cluster: Cluster, size_bytes: int) -> float:
        """The replayed seconds of one collective of each kind."""
        programs = self.programs(size_bytes, Hosts.of_cluster(cluster))
        return sum(seconds_alone(cluster, program, size_bytes) for program in programs)


CANDIDATES = tuple(
    Candidate(name, kinds, pieces)
    for name, algorithm in ALGORITHMS.items()
    for kinds, pieces in algorithm.probed
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly a probe measures.

    ``shares_bytes`` maps the bytes of a rank's share to the number of collectives that run back to back in one
    measurement. The first share is tiny, so its time is the cost of messages. No share is a power of two, because Gloo
    takes up to twice as long for messages of exactly 64 KiB, which training does not have. Measurements longer than
    ``longest_s`` are skipped or shortened. Each is repeated ``repeats`` times, or up to ``most_repeats`` if times vary by
    more than STEADY. ``interference_rounds`` is how often communication is timed together with computation.
    """

    candidates: tuple[Candidate, ...]
    shares_bytes: Mapping[int, int]
    repeats: int
    most_repeats: int
    longest_s: float
    interference_rounds: int


THOROUGH = Effort(
    CANDIDATES,
    {1_000: 30, 6_000: 30, 20_000: 20, 75_000: 10, 300_000: 6, 1_200_000: 3},
    repeats=5,
    most_repeats=11,
    longest_s=0.15,
    interference_rounds=3,
)
# Only what default plans use; rings with several pieces are assumed to cost what their messages do.
SHORT = Effort(
    tuple(candidate for candidate in CANDIDATES if candidate.pieces == 1),
    {1_000: 20, 20_000: 12, 120_000: 6, 1_200_000: 2},
    repeats=3,
    most_repeats=5,
    longest_s=0.12,
    interference_rounds=2,
)


def with_costs(
    cluster: Cluster,
    second: dist.ProcessGroup | None = None,
    *,
    busy_cores: bool = True,
    effort: Effort = THOROUGH,
) -> Cluster:
    """``cluster`` with the measured costs of all candidates; every rank of the job calls this.

    Raises link rates that turn out too low (``as_fast_as_seen``).
    """
    timings = timings_of(cluster, second, busy_cores=busy_cores, effort=effort)
    # Fit on one rank only: ranks that share cores would slow each other down.
    document = fitted(cluster, timings, effort).model_dump_json() if dist.get_rank() == 0 else ""
    return Cluster.model_validate_json(_from_rank_0(document.encode()))


def _from_rank_0(data: bytes) -> bytes:
    """Broadcast ``data`` of rank 0."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    box = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(box, 0)
    return box.numpy().tobytes()


def timings_of(
    cluster: Cluster,
    second: dist.ProcessGroup | None = None,
    *,
    busy_cores: bool = True,
    effort: Effort = THOROUGH,
) -> dict[str, list[Measured]]:
    """Time every candidate at every size, by name; every rank calls this and gets the same result.

    Candidates take turns, so that a passing disturbance affects all of them. With ``busy_cores``, ranks compute
    meanwhile.
    """
    work = Work() if busy_cores else None
    hosts = Hosts.of_cluster(cluster)
    candidates = [candidate for candidate in effort.candidates if candidate.fits(hosts)]
    measured: dict[str, list[Measured]] = {candidate.name: [] for candidate in candidates}
    for share_bytes, count in effort.shares_bytes.items():
        size_bytes = share_bytes * cluster.world_size
        runs = []
        for candidate in candidates:
            ideal = candidate.ideal_s(cluster, size_bytes)
            if (ideal > effort.longest_s or size_bytes > MOST_BYTES) and len(measured[candidate.name]) > 1:
                continue
            turns = max(1, min(count // len(candidate.kinds), int(effort.longest_s / ideal)))
            action = candidate.prepared(size_bytes, hosts, second)
            repeat(action, 1)
            first = timed(partial(repeat, action, turns), work)  # warms up the connections
            if (
                first.seconds > effort.longest_s
            ):  # messages wait for cores, which replay of links does not show
                turns = max(1, int(turns * effort.longest_s / first.seconds))
            runs.append((candidate, turns, action))
        took: dict[str, list[Timing]] = {candidate.name: [] for candidate, _, _ in runs}
        for _ in range(effort.most_repeats):
            for candidate, turns, action in runs:
                if not _is_settled(took[candidate.name], effort.repeats):
                    timing = timed(partial(repeat, action, turns), work)
                    took[candidate.name].append(timing / (turns * len(candidate.kinds)))
        for candidate, turns, _ in runs:
            timings = took[candidate.name]
            measured[candidate.name].append(
                _median(size_bytes, timings, turns * len(candidate.kinds), idle=work is None)
            )
    return measured


def fitted(cluster: Cluster, measured: Mapping[str, list[Measured]], effort: Effort) -> Cluster:
    """``cluster`` with the costs for which replay reproduces the measurements."""
    tiny = next(iter(effort.shares_bytes)) * cluster.world_size
    hosts = Hosts.of_cluster(cluster)
    programs = {
        candidate.name: candidate.programs(tiny, hosts)
        for candidate in effort.candidates
        if candidate.name in measured
    }
    rings = [ring.name for ring in effort.candidates if ring.algorithm == RING]
    cluster = as_fast_as_seen(cluster, [(programs[name], measured[name]) for name in rings])
    costs = {name: fit_cost(cluster, programs[name], measured[name]) for name in measured}
    return cluster.model_copy(update={"algorithms": costs})


def _is_settled(timings: Sequence[Timing], repeats: int) -> bool:
    """Whether more repetitions would hardly change the result. All ranks have the same times."""
    return len(timings) >= repeats and _spread(timings) <= STEADY


def _spread(timings: Sequence[Timing]) -> float:
    """The median deviation from the median, relative to it."""
    median_s = statistics.median(timing.seconds for timing in timings)
    return statistics.median(abs(timing.seconds / median_s - 1) for timing in timings)


def _median(size_bytes: int, timings: Sequence[Timing], turns: int, *, idle: bool) -> Measured:
    """The median measurement; if ``idle``, all CPU time counts as communication."""
    seconds = statistics.median(timing.seconds for timing in timings)
    return Measured(
        size_bytes=size_bytes,
        seconds=seconds,
        cpu_s=statistics.median(timing.cpu_s for timing in timings) if idle else 0.0,
        turns=turns,
        spread=_spread(timings) / math.sqrt(len(timings)),
    )


def _in_turn(actions: Sequence[Callable[[], None]]) -> None:
    for action in actions:
        action()


def seconds_alone(
    cluster: Cluster,
    program_of: ProgramOf,
    size_bytes: int,
    cost: AlgorithmCost = AlgorithmCost(),  # noqa: B008 - an immutable value
) -> float:
    """The replayed seconds of one collective alone on ``cluster``, with its algorithm's ``cost``."""
    return float(play(alone(cluster, program_of, size_bytes, cost)).end_ns.max()) / 1e9
