"""What collectives cost on this job's cluster: every algorithm a plan may choose, timed at several sizes.

Times are held against the replay of the same chunk programs on the measured links (``cost_fit``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from headway.cluster import AlgorithmCost, Cluster
from headway.collectives import live
from headway.collectives.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    NATIVE,
    REDUCE_SCATTER,
    RING,
    SERVERS,
    cost_name,
    prepare,
    program_of,
)
from headway.collectives.dataflow import ProgramOf, alone
from headway.collectives.selection import native
from headway.network.beside import Timing, Work, repeat, timed
from headway.network.cost_fit import Measured, fit_cost
from headway.replay.engine import play

# Sizes of one collective, and how many of them follow each other without a pause in one measurement. The first is of
# next to nothing: what it takes is what its messages cost.
SIZES_BYTES = {4_096: 30, 65_536: 30, 262_144: 16, 1_048_576: 6, 4_194_304: 3}
REPEATS = 3
LONGEST_S = 0.25  # sizes that would take longer are left out


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

    def prepared(self, size_bytes: int, second: dist.ProcessGroup | None = None) -> Callable[[], None]:
        """One collective of each kind, on a tensor of its own. ``second`` is for rings (``live.Prepared``)."""
        group = dist.group.WORLD
        assert group is not None
        flat = torch.ones(-(-size_bytes // (4 * group.size())) * group.size())
        rank, world_size = group.rank(), group.size()
        programs = [program(rank, world_size) for program in self.programs(size_bytes, world_size)]
        scratch = torch.empty(max(live.scratch_numel_of(program, flat.numel()) for program in programs))
        actions = [
            prepare(self.algorithm, kind, flat, group, scratch, self.pieces, second) for kind in self.kinds
        ]
        return partial(_in_turn, actions)

    def programs(self, size_bytes: int, world_size: int) -> list[ProgramOf]:
        """The chunk programs of each kind."""
        if self.algorithm == NATIVE:
            return [native(kind, size_bytes, world_size).program_of for kind in self.kinds]
        return [program_of(self.algorithm, kind, self.pieces) for kind in self.kinds]

    def ideal_s(self, cluster: Cluster, size_bytes: int) -> float:
        """What replay says of one collective of each kind."""
        programs = self.programs(size_bytes, cluster.world_size)
        return sum(ideal_seconds(cluster, program, size_bytes) for program in programs)


CANDIDATES = (
    *(Candidate(RING, (REDUCE_SCATTER, ALL_GATHER), pieces) for pieces in (1, 2, 4)),
    *(Candidate(NATIVE, (kind,)) for kind in (REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE)),
    Candidate(SERVERS, (ALL_REDUCE,)),
)


def measure_costs(
    cluster: Cluster, second: dist.ProcessGroup | None = None, *, busy_cores: bool = True
) -> dict[str, AlgorithmCost]:
    """Time every candidate on this job's ranks, which all call it; the cost of each by its name.

    Candidates take turns, so that what disturbs the machine for a while disturbs them all. Ranks compute meanwhile
    where ``busy_cores``.
    """
    work = Work() if busy_cores else None
    measured: dict[str, list[Measured]] = {candidate.name: [] for candidate in CANDIDATES}
    for size_bytes, count in SIZES_BYTES.items():
        runs = []
        for candidate in CANDIDATES:
            ideal = candidate.ideal_s(cluster, size_bytes)
            if ideal > LONGEST_S and len(measured[candidate.name]) > 1:
                continue
            turns = max(1, min(count // len(candidate.kinds), int(LONGEST_S / ideal)))
            action = candidate.prepared(size_bytes, second)
            repeat(action, turns)  # connections find their windows
            runs.append((candidate, turns, action))
        took: dict[str, list[Timing]] = {candidate.name: [] for candidate, _, _ in runs}
        for _ in range(REPEATS):
            for candidate, turns, action in runs:
                timing = timed(partial(repeat, action, turns), work)
                took[candidate.name].append(timing / (turns * len(candidate.kinds)))
        for name, timings in took.items():
            seconds = statistics.median(timing.seconds for timing in timings)
            cpu_s = statistics.median(timing.cpu_s for timing in timings) if work is None else 0.0
            measured[name].append(Measured(size_bytes, seconds, cpu_s))
    tiny = next(iter(SIZES_BYTES))
    return {
        candidate.name: fit_cost(
            cluster, candidate.programs(tiny, cluster.world_size), measured[candidate.name]
        )
        for candidate in CANDIDATES
    }


def _in_turn(actions: Sequence[Callable[[], None]]) -> None:
    for action in actions:
        action()


def ideal_seconds(cluster: Cluster, program_of: ProgramOf, size_bytes: int) -> float:
    """What replay says of one collective alone on ``cluster``, without any cost of its algorithm."""
    return float(play(alone(cluster, program_of, size_bytes)).end_ns.max()) / 1e9
