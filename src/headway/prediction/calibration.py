"""Predictions corrected by step times that somebody measured: how fast devices compute, and how fast links are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cluster import Cluster
from headway.errors import UserError
from headway.prediction.replayed import predict
from headway.prediction.workload import Workload
from headway.simulator.what_if import MAX_WORKERS, WhatIf
from headway.strategies.base import Strategy
from headway.units import parse_duration_s

MOST = 16.0  # how many times as fast or as slow as predicted
ROUNDS, HALVINGS = 8, 3
NUDGE = 0.02
NEAR = 0.001  # of a measured step
LEAST_ERROR = 0.1  # of computation that measured steps corrected: what MLPerf's other steps are off by
FORM = "WORKERS=TIME or WORKERS@SAMPLES=TIME with the samples of each worker, such as 8=320ms or 8@64=320ms, each once"


@dataclass(frozen=True)
class MeasuredStep:
    """A step of ``workers`` that took ``ms``, with ``samples`` each; None for the batch that is predicted."""

    workers: int
    ms: float
    samples: int | None = None


@dataclass(frozen=True)
class Calibration:
    """What multiplies computation and rates, and adds to steps, so that predicted steps are nearest to ``measured``.

    ``fixed_ms`` is computation that does not depend on the batch, beyond what was predicted. ``off`` is by which share
    predictions are off these steps then, at most.
    """

    compute: float
    bandwidth: float
    fixed_ms: float
    off: float
    measured: tuple[MeasuredStep, ...]
    fitted: tuple[str, ...] = ("compute",)

    @property
    def what_if(self) -> WhatIf:
        """The correction of rates."""
        return WhatIf(bandwidth=self.bandwidth)

    def corrected(self, workload: Workload) -> Workload:
        """The correction of computation."""
        return workload.corrected(self.compute, self.fixed_ms * 1e6, max(self.off, LEAST_ERROR))

    def describe(self) -> str:
        """In words."""
        said = f"computation takes {self.compute:.3g} times as long"
        if "bandwidth" in self.fitted:
            said += f" and rates {self.bandwidth:.3g} times"
        said += " as predicted"
        if "fixed" in self.fitted:
            more = "more" if self.fixed_ms >= 0 else "less"
            said += f", and {abs(self.fixed_ms):.3g} ms {more} a step whatever its batch"
        steps = "step is" if len(self.measured) == 1 else f"{len(self.measured)} steps are"
        return f"Calibrated: {said}; then the measured {steps} predicted to within {self.off:.1%}."


def measured_steps(texts: Sequence[str]) -> tuple[MeasuredStep, ...]:
    """Measured steps from texts as in FORM. Raises UserError for what cannot be read."""
    found: list[MeasuredStep] = []
    for text in texts:
        whose, equals, time = text.partition("=")
        workers, at, samples = whose.partition("@")
        numbers = [_number(workers), _number(samples) if at else 1]
        repeated = any(
            (each.workers, each.samples) == (numbers[0], numbers[1] if at else None) for each in found
        )
        if not equals or not all(numbers) or numbers[0] > MAX_WORKERS or repeated:
            raise UserError("--measured cannot be read", got=repr(text), expected=FORM)
        ms = parse_duration_s(time, "--measured") * 1e3
        found.append(MeasuredStep(numbers[0], ms, numbers[1] if at else None))
    return tuple(found)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 8 else 0


def calibrate(
    workloads: Mapping[MeasuredStep, Workload], cluster: Cluster, name: str, strategy: Strategy
) -> Calibration:
    """The calibration by measured steps under ``strategy``, each with the workload of its batch.

    One step tells of computation only. Steps of several batch sizes tell of computation that does not depend on the
    batch, and of several numbers of workers of rates, where there are steps enough for both.
    """
    steps = tuple(workloads)
    fitted = ["compute"]
    if len({workload.samples for workload in workloads.values()}) > 1:
        fitted.append("fixed")
    if len({step.workers for step in steps}) > 1 and len(steps) > len(fitted):
        fitted.append("bandwidth")
    least_ns = min(workload.computation_ns for workload in workloads.values())
    clusters = {workers: cluster.resized(workers) for workers in {step.workers for step in steps}}

    def calibration(values: NDArray[np.float64], off: float = 0.0) -> Calibration:
        value = dict(zip(fitted, values, strict=True))
        compute, bandwidth = math.exp(value["compute"]), math.exp(value.get("bandwidth", 0.0))
        fixed_ms = value.get("fixed", 0.0) * least_ns / 1e6
        return Calibration(compute, bandwidth, fixed_ms, off, steps, tuple(fitted))

    def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The logarithms of predicted steps in measured ones."""
        corrected = calibration(values)
        return np.array(
            [
                math.log(
                    predict(
                        corrected.corrected(workloads[step]), clusters[step.workers], name, strategy,
                        corrected.what_if,
                    ).step_ms
                    / step.ms
                )
                for step in steps
            ]
        )  # fmt: skip

    values = np.zeros(len(fitted))
    off = errors(values)
    for _ in range(ROUNDS):
        if np.abs(off).max() < NEAR:
            break
        slopes = [(errors(values + nudge) - off) / NUDGE for nudge in NUDGE * np.eye(len(fitted))]
        change = np.linalg.lstsq(np.array(slopes).T, -off, rcond=1e-3)[0].clip(-1, 1)
        for _ in range(HALVINGS):
            nearer = (values + change).clip(-math.log(MOST), math.log(MOST))
            off_then = errors(nearer)
            if (off_then**2).sum() < (off**2).sum():
                break
            change = change / 2
        else:
            break
        values, off = nearer, off_then
    return calibration(values, float(np.abs(np.exp(off) - 1).max()))
