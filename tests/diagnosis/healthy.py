"""Healthy jobs as machines run them: each rank's work varies from step to step, and no rank is slower than another."""

from __future__ import annotations

import numpy as np
from tests.synthetic import SyntheticJob, trace_of
from tests.synthetic_run import Run

from headway.trace.format import Trace


def noisy_trace(job: SyntheticJob, noise: float) -> Trace:
    """The job, whose work on each rank and in each step takes a normal factor of spread ``noise``."""
    return trace_of(_NoisyRun(job, noise).events())


class _NoisyRun(Run):
    def __init__(self, job: SyntheticJob, noise: float) -> None:
        super().__init__(job)
        drawn = np.random.default_rng(job.seed).standard_normal((job.world_size, job.steps))
        self.factors = np.maximum(0.2, 1 + noise * drawn)

    def _took(self, rank: int, step: int, part: str, usual_ms: float) -> float:
        return float(super()._took(rank, step, part, usual_ms) * self.factors[rank, step])
