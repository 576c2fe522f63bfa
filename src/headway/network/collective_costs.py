"""What collectives cost on this job's cluster: every algorithm a plan may choose, timed at several sizes.

Times are held against the replay of the same chunk programs on the measured links (``cost_fit``).
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
    hosts = tuple(host.model_copy(update=rate) for host, rate in zip(cluster.hosts, rates, strict=True))
    return cluster.model_copy(update={"hosts": hosts})


class _Fit:
    """Programs of one algorithm on a cluster."""

    def __init__(self, cluster: Cluster, programs: Sequence[ProgramOf]) -> None:
        self._cluster = cluster
        self._programs = programs
        firsts = [program(0, cluster.world_size) for program in programs]
        self._messages = max(1.0, statistics.fmean(len(program.steps) for program in firsts))
        self._message_share = statistics.fmean(first.message_share for first in firsts)

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


STEADY = 0.03
MOST_BYTES = 2**26  # larger collectives are left out


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm, and the kinds of collectives that share its cost; they are run in turn."""

    algorithm: str
    kinds: tuple[str, ...]
    pieces: int = 1

    @property
    def name(self) -> str:
        """The name of its cost."""
        return cost_name(self.algorithm, self.kinds[0], self.pieces)

    def fits(self, hosts: Hosts) -> bool:
        """Whether it would do anything on ``hosts`` that no other candidate does."""
        return ALGORITHMS[self.algorithm].differs(hosts)

    def prepared(
        self, size_bytes: int, hosts: Hosts, second: dist.ProcessGroup | None = None
    ) -> Callable[[], None]:
        """One collective of each kind, on a tensor of its own, among ranks on ``hosts``.

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
        """What replay says of one collective of each kind."""
        programs = self.programs(size_bytes, Hosts.of_cluster(cluster))
        return sum(seconds_alone(cluster, program, size_bytes) for program in programs)


CANDIDATES = tuple(
    Candidate(name, kinds, pieces) for name, each in ALGORITHMS.items() for kinds, pieces in each.probed
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly a probe measures: how collectives are timed, and how often they are with computation.

    ``shares_bytes``: bytes of a rank's share of one collective, and how many of these follow each other without a pause
    in one measurement. The first is of next to nothing: what it takes is what its messages cost. None is a power of
    two: Gloo takes up to twice as long over messages of exactly 64 KiB as over any others, and training has others.
    Sizes that would take longer than ``longest_s`` are left out, and fewer follow each other where together they do.
    Each is timed ``repeats`` times, or up to ``most_repeats`` where times vary by more than STEADY.
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
# What plans are made of by default; rings of several pieces are taken to cost what their messages do.
SHORT = Effort(
    tuple(each for each in CANDIDATES if each.pieces == 1),
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
    """Time every candidate that fits on this job's ranks, which all call it; ``cluster`` with their costs by name.

    Links that turn out to be faster than ``cluster`` has them are made so (``as_fast_as_seen``).
    """
    timings = timings_of(cluster, second, busy_cores=busy_cores, effort=effort)
    # On one rank: where ranks share cores, all of them would take many times as long over it.
    mine = fitted(cluster, timings, effort).model_dump_json() if dist.get_rank() == 0 else ""
    return Cluster.model_validate_json(_from_rank_0(mine.encode()))


def _from_rank_0(data: bytes) -> bytes:
    """What rank 0 gives."""
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
    """How long every candidate takes at every size, by its name, the same on all ranks, which all call it.

    Candidates take turns, so that what disturbs the machine for a while disturbs them all. Ranks compute meanwhile
    where ``busy_cores``.
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
            first = timed(partial(repeat, action, turns), work)  # connections find their windows
            if first.seconds > effort.longest_s:  # messages wait for cores, which links do not show
                turns = max(1, int(turns * effort.longest_s / first.seconds))
            runs.append((candidate, turns, action))
        took: dict[str, list[Timing]] = {candidate.name: [] for candidate, _, _ in runs}
        for _ in range(effort.most_repeats):
            for candidate, turns, action in runs:
                if not _is_known(took[candidate.name], effort.repeats):
                    timing = timed(partial(repeat, action, turns), work)
                    took[candidate.name].append(timing / (turns * len(candidate.kinds)))
        for candidate, turns, _ in runs:
            timings = took[candidate.name]
            measured[candidate.name].append(
                _median(size_bytes, timings, turns * len(candidate.kinds), idle=work is None)
            )
    return measured


def fitted(cluster: Cluster, measured: Mapping[str, list[Measured]], effort: Effort) -> Cluster:
    """``cluster`` with the costs that make replay take as long as was measured."""
    tiny = next(iter(effort.shares_bytes)) * cluster.world_size
    hosts = Hosts.of_cluster(cluster)
    programs = {
        candidate.name: candidate.programs(tiny, hosts)
        for candidate in effort.candidates
        if candidate.name in measured
    }
    rings = [each.name for each in effort.candidates if each.algorithm == RING]
    cluster = as_fast_as_seen(cluster, [(programs[name], measured[name]) for name in rings])
    costs = {name: fit_cost(cluster, programs[name], measured[name]) for name in measured}
    return cluster.model_copy(update={"algorithms": costs})


def _is_known(timings: Sequence[Timing], repeats: int) -> bool:
    """Whether more repetitions would hardly tell more. All ranks hold the same times."""
    return len(timings) >= repeats and _spread(timings) <= STEADY


def _spread(timings: Sequence[Timing]) -> float:
    """By how much times are off their median, in the median, as a share of it."""
    median_s = statistics.median(timing.seconds for timing in timings)
    return statistics.median(abs(timing.seconds / median_s - 1) for timing in timings)


def _median(size_bytes: int, timings: Sequence[Timing], turns: int, *, idle: bool) -> Measured:
    """``idle`` says that whatever cores did, they did for communication."""
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
    """What replay says of one collective alone on ``cluster``, with its algorithm's ``cost`` if that is given."""
    return float(play(alone(cluster, program_of, size_bytes, cost)).end_ns.max()) / 1e9
