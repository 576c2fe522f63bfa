"""Communication and computation at the same time: each timed while the other is in progress on the same cores."""

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

# Ending measurements early: ranks stop together, between two collectives, so that none is left half way.
#
# A rank that simply left would have the others wait in a collective, and its own threads for them.


class HaltedError(Exception):
    """Some rank was told to end: measuring stops on all of them."""


class _Wish:
    """Whether ranks ask each other, and whether this one wants to stop."""

    def __init__(self) -> None:
        self.heeded = False
        self.stop = threading.Event()


_wish = _Wish()


@contextmanager
def heeded() -> Iterator[None]:
    """Have ``stop_if_asked`` heed ``ask``, for as long as the block lasts. Every rank enters it, or none."""
    _wish.stop.clear()
    _wish.heeded = True
    try:
        yield
    finally:
        _wish.heeded = False


def ask() -> None:
    """Have all ranks stop, soon; from any thread and from signal handlers."""
    _wish.stop.set()


def stop_if_asked() -> None:
    """Raise HaltedError on all ranks where one of them was asked to stop. Every rank calls it at the same point.

    It costs a tiny collective, and nothing outside of ``heeded``.
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
    """Collectives on each other's heels: a pause would let shaped links save up for a burst."""
    for _ in range(count):
        action()


class Work:
    """Some of what a layer does: a product that lives in the caches, and a pass over memory that does not."""

    def __init__(self) -> None:
        # Whatever a script has made torch's defaults.
        own = partial(torch.ones, dtype=torch.float32, device="cpu")
        self._left, self._right = own(512, 256), own(256, 512)
        self._source, self._target = own(1_000_000), own(1_000_000)

    def seconds_each(self, go_on: Callable[[], bool]) -> float:
        """Work for as long as ``go_on`` says; return the mean seconds of one piece of it."""
        begun = time.perf_counter()
        count = 0
        with torch.autocast("cpu", enabled=False):  # whatever a script that calls it has in force
            while go_on():
                torch.mm(self._left, self._right)
                torch.mul(self._source, 0.5, out=self._target)
                count += 1
        return (time.perf_counter() - begun) / max(1, count)

    def seconds_alone(self, seconds: float) -> float:
        """The same for so many seconds."""
        until = time.perf_counter() + seconds
        return self.seconds_each(lambda: time.perf_counter() < until)


class RaisingThread(threading.Thread):
    """A thread whose failure is its starter's too."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self._failure: Exception | None = None

    def run(self) -> None:
        """Act, and keep what went wrong."""
        try:
            self._action()
        except Exception as failure:  # raised again by finish
            self._failure = failure

    def finish(self) -> None:
        """Wait for the end; raises what the action raised."""
        self.join()
        if self._failure is not None:
            raise self._failure


class Timing(NamedTuple):
    """How long something took the slowest rank, and for how long it kept the cores of a rank busy in the mean."""

    seconds: float
    cpu_s: float

    def __truediv__(self, count: float) -> Timing:
        return Timing(self.seconds / count, self.cpu_s / count)


def timed(action: Callable[[], None], work: Work | None) -> Timing:
    """Time ``action`` on a thread of its own. Every rank calls it at once.

    Every rank does ``work`` meanwhile, as it will in training: on busy cores a thread waits for its turn at every
    message. It is None where training leaves the cores alone. Raises HaltedError where a rank was told to end.
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
    """What communication costs the computation concurrent with it, on the same cores; means over ranks.

    ``collective`` runs over and over. Returns how much longer a piece of computation takes meanwhile, and the seconds
    that an optimizer's step takes by itself, apart from its arithmetic: what a deferred update pays once a bucket.
    """
    each_s = timed(partial(repeat, collective, 2), None) / 2
    count = max(
        2, round(CONCURRENT_S / each_s.seconds)
    )  # the same on every rank, as the slowest one's time is
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
