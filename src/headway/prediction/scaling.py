"""Predicts strategies over world sizes, and finds where one overtakes another."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from headway.cluster import Cluster
from headway.plugins import PluginFaultError, asking, leave_out
from headway.prediction.pipelines import PredictedPipeline
from headway.prediction.replayed import Prediction, predict
from headway.prediction.workload import Workload
from headway.simulator.what_if import WhatIf
from headway.strategies.base import Strategy

NOTICED = 0.002  # relative difference that counts


@dataclass(frozen=True, slots=True)
class Crossover:
    """Between ``below`` and ``above`` workers, ``to`` becomes faster than ``of``."""

    of: str
    to: str
    below: int
    above: int

    def to_document(self) -> dict[str, Any]:
        """The output of ``--json``."""
        return asdict(self)


def scaling(
    workload: Workload,
    cluster: Cluster,
    strategies: Mapping[str, Strategy],
    world_sizes: Sequence[int],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    what_if: WhatIf = WhatIf(),  # noqa: B008
    *,
    all_needed: bool = True,
    sized: Mapping[int, Workload] = MappingProxyType({}),
) -> list[Prediction]:
    """Predict every strategy at every world size, on resized versions of ``cluster``, under ``what_if``.

    ``sized`` overrides ``workload`` for some numbers of workers, for a fixed global batch.

    Pipelines skip world sizes (except the last) that do not divide into whole pipelines. If a third-party strategy
    fails, raises PluginFaultError, or skips it with a warning unless ``all_needed``.
    """
    predictions: list[Prediction] = []
    failed: set[str] = set()
    for workers in world_sizes:
        resized, sized_workload = cluster.resized(workers), sized.get(workers, workload)
        for name, strategy in strategies.items():
            skipped = isinstance(strategy, PredictedPipeline) and not strategy.applies(workers)
            if skipped and workers != world_sizes[-1]:
                continue
            try:
                with asking("strategy", strategy):
                    predictions.append(predict(sized_workload, resized, name, strategy, what_if))
            except PluginFaultError as fault:
                leave_out(fault, needed=strategy.name if all_needed else "")
                failed.add(name)
            progress(len(predictions), len(world_sizes) * len(strategies))
    return [prediction for prediction in predictions if prediction.strategy not in failed]


ALIKE = 0.01


def best_of(predictions: Sequence[Prediction], allow: Collection[str] = ()) -> Prediction:
    """The fastest prediction that ``allow`` permits; the fastest of all if none is permitted.

    Ties go to a strategy that does not change training, then to the first one named.
    """
    among = [prediction for prediction in predictions if prediction.recommended(allow)] or predictions
    return min(among, key=lambda candidate: (round(candidate.step_ms, 1), bool(candidate.changes_training)))


def indistinct(first: Prediction, second: Prediction, times_error: float) -> bool:
    """Whether errors could reverse the order of two predictions for the same model and number of workers.

    An error in the times of layers moves both steps alike, except for exposed communication, which may be off by that
    share. Steps within ``ALIKE`` of each other always count as indistinct.
    """
    of_times_ms = times_error * max(first.exposed_ms, second.exposed_ms)
    errors_ms = math.hypot(first.links_ms, second.links_ms, of_times_ms)
    return abs(first.step_ms - second.step_ms) <= max(errors_ms, ALIKE * min(first.step_ms, second.step_ms))


def crossovers(predictions: Sequence[Prediction]) -> list[Crossover]:
    """Find where one strategy overtakes another between consecutive world sizes."""
    by_size: dict[int, dict[str, float]] = {}
    for prediction in predictions:
        by_size.setdefault(prediction.workers, {})[prediction.strategy] = prediction.step_ms
    sizes = sorted(by_size)
    names = list(dict.fromkeys(result.strategy for result in predictions))
    return [
        Crossover(name, rival, before, after)
        for before, after in pairwise(sizes)
        for name in names
        for rival in names
        if _faster(by_size[before], name, rival) and _faster(by_size[after], rival, name)
    ]


def _faster(step_ms: Mapping[str, float], name: str, rival: str) -> bool:
    if name not in step_ms or rival not in step_ms:
        return False
    return step_ms[name] < step_ms[rival] * (1 - NOTICED)
