"""Measures how communication and computation slow each other down on the same cores."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

# Measurements end early on all ranks together, between two collectives. If one rank just left, the other ranks would wait
# for it in a collective.


class HaltedError(Exception):
    """Some rank was asked to stop, so measuring stops on all ranks."""


class _Wish:
    """Whether ranks check for requests to stop, and whether this rank has one."""

    def __init__(self) -> None:
        self.heeded = False
        self.stop = threading.Event()


_wish = _Wish()


@contextmanager
def heeded() -> Iterator[None]:
    """Let ``stop_if_asked`` react to ``ask`` inside the block. Either every rank enters it or none."""
    _wish.stop.clear()
    _wish.heeded = True
    try:
        yield
    finally:
        _wish.heeded = False


def ask() -> None:
    """Ask all ranks to stop soon; callable from any thread and from signal handlers."""
    _wish.stop.set()


def stop_if_asked() -> None:
    """Raise HaltedError on all ranks if one of them was asked to stop. Every rank calls it at the same point.

    Costs a tiny collective inside ``heeded``, and nothing outside.
    """
    if not _wish.heeded:
        return
    stop = torch.tensor([_wish.stop.is_set()], dtype=torch.int32, device="cpu")
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    if bool(stop.item()):
        raise HaltedError


CONCURRENT_S = 1.0
UPDATES = 50


def repeat(action: Callable[[], None], count: int) -> None:
    """Run ``action`` back to back: a pause would let shaped links save up for a burst."""
    for _ in range(count):
        action()


class Work:
    """Computation like a layer's: a matrix product that fits in the caches, and a pass over memory."""

    def __init__(self) -> None:
        # Explicit, because a script may have changed torch's defaults.
        cpu_ones = partial(torch.ones, dtype=torch.float32, device="cpu")
        self._left, self._right = cpu_ones(512, 256), cpu_ones(256, 512)
        self._source, self._target = cpu_ones(1_000_000), cpu_ones(1_000_000)

    def seconds_each(self, go_on: Callable[[], bool]) -> float:
        """Work while ``go_on()`` is true; return the mean seconds per iteration."""
        begun = time.perf_counter()
        count = 0
        with torch.autocast("cpu", enabled=False):  # the script may have autocast on
            while go_on():
                torch.mm(self._left, self._right)
                torch.mul(self._source, 0.5, out=self._target)
                count += 1
        return (time.perf_counter() - begun) / max(1, count)

    def seconds_alone(self, seconds: float) -> float:
        """Work for ``seconds``; return the mean seconds per iteration."""
        until = time.perf_counter() + seconds
        return self.seconds_each(lambda: time.perf_counter() < until)


class RaisingThread(threading.Thread):
    """A thread whose failure is raised again in ``finish``."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self._failure: Exception | None = None

    def run(self) -> None:
        """Run the action, and keep its exception."""
        try:
            self._action()
        except Exception as failure:  # raised again by finish
            self._failure = failure

    def finish(self) -> None:
        """Wait for the thread; raises what the action raised."""
        self.join()
        if self._failure is not None:
            raise self._failure


class Timing(NamedTuple):
    """Wall-clock seconds on the slowest rank, and CPU seconds averaged over ranks."""

    seconds: float
    cpu_s: float

    def __truediv__(self, count: float) -> Timing:
        return Timing(self.seconds / count, self.cpu_s / count)


def timed(action: Callable[[], None], work: Work | None) -> Timing:
    """Time ``action`` on a separate thread. Every rank calls it at once.

    Meanwhile every rank does ``work``, as in training, where threads wait for busy cores at every message. Pass None if
    training leaves the cores idle. Raises HaltedError if a rank was asked to stop.
    """
    stop_if_asked()
    dist.barrier()
    took_s: list[float] = []
    thread = RaisingThread(partial(_stopwatch, action, took_s))
    begun_s = time.process_time()
    thread.start()
    if work is not None:
        work.seconds_each(thread.is_alive)
    thread.finish()
    longest = torch.tensor(took_s, dtype=torch.float64)
    cpu_s = torch.tensor(time.process_time() - begun_s, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_s)
    return Timing(float(longest), float(cpu_s) / dist.get_world_size())


def _stopwatch(action: Callable[[], None], took_s: list[float]) -> None:
    begun = time.perf_counter()
    action()
    took_s.append(time.perf_counter() - begun)


def communication_interference(collective: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Measure how communication slows down computation on the same cores; means over ranks.

    While ``collective`` runs repeatedly, measures the relative slowdown of computation, and the fixed seconds of an
    optimizer step (without arithmetic), which a deferred update pays once per bucket. Returns both.
    """
    once = timed(partial(repeat, collective, 2), None) / 2
    count = max(
        2, round(CONCURRENT_S / once.seconds)
    )  # the same on every rank, because the time is that of the slowest rank
    work, update = Work(), _tiny_update()
    slowdowns, updates_s = [], []
    for _ in range(rounds):
        stop_if_asked()
        dist.barrier()
        alone_s = work.seconds_alone(CONCURRENT_S / 2)
        stop_if_asked()
        dist.barrier()
        rings = RaisingThread(partial(repeat, collective, count))
        rings.start()
        begun = time.perf_counter()
        for _ in range(UPDATES):
            update()
        updates_s.append((time.perf_counter() - begun) / UPDATES)
        slowdowns.append(work.seconds_each(rings.is_alive) / alone_s - 1)
        rings.finish()
    mean = torch.tensor(
        [max(0.0, statistics.median(slowdowns)), statistics.median(updates_s)], dtype=torch.float64
    )
    dist.all_reduce(mean)
    slowdown, update_s = (mean / dist.get_world_size()).tolist()
    return slowdown, update_s


def _tiny_update() -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.zeros(8)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    return torch.optim.AdamW(parameters, lr=1e-3).step
