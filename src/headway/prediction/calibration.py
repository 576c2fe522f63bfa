"""Calibrates predictions with measured step times: corrects the speed of computation and of links."""

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

MOST = 16.0  # the largest correction factor
ROUNDS, HALVINGS = 8, 3
NUDGE = 0.02
NEAR = 0.001  # relative error at which the fit stops
LEAST_ERROR = 0.1  # error of calibrated computation, as seen on held-out MLPerf steps
FORM = "WORKERS=TIME or WORKERS@SAMPLES=TIME (samples per worker), such as 8=320ms or 8@64=320ms, without duplicates"


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step of ``workers``, with ``samples`` per worker; None for the batch of the prediction."""

    workers: int
    ms: float
    samples: int | None = None


@dataclass(frozen=True)
class Calibration:
    """The corrections of computation, bandwidth and fixed cost that fit the ``measured`` steps best.

    ``fixed_ms`` is added computation that does not depend on the batch. ``off`` is the largest relative error that
    remains on the measured steps.
    """

    compute: float
    bandwidth: float
    fixed_ms: float
    off: float
    measured: tuple[MeasuredStep, ...]
    fitted: tuple[str, ...] = ("compute",)

    @property
    def what_if(self) -> WhatIf:
        """The correction of bandwidth."""
        return WhatIf(bandwidth=self.bandwidth)

    def corrected(self, workload: Workload) -> Workload:
        """``workload`` with corrected computation."""
        return workload.corrected(self.compute, self.fixed_ms * 1e6, max(self.off, LEAST_ERROR))

    def describe(self) -> str:
        """The calibration in one sentence."""
        sentence = f"computation takes {self.compute:.3g} times as long"
        if "bandwidth" in self.fitted:
            sentence += f" and rates are {self.bandwidth:.3g} times as high"
        sentence += " as predicted"
        if "fixed" in self.fitted:
            more = "more" if self.fixed_ms >= 0 else "less"
            sentence += f", with {abs(self.fixed_ms):.3g} ms {more} per step at any batch size"
        steps = "step is" if len(self.measured) == 1 else f"{len(self.measured)} steps are"
        return f"Calibrated: {sentence}; then the measured {steps} predicted to within {self.off:.1%}."


def measured_steps(texts: Sequence[str]) -> tuple[MeasuredStep, ...]:
    """Parse measured steps in the form FORM. Raises UserError if a text is invalid."""
    steps: list[MeasuredStep] = []
    for text in texts:
        setup, equals, time = text.partition("=")
        workers, at, samples = setup.partition("@")
        numbers = [_number(workers), _number(samples) if at else 1]
        repeated = any(
            (step.workers, step.samples) == (numbers[0], numbers[1] if at else None) for step in steps
        )
        if not equals or not all(numbers) or numbers[0] > MAX_WORKERS or repeated:
            raise UserError("invalid --measured", got=repr(text), expected=FORM)
        ms = parse_duration_s(time, "--measured") * 1e3
        steps.append(MeasuredStep(numbers[0], ms, numbers[1] if at else None))
    return tuple(steps)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 8 else 0


def calibrate(
    workloads: Mapping[MeasuredStep, Workload], cluster: Cluster, name: str, strategy: Strategy
) -> Calibration:
    """Calibrate with measured steps under ``strategy``, each with the workload of its batch.

    One step only calibrates computation. Several batch sizes also give the fixed cost, and several numbers of workers
    the bandwidth, if there are enough steps.
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
        """log(predicted / measured) for each step."""
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
