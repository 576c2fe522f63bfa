"""Predictions corrected by step times that somebody measured: how fast devices compute, and how fast links are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.cluster import Cluster
from headway.errors import UserError
from headway.prediction.replayed import predict
from headway.prediction.workload import Workload
from headway.replayer.what_if import MAX_WORKERS, WhatIf
from headway.strategies.base import Strategy
from headway.units import parse_duration_s

MOST = 16.0  # how many times as fast or as slow as predicted
ROUNDS, CUTS = 3, 10
FORM = "WORKERS=TIME, such as 8=320ms, each number of workers once"


@dataclass(frozen=True)
class Calibration:
    """What multiplies computation and rates so that predicted steps are nearest to the ``measured_ms``, by workers.

    ``off`` is by which share predictions are off these then, at most.
    """

    compute: float
    bandwidth: float
    off: float
    measured_ms: Mapping[int, float]

    @property
    def what_if(self) -> WhatIf:
        """The correction."""
        return WhatIf(compute=self.compute, bandwidth=self.bandwidth)

    def describe(self) -> str:
        """In words."""
        links = f" and rates {self.bandwidth:.3g} times" if len(self.measured_ms) > 1 else ""
        steps = "step is" if len(self.measured_ms) == 1 else f"{len(self.measured_ms)} steps are"
        return (
            f"Calibrated: computation takes {self.compute:.3g} times as long{links} as predicted; then the measured "
            f"{steps} predicted to within {self.off:.1%}."
        )


def measured_steps(texts: Sequence[str]) -> dict[int, float]:
    """Step times in ms by numbers of workers, from texts as in FORM. Raises UserError for what cannot be read."""
    found: dict[int, float] = {}
    for text in texts:
        workers, equals, time = text.partition("=")
        number = int(workers) if workers.isdecimal() and len(workers) < 8 else 0
        if not equals or not 1 <= number <= MAX_WORKERS or number in found:
            raise UserError("--measured cannot be read", got=repr(text), expected=FORM)
        found[number] = parse_duration_s(time, "--measured") * 1e3
    return found


def calibrate(
    workload: Workload, cluster: Cluster, name: str, strategy: Strategy, measured_ms: Mapping[int, float]
) -> Calibration:
    """The calibration by steps under ``strategy``; one step alone tells of computation only."""
    known: dict[tuple[float, float], float] = {}

    def off(compute: float, bandwidth: float) -> float:
        if (compute, bandwidth) not in known:
            correction = WhatIf(compute=compute, bandwidth=bandwidth)
            predicted = {
                workers: predict(workload, cluster.resized(workers), name, strategy, correction).step_ms
                for workers in measured_ms
            }
            known[compute, bandwidth] = max(abs(predicted[n] / ms - 1) for n, ms in measured_ms.items())
        return known[compute, bandwidth]

    found = Calibration(1.0, 1.0, off(1.0, 1.0), measured_ms)
    for _ in range(ROUNDS if len(measured_ms) > 1 else 1):
        bandwidth = found.bandwidth
        compute = _least(lambda value: off(value, bandwidth), found.compute)  # noqa: B023
        found = replace(found, compute=compute, off=off(compute, bandwidth))
        if len(measured_ms) > 1:
            bandwidth = _least(lambda value: off(compute, value), found.bandwidth)  # noqa: B023
            found = replace(found, bandwidth=bandwidth, off=off(compute, bandwidth))
    return found


def _least(cost: Callable[[float], float], start: float) -> float:
    """Where ``cost``, which falls and then rises, is least around ``start``: by ever narrower cuts (golden section)."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(start / MOST), math.log(start * MOST)
    left, right = high - golden * (high - low), low + golden * (high - low)
    for _ in range(CUTS):
        if cost(math.exp(left)) <= cost(math.exp(right)):
            high, right = right, left
            left = high - golden * (high - low)
        else:
            low, left = left, right
            right = low + golden * (high - low)
    best = math.exp((low + high) / 2)
    return best if cost(best) < cost(start) else start
