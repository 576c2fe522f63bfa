"""The measuring loop: rounds in which every method trains a few steps, so that a drift of the machine hits all."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from common import order_of

from paced_training.jobs import StepTime


class Measured(Protocol):
    """What is timed: a model in training, by whatever method."""

    def restart(self) -> None:
        """Called before steps that follow upon something else."""

    def step(self) -> StepTime:
        """One step of training."""

    def finish(self) -> None:
        """Wait for everything in flight."""

    def close(self) -> None:
        """Give back what a garbage collector would not."""


@dataclass
class Samples:
    """One method's rounds: seconds of a step, of its forward and backward, and of CPU; the busiest core's share.

    ``busy_cores`` is how many cores anybody on the machine kept busy meanwhile, ``stolen`` the share of all cores' time
    that the machine under this one took.
    """

    step_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    busiest_core: list[float] = field(default_factory=list)
    busy_cores: list[float] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)


def measure(trainers: Sequence[Measured], *, rounds: int, warm: int, steps: int) -> list[Samples]:
    """Interleave all ``trainers``. Every one takes equally many steps."""
    samples = [Samples() for _ in trainers]
    for round_number in range(rounds):
        for index in order_of(round_number, len(trainers)):
            _sample(trainers[index], warm, steps, samples[index])
    return samples


def _sample(trainer: Measured, warm: int, steps: int, into: Samples) -> None:
    dist.barrier()
    trainer.restart()
    for _ in range(warm):
        trainer.step()
    cores, stolen, cpu_s, start = cores_ticks(), stolen_ticks(), _cpu_s(), time.perf_counter()
    taken = [trainer.step() for _ in range(steps)]
    into.step_s.append((time.perf_counter() - start) / steps)
    into.cpu_s.append((_cpu_s() - cpu_s) / steps)
    ticks = cores_ticks()
    into.busiest_core.append(busiest_share(cores, ticks))
    into.busy_cores.append(len(cores) * busy_share(cores, ticks))
    into.stolen.append(stolen_share(stolen, stolen_ticks()))
    into.forward_s.append(statistics.mean(t.forward_s for t in taken))
    into.backward_s.append(statistics.mean(t.backward_s for t in taken))
    trainer.finish()


def slowest_of_ranks(samples: Samples) -> Samples:
    """For every round the slowest rank's times, the sum of all ranks' CPU."""

    def reduced(values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        box = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(box, operation)
        return [float(value) for value in box]

    most, total = dist.ReduceOp.MAX, dist.ReduceOp.SUM
    return Samples(
        step_s=reduced(samples.step_s, most),
        forward_s=reduced(samples.forward_s, most),
        backward_s=reduced(samples.backward_s, most),
        cpu_s=reduced(samples.cpu_s, total),
        busiest_core=reduced(samples.busiest_core, most),
        busy_cores=reduced(samples.busy_cores, most),
        stolen=reduced(samples.stolen, most),
    )


def disagreement(values: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference of any parameter on any rank, against the largest parameter."""
    box = (values - reference).abs().max() / reference.abs().max()
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cores_ticks() -> list[tuple[int, int]]:
    """For every core of the machine its busy and its total time, in ticks; others' use is in it too."""
    found = []
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("cpu") and line[3].isdigit():
            ticks = [int(text) for text in line.split()[1:]]
            found.append((sum(ticks) - ticks[3] - ticks[4], sum(ticks)))
    return found or [(0, 0)] * (os.cpu_count() or 1)


def busy_share(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> float:
    """Of all cores, what anybody used."""
    return sum(b1 - b0 for (b0, _), (b1, _) in zip(before, after, strict=True)) / max(
        1, sum(t1 - t0 for (_, t0), (_, t1) in zip(before, after, strict=True))
    )


def busiest_share(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> float:
    shares = [(b1 - b0) / max(1, t1 - t0) for (b0, t0), (b1, t1) in zip(before, after, strict=True)]
    return max(shares)


def stolen_ticks() -> tuple[int, int]:
    """Ticks that the machine under this one took away from all cores, and all ticks."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (ticks[7] if len(ticks) > 7 else 0), sum(ticks[:8])


def stolen_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """The share of all cores' time that was taken away."""
    return (after[0] - before[0]) / max(1, after[1] - before[1])
