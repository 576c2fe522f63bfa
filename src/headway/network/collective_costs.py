"""What collectives cost on this job's cluster: every algorithm a plan may choose, timed at several sizes.

A time is held against the replay of the same chunk programs on the measured links; what is left is the overhead of
an algorithm and its byte factor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
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
    cost_name,
    prepare,
    program_of,
)
from headway.collectives.dataflow import ProgramOf, alone
from headway.network.beside import Work, repeat, timed
from headway.replay.engine import play

# Sizes of one collective, and how many of them follow each other without a pause in one measurement.
SIZES_BYTES = {65_536: 30, 262_144: 16, 1_048_576: 6, 4_194_304: 2}
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
        scratch = torch.empty(live.scratch_numel(flat.numel(), group.size(), self.pieces))
        actions = [
            prepare(self.algorithm, kind, flat, group, scratch, self.pieces, second) for kind in self.kinds
        ]
        return partial(_in_turn, actions)

    def ideal_s(self, cluster: Cluster, size_bytes: int) -> float:
        """What replay says of one collective of each kind."""
        return sum(
            ideal_seconds(cluster, program_of(self.algorithm, kind, self.pieces), size_bytes)
            for kind in self.kinds
        )


CANDIDATES = (
    *(Candidate(RING, (REDUCE_SCATTER, ALL_GATHER), pieces) for pieces in (1, 2, 4)),
    *(Candidate(NATIVE, (kind,)) for kind in (REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE)),
)


def measure_costs(
    cluster: Cluster, second: dist.ProcessGroup | None = None, *, busy_cores: bool = True
) -> dict[str, AlgorithmCost]:
    """Time every candidate on this job's ranks, which all call it; the cost of each by its name.

    Candidates take turns, so that what disturbs the machine for a while disturbs them all. Ranks compute meanwhile
    where ``busy_cores``.
    """
    work = Work() if busy_cores else None
    measured_s: dict[str, list[float]] = {candidate.name: [] for candidate in CANDIDATES}
    ideal_s: dict[str, list[float]] = {candidate.name: [] for candidate in CANDIDATES}
    for size_bytes, count in SIZES_BYTES.items():
        runs = []
        for candidate in CANDIDATES:
            ideal = candidate.ideal_s(cluster, size_bytes)
            if ideal_s[candidate.name] and ideal_s[candidate.name][-1] > LONGEST_S:
                continue
            ideal_s[candidate.name].append(ideal / len(candidate.kinds))
            turns = max(1, min(count // len(candidate.kinds), int(LONGEST_S / ideal)))
            action = candidate.prepared(size_bytes, second)
            action()
            runs.append((candidate, turns, action))
        times_s: dict[str, list[float]] = {candidate.name: [] for candidate, _, _ in runs}
        for _ in range(REPEATS):
            for candidate, turns, action in runs:
                took_s = timed(partial(repeat, action, turns), work)
                times_s[candidate.name].append(took_s / turns / len(candidate.kinds))
        for name, times in times_s.items():
            measured_s[name].append(statistics.median(times))
    costs = {}
    for name, measured in measured_s.items():
        overhead_s, factor = fit_cost(np.array(measured), np.array(ideal_s[name]))
        costs[name] = AlgorithmCost(overhead_us=overhead_s * 1e6, byte_factor=factor)
    return costs


def _in_turn(actions: Sequence[Callable[[], None]]) -> None:
    for action in actions:
        action()


def fit_cost(measured_s: np.ndarray, ideal_s: np.ndarray) -> tuple[float, float]:
    """Overhead (s, >= 0) and factor of ``measured = overhead + factor · ideal``, by least relative error."""
    columns = np.stack([1.0 / measured_s, ideal_s / measured_s], axis=1)
    (overhead_s, factor), *_ = np.linalg.lstsq(columns, np.ones_like(measured_s), rcond=None)
    if len(measured_s) < 2 or overhead_s < 0 or factor <= 0:
        return 0.0, float(np.clip(np.median(measured_s / ideal_s), 0.1, 100.0))
    return float(overhead_s), float(np.clip(factor, 0.1, 100.0))


def ideal_seconds(cluster: Cluster, program_of: ProgramOf, size_bytes: int) -> float:
    """What replay says of one collective alone on ``cluster``, without any cost of its algorithm."""
    return float(play(alone(cluster, program_of, size_bytes)).end_ns.max()) / 1e9
