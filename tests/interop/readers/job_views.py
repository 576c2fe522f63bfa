"""Ranks' views of a job's collectives, made up: each with its own clock, with losses, and with extras of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from headway.arrays import Ints
from headway.trace.events import Events, Kind, Stream

LARGE = 1 << 40


@dataclass(frozen=True)
class Job:
    """How a job looks. A rank loses each collective with probability ``loss``, and records ``extra`` of its own."""

    ranks: int = 2
    steps: int = 10
    a_step: int = 5  # collectives
    step_ns: int = 20_000_000
    offset_ns: int = 50_000_000  # clocks differ by up to this
    jitter_ns: int = 50_000
    least_ns: int = 300_000  # between the ends of two collectives
    loss: float = 0.0
    extra: int = 0
    kinds: int = 3
    regular: bool = False  # whether steps are exact copies
    late_steps: int = 0  # up to so many steps are not in a rank's recording at its beginning


def views(job: Job, seed: int) -> tuple[dict[int, Events], dict[int, Ints]]:
    """Each rank's events, without sequence numbers, and which collective of the job each of them truly is."""
    random = np.random.default_rng(seed)
    count = job.steps * job.a_step
    step = np.repeat(np.arange(job.steps), job.a_step)
    # They follow each other on one stream: each takes some time, the rest of the step is spread among them.
    rest = random.dirichlet(np.ones(job.a_step + 1), job.steps)[:, : job.a_step]
    each_ns = min(job.least_ns, job.step_ns // (2 * job.a_step))
    within = np.cumsum(each_ns + rest * (job.step_ns - job.a_step * each_ns), axis=1).astype(np.int64)
    if job.regular:
        within[:] = within[0]
    end_ns = 10**12 + step * job.step_ns + within.ravel()
    kind = random.integers(0, job.kinds, job.a_step)[np.tile(np.arange(job.a_step), job.steps)]
    made, truth = {}, {}
    for rank in range(job.ranks):
        kept = (random.random(count) >= job.loss) & (step >= random.integers(0, job.late_steps + 1))
        true = np.concatenate([np.flatnonzero(kept), LARGE * (rank + 1) + np.arange(job.extra)])
        own_step = np.concatenate([step[kept], random.integers(0, job.steps, job.extra)])
        own_ns = 10**12 + own_step[kept.sum() :] * job.step_ns + random.integers(0, job.step_ns, job.extra)
        own_end_ns = np.concatenate([end_ns[kept], own_ns])
        own_end_ns = own_end_ns + random.integers(-job.offset_ns, job.offset_ns + 1)
        own_end_ns = own_end_ns + random.normal(0, job.jitter_ns / 2, len(own_end_ns)).astype(np.int64)
        duration_ns = random.integers(100_000, 3_000_000, len(true))
        order = np.argsort(own_end_ns - duration_ns, kind="stable")
        size = np.concatenate([kind[kept], random.integers(0, job.kinds, job.extra)])
        made[rank] = Events.from_columns(
            kind=Kind.COLLECTIVE, stream=Stream.COMMUNICATION, name="all_reduce", step=own_step[order],
            start_ns=(own_end_ns - duration_ns)[order], duration_ns=duration_ns[order],
            size_bytes=1024 * (1 + size[order]),
        )  # fmt: skip
        truth[rank] = true[order].astype(np.int64)
    return made, truth


def precision_and_recall(events: dict[int, Events], truth: dict[int, Ints]) -> tuple[float, float]:
    """Of all pairs of views on two ranks: what share of the matched are the same, of the same are matched."""
    matched = same = right = 0
    for one, other in combinations(events, 2):
        numbers = _pairs(events[one].sequence, events[other].sequence)
        true = _pairs(truth[one], truth[other])
        matched, same = matched + len(numbers), same + len(true)
        right += len(numbers & true)
    return right / max(matched, 1), right / max(same, 1)


def _pairs(left: Ints, right: Ints) -> set[tuple[int, int]]:
    """The places in both of what stands in both."""
    _, here, there = np.intersect1d(left, right, return_indices=True)
    return set(zip(here.tolist(), there.tolist(), strict=True))
