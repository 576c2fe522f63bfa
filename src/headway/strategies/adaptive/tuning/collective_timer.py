"""Timing collectives in place on a model's channels, alone or while ranks compute, and what that costs computation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from headway.collectives.selection import Selection
from headway.network.interference import Work
from headway.strategies.adaptive.tuning.agreement import Agreement
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.communication import Job

REPEATS = 3
INTERFERING_S = 0.15  # of rings that computation is concurrent with
MOST_SLOWDOWN = 4.0  # more is a rank that something else has held up


class CollectiveTimer:
    """Times halves of ``selections`` on ``transport``. Every rank asks the same at the same point, nothing in flight.

    Where ``busy``, the thread that trains computes meanwhile, as it does in training.
    """

    def __init__(self, transport: BucketTransport, agreement: Agreement, *, busy: bool) -> None:
        self._transport, self._agreement = transport, agreement
        self._work = Work() if busy else None

    def alone_s(self, selections: Sequence[Selection], size_bytes: int, count: int) -> float:
        """Seconds of one of each of ``selections`` in one channel, of ``count`` without a pause.

        The median of the slowest rank's.
        """
        took_s: list[float] = []
        for _ in range(REPEATS):
            told: list[tuple[float, float]] = []
            self._wait([self._submit(selections, size_bytes, count, told)])
            took_s += [end_s - begun_s for begun_s, end_s in told]
        return statistics.median(self._agreement.slowest(took_s)) / count

    def launched_s(self, selection: Selection, size_bytes: int, count: int) -> float:
        """Seconds from a launch by the thread that trains to the end of one half in a channel that was idle.

        The median of ``count``, each as the rank has it that launched last and so waited for no other. Where cores are
        busy a thread that wakes up waits for one.
        """
        took_s: list[float] = []
        for _ in range(count):
            told: list[tuple[float, float]] = []
            launched_s = time.perf_counter()
            # None behind the one that ranks begin together behind: that is the launch.
            self._wait([self._submit([selection], size_bytes, 0, told)])
            took_s += [end_s - launched_s for _, end_s in told]
        launched_last_s: list[float] = [
            min(each) for each in zip(*self._agreement.from_each(took_s), strict=True)
        ]
        return statistics.median(launched_last_s)

    def saturated_s(self, selections: Sequence[Selection], size_bytes: int, count: int) -> float:
        """Seconds that a half costs where every channel has one in flight, as in training: what its bytes take.

        One channel alone leaves the links idle while it waits for messages, which shaped links make up for later and
        real ones do not; either way it says little of what several get through.
        """
        took_s: list[float] = []
        channels = self._transport.used
        for _ in range(REPEATS):
            told: list[tuple[float, float]] = []
            begun_s = time.perf_counter()
            self._wait([self._submit(selections, size_bytes, count, told) for _ in range(channels)])
            took_s.append(max(end_s for _, end_s in told) - begun_s)
        halves = channels * len(selections) * (count + 1)  # with the one that ranks begin together behind
        return statistics.median(self._agreement.slowest(took_s)) / halves

    def slowdown(self, selections: Sequence[Selection], size_bytes: int, half_s: float) -> float:
        """How much longer computation takes while all channels have ``selections`` in flight: the mean of ranks.

        A half takes about ``half_s``. 0 where ranks are not busy: then nothing shares their cores.
        """
        if self._work is None:
            return 0.0
        channels = self._transport.used
        count = max(1, round(INTERFERING_S / (len(selections) * half_s * channels)))
        found = []
        for _ in range(REPEATS):
            self._transport.meet()
            alone_s = self._work.seconds_alone(INTERFERING_S)
            self._transport.meet()
            jobs = [self._submit(selections, size_bytes, count, []) for _ in range(channels)]
            together_s = self._work.seconds_each(lambda jobs=jobs: not any(map(_is_done, jobs)))  # type: ignore[misc]
            found.append(together_s / alone_s - 1)
            for job in jobs:
                self._transport.wait(job)
        own = min(MOST_SLOWDOWN, max(0.0, statistics.median(found)))
        return statistics.fmean(each for (each,) in self._agreement.from_each([own]))

    def _submit(
        self, selections: Sequence[Selection], size_bytes: int, count: int, told: list[tuple[float, float]]
    ) -> Job:
        run = partial(_run, self._transport, selections, size_bytes, count, told.append)
        return self._transport.submit(Job("all_reduce", -1, size_bytes, run))

    def _wait(self, jobs: Sequence[Job]) -> None:
        if self._work is not None:
            self._work.seconds_each(lambda: not all(map(_is_done, jobs)))
        for job in jobs:
            self._transport.wait(job)


def _is_done(job: Job) -> bool:
    return job.done.is_set()


def _run(
    transport: BucketTransport,
    selections: Sequence[Selection],
    size_bytes: int,
    count: int,
    tell: Callable[[tuple[float, float]], None],
    channel: int,
) -> None:
    world_size = transport.world_size
    # Whatever the script has made torch's defaults.
    flat = torch.zeros(-(-size_bytes // (4 * world_size)) * world_size, dtype=torch.float32, device="cpu")
    numel = max(s.scratch_numel(flat.numel(), world_size) for s in selections)
    scratch = torch.empty(numel, dtype=torch.float32, device="cpu")
    actions = [transport.prepare(selection, flat, scratch, channel) for selection in selections]
    for action in actions:  # ranks begin together behind it, and shaped links have spent what they had saved
        action()
    begun_s = time.perf_counter()
    for _ in range(count):
        for action in actions:
            action()
    tell((begun_s, time.perf_counter()))
