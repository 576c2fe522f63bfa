"""Predictions over world sizes, and where one strategy overtakes another."""

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

NOTICED = 0.002  # a difference that is said to be one


@dataclass(frozen=True, slots=True)
class Crossover:
    """Between ``below`` and ``above`` workers, ``to`` becomes faster than ``of``."""

    of: str
    to: str
    below: int
    above: int

    def to_document(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
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
    """Every strategy at every world size, whose hosts are those of ``cluster`` in turn, under ``what_if``.

    ``sized`` has the workload by numbers of workers where it is not ``workload``, as of a fixed global batch.

    Sizes below the last at which workers make no whole pipelines are left out for pipelines. A strategy of another
    package that fails raises PluginFaultError, or is left out with a warning where not ``all_needed``.
    """
    found: list[Prediction] = []
    failed: set[str] = set()
    for workers in world_sizes:
        resized, own = cluster.resized(workers), sized.get(workers, workload)
        for name, strategy in strategies.items():
            skipped = isinstance(strategy, PredictedPipeline) and not strategy.applies(workers)
            if skipped and workers != world_sizes[-1]:
                continue
            try:
                with asking("strategy", strategy):
                    found.append(predict(own, resized, name, strategy, what_if))
            except PluginFaultError as fault:
                leave_out(fault, needed=strategy.name if all_needed else "")
                failed.add(name)
            progress(len(found), len(world_sizes) * len(strategies))
    return [each for each in found if each.strategy not in failed]


ALIKE = 0.01


def best_of(predictions: Sequence[Prediction], allow: Collection[str] = ()) -> Prediction:
    """The fastest of those that may be recommended with what is permitted; where none may, the fastest of all.

    Of those that look alike it is the first named, and one that changes nothing of what is trained.
    """
    among = [prediction for prediction in predictions if prediction.recommended(allow)] or predictions
    return min(among, key=lambda each: (round(each.step_ms, 1), bool(each.changes_training)))


def indistinct(one: Prediction, other: Prediction, times_error: float) -> bool:
    """Whether errors may turn the order of two predictions of one model on as many workers.

    All layers' times are off by the same share, which moves both steps alike, but for the communication that is not
    hidden: what it adds to a step may be off by that share of it. No model of layers tells apart steps within
    ``ALIKE`` of each other.
    """
    of_times_ms = times_error * max(one.exposed_ms, other.exposed_ms)
    errors_ms = math.hypot(one.links_ms, other.links_ms, of_times_ms)
    return abs(one.step_ms - other.step_ms) <= max(errors_ms, ALIKE * min(one.step_ms, other.step_ms))


def crossovers(predictions: Sequence[Prediction]) -> list[Crossover]:
    """Every change of the faster of two strategies, between world sizes that were predicted one after the other."""
    by_size: dict[int, dict[str, float]] = {}
    for prediction in predictions:
        by_size.setdefault(prediction.workers, {})[prediction.strategy] = prediction.step_ms
    sizes = sorted(by_size)
    names = list(dict.fromkeys(each.strategy for each in predictions))
    return [
        Crossover(name, other, before, after)
        for before, after in pairwise(sizes)
        for name in names
        for other in names
        if _faster(by_size[before], name, other) and _faster(by_size[after], other, name)
    ]


def _faster(step_ms: Mapping[str, float], one: str, other: str) -> bool:
    if one not in step_ms or other not in step_ms:
        return False
    return step_ms[one] < step_ms[other] * (1 - NOTICED)
