"""Choosing a bucket size by trial: a sweep, and the Bayesian search of DeAR. Every rank chooses the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch.distributed as dist

from paced_training.cases import Effort
from paced_training.measuring import Measured
from paced_training.probing import slowest
from paced_training.threshold_search import ThresholdSearch, share_over
from paced_training.trainer import Trainer

T = TypeVar("T")
START_MB, LEAST_MB = 25.0, 1.0


def trial_s(make: Callable[[], Measured], warm: int, steps: int) -> float:
    """Seconds a step of a trainer made for the trial, after ``warm`` steps: the slowest rank's mean."""
    return slowest(sum(_steps_of_trial_s(make, warm, steps)) / steps)


def steps_of_trial_ms(make: Callable[[], Measured], warm: int, steps: int) -> list[float]:
    """As ``trial_s``, but each step of the slowest rank, in ms."""
    return [1e3 * slowest(taken_s) for taken_s in _steps_of_trial_s(make, warm, steps)]


def _steps_of_trial_s(make: Callable[[], Measured], warm: int, steps: int) -> list[float]:
    trainer = make()
    dist.barrier()
    trainer.restart()
    for _ in range(warm):
        trainer.step()
    times_s = [time.perf_counter()]
    for _ in range(steps):
        trainer.step()
        times_s.append(time.perf_counter())
    trainer.finish()
    trainer.close()
    return [end_s - begin_s for begin_s, end_s in pairwise(times_s)]


def sweep(options: Sequence[T], make: Callable[[T], Trainer], effort: Effort) -> tuple[T, dict[str, float]]:
    """The best option, and every option's milliseconds."""
    times = [trial_s(partial(make, option), effort.trial_warm, effort.trial_steps) for option in options]
    best = min(range(len(times)), key=times.__getitem__)
    return options[best], {str(o): round(t * 1e3, 1) for o, t in zip(options, times, strict=True)}


def bayesian(
    make: Callable[[float], Trainer], size_mb: float, effort: Effort
) -> tuple[float, dict[str, float]]:
    """DeAR's search for a threshold in MB, up to the model's ``size_mb``, by trials; what each threshold took."""
    search = ThresholdSearch(
        rank=dist.get_rank(), share=share_over(), trials=effort.bayesian_trials,
        start_mb=min(START_MB, size_mb), bounds_mb=(LEAST_MB, max(size_mb, 2 * LEAST_MB)),
    )  # fmt: skip
    tried: dict[float, float] = {}
    while not search.done:
        threshold_mb = search.ask()
        taken_s = trial_s(partial(make, threshold_mb), effort.trial_warm, effort.trial_steps)
        search.tell(threshold_mb, taken_s)
        tried[threshold_mb] = min(taken_s, tried.get(threshold_mb, taken_s))
    return search.ask(), {f"{mb:.3g}": round(s * 1e3, 1) for mb, s in tried.items()}
