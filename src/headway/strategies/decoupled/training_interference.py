"""What decoupled training and its own communication cost each other on the same cores: measured on a small model.

Collectives take their share of the cores, and so does what belongs to them: updates on the channels' threads, the
interpreter's lock, buckets that push a layer's memory out of the caches. No part of it tells the whole, so the same
steps are timed under stock DDP and under the decoupled all-reduce.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.cluster import PassSlowdown
from headway.intervals import Intervals
from headway.job import Job
from headway.network.halting import stop_if_asked
from headway.strategies.decoupled import lifecycle
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.wrapper import DecoupledDataParallel
from headway.strategies.live.channels import observer
from headway.strategies.live.module_spec import model_spec

LAYERS, WIDTH, HEADS, BATCH, LENGTH = 2, 192, 4, 8, 64
BUCKET_BYTES = 700_000
ROUNDS, STEPS, WARM_UP_STEPS = 2, 9, 3  # in turns: machines are slower for seconds at a time
LEAST_OVERLAP = 0.3  # of computation with communication, below which a difference says nothing


class Passes(NamedTuple):
    """Nanoseconds that a forward and a backward compute for, and the share of that with collectives in flight.

    ``updates_ns`` is what the optimizer takes for all that this rank updates: on a communication thread, if it does so.
    """

    forward_ns: float
    backward_ns: float
    forward_overlap: float
    backward_overlap: float
    updates_ns: float = 0.0


class Found(NamedTuple):
    """``slowdown`` is None where links are too fast for a small model to tell.

    ``update_us`` is what an update on a communication thread takes, apart from its share of the optimizer's step.
    """

    slowdown: PassSlowdown | None
    update_us: float


def training_interference(of_collectives: float) -> Found:
    """Train a small model both ways. Every rank calls it, with the default process group initialised on Gloo.

    ``of_collectives`` is by how much those of stock DDP slow its backward down, as a share.
    """
    strategy = DecoupledStrategy(bucket_cap_bytes=BUCKET_BYTES, gather="parameters", channels=2)
    stock: list[Passes] = []
    own: list[Passes] = []
    for _ in range(ROUNDS):
        stop_if_asked()
        stock += _passes(DistributedDataParallel(_model(), bucket_cap_mb=BUCKET_BYTES / 2**20))
        stop_if_asked()
        model = _model()
        schedule = strategy.decide(Job.of(model_spec(model)))
        planned = DecoupledDataParallel(model, schedule=schedule)
        own += _passes(planned)
        assert planned.engine is not None
        lifecycle.release_everywhere(planned.engine)  # a job that goes on keeps nothing of it
    told = torch.tensor([*_median(stock), *_median(own)], dtype=torch.float64)
    dist.all_reduce(told)
    mean: list[float] = (told / dist.get_world_size()).tolist()
    count = len(Passes._fields)
    stock_passes, own_passes = Passes(*mean[:count]), Passes(*mean[count:])
    alone_ns = own_passes.updates_ns - stock_passes.updates_ns / dist.get_world_size()
    return Found(
        compared(stock_passes, own_passes, of_collectives),
        max(0.0, alone_ns / len(schedule.buckets) / 1e3),
    )


def compared(stock: Passes, own: Passes, of_collectives: float) -> PassSlowdown | None:
    """How passes that take as long as in ``stock`` are slowed down to take as long as in ``own``.

    What goes on between two collectives of a bucket, its update above all, slows them down as well: where collectives
    are in flight for most of a pass all of it is taken to be slow.
    """
    if min(own.forward_overlap, own.backward_overlap) < LEAST_OVERLAP:
        return None
    undisturbed_ns = stock.backward_ns / (1 + of_collectives * stock.backward_overlap)
    return PassSlowdown(
        forward=max(0.0, own.forward_ns / stock.forward_ns - 1),
        backward=max(0.0, own.backward_ns / undisturbed_ns - 1),
    )


class _Watch(observer.NullObserver):
    """Keeps the spans of collectives and of the main thread's waits and updates."""

    def __init__(self) -> None:
        self.collectives: list[tuple[int, int]] = []
        self.apart: list[tuple[int, int]] = []
        self.updates: list[tuple[int, int]] = []

    def collective(self, done: observer.Collective) -> None:
        """Keep it."""
        self.collectives.append((done.start_ns, done.end_ns))

    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        """Keep it."""
        self.apart.append((start_ns, end_ns))

    def update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Keep it: copying what was gathered is measured apart."""
        self.apart.append((start_ns, end_ns))

    def background_update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Keep it."""
        self.updates.append((start_ns, end_ns))


class _ProbeModel(nn.Sequential):
    """Layers of this probe, which a plan in force leaves alone without a word."""


def _model() -> nn.Module:
    return _ProbeModel(
        *(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
    )


def _passes(model: nn.Module) -> list[Passes]:
    """What the passes of each step of ``model`` take while it communicates."""
    gradients_ns: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_noting(gradients_ns))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.ones(BATCH, LENGTH, WIDTH)
    watch, before = _Watch(), observer.observer()
    observer.set_observer(watch)
    try:
        moments = [_step(model, optimizer, batch, gradients_ns) for _ in range(STEPS)]
    finally:
        observer.set_observer(before)
    return _computing(moments[WARM_UP_STEPS:], watch, own=isinstance(model, DecoupledDataParallel))


def _noting(gradients_ns: list[int]) -> Callable[[torch.Tensor], None]:
    return lambda _parameter: gradients_ns.append(time.monotonic_ns())


class _Moments(NamedTuple):
    forward_ns: int
    backward_ns: int
    first_gradient_ns: int
    last_gradient_ns: int
    step_ns: int
    end_ns: int


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, gradients_ns: list[int]
) -> _Moments:
    optimizer.zero_grad()
    gradients_ns.clear()
    forward_ns = time.monotonic_ns()
    loss = model(batch).square().mean()
    backward_ns = time.monotonic_ns()
    loss.backward()
    step_ns = time.monotonic_ns()
    optimizer.step()
    return _Moments(forward_ns, backward_ns, gradients_ns[0], gradients_ns[-1], step_ns, time.monotonic_ns())


def _computing(steps: list[_Moments], watch: _Watch, *, own: bool) -> list[Passes]:
    """Of stock DDP nobody tells when collectives are in flight: it is so from the first gradient on."""
    apart = Intervals(watch.apart)
    stock = [] if own else [(each.first_gradient_ns, each.last_gradient_ns) for each in steps]
    in_flight = Intervals([*watch.collectives, *stock])
    # Updates of a step go on under the next one, so each is given the mean of all.
    updates_ns = sum(end - start for start, end in watch.updates) / STEPS
    found = []
    for each in steps:
        passes = (each.forward_ns, each.backward_ns), (each.backward_ns, each.last_gradient_ns)
        forward_ns, backward_ns = ((end - start) * (1 - apart.share_of(start, end)) for start, end in passes)
        forward_share, backward_share = (_share(in_flight, apart, start, end) for start, end in passes)
        step_ns = updates_ns if own else each.end_ns - each.step_ns
        found.append(Passes(forward_ns, backward_ns, forward_share, backward_share, step_ns))
    return found


def _median(steps: list[Passes]) -> Passes:
    return Passes(*(statistics.median(column) for column in zip(*steps, strict=True)))


def _share(in_flight: Intervals, apart: Intervals, start_ns: int, end_ns: int) -> float:
    """The share of what is computed in [start_ns, end_ns) with collectives in flight: in all waits there are some."""
    idle = apart.share_of(start_ns, end_ns)
    return max(0.0, in_flight.share_of(start_ns, end_ns) - idle) / max(1e-9, 1 - idle)
