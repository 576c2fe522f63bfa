"""What the tuner's timer makes of the ends of collectives, on a transport whose collectives take known times."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from headway.collectives.selection import Selection
from headway.strategies.decoupled.links import CollectiveTimer
from headway.strategies.live.channels.communication import Job

HALF_S = 0.02
SELECTIONS = (Selection("ring", "reduce_scatter"), Selection("ring", "all_gather"))


class Channels:
    """Two channels whose collectives take ``HALF_S``, as the tuner's transport and as its agreement of two ranks."""

    world_size, used = 2, 2

    def __init__(self, other_s: float = 0.0) -> None:
        self.met = self.submitted = 0
        self._other_s = other_s  # how much longer the other rank has it

    def meet(self) -> None:
        self.met += 1

    def submit(self, job: Job) -> Job:
        self.submitted += 1

        def run() -> None:
            job.work(0)
            job.done.set()

        threading.Thread(target=run).start()
        return job

    def wait(self, job: Job) -> None:
        assert job.done.wait(10)

    def prepare(self, selection: Selection, flat: torch.Tensor, scratch: torch.Tensor, channel: int) -> Any:
        assert flat.dtype == scratch.dtype == torch.float32
        return lambda: time.sleep(HALF_S)

    def from_each(self, values: list[float]) -> list[list[float]]:
        return [values, [value + self._other_s for value in values]]

    def slowest(self, values: list[float]) -> list[float]:
        return [max(each) for each in zip(*self.from_each(values), strict=True)]


def timer_on(channels: Channels, *, busy: bool) -> CollectiveTimer:
    ranks: Any = channels
    return CollectiveTimer(ranks, ranks, busy=busy)


@pytest.mark.parametrize("busy", [False, True])
def test_a_half_takes_what_it_takes_whether_ranks_compute_or_not(busy: bool) -> None:
    timer = timer_on(Channels(), busy=busy)
    assert HALF_S * 2 <= timer.alone_s(SELECTIONS, 64, 2) < 1
    # Both channels at a time, and the collectives that ranks begin together behind are counted.
    assert HALF_S / 2 <= timer.saturated_s(SELECTIONS, 64, 2) < 1
    assert HALF_S <= timer.launched_s(SELECTIONS[0], 64, 3) < 1


def test_the_slowest_rank_counts_but_for_launches_where_the_one_that_came_last_does() -> None:
    timer = timer_on(Channels(other_s=5.0), busy=False)
    assert timer.alone_s(SELECTIONS, 64, 1) > 5
    assert timer.launched_s(SELECTIONS[0], 64, 3) < 1


def test_nothing_slows_down_a_thread_that_only_waits() -> None:
    channels = Channels()
    assert timer_on(channels, busy=False).slowdown(SELECTIONS, 64, 1.0) == 0
    assert (channels.met, channels.submitted) == (0, 0)


def test_ranks_that_compute_say_how_much_longer_it_takes() -> None:
    channels = Channels()
    slowdown = timer_on(channels, busy=True).slowdown(SELECTIONS, 64, HALF_S)
    assert 0 <= slowdown <= 4
    assert channels.met == channels.submitted == 6
