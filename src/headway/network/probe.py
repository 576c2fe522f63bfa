"""Probing: what the links and the collectives of this job cost, measured between its own ranks.

Links give latency (half of a small round trip) and goodput (every host sends to the next one at once, as a ring
does). A collective is timed at several sizes and held against the replay of its chunk program on those links;
what is left is its overhead and its byte factor. At last computation is timed alone and beside communication.
"""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from headway import torch_private
from headway.cluster import AlgorithmCost, Cluster, Host
from headway.collectives import live
from headway.collectives.algorithms import GLOO_ALL_REDUCE, RING
from headway.collectives.dataflow import Links, ProgramOf, expand
from headway.collectives.program import ring_all_reduce, ring_reduce_scatter
from headway.graph.dataflow import DataflowBuilder
from headway.replay.engine import play

# Sizes of one collective, and how many of them follow each other without a pause in one measurement.
SIZES_BYTES = {65_536: 60, 262_144: 30, 1_048_576: 10, 4_194_304: 4}
REPEATS = 5
LATENCY_ROUND_TRIPS = 60
GOODPUT_BYTES = 4_194_304
BESIDE_BYTES = 1_048_576
BESIDE_S = 1.0
BESIDE_ROUNDS = 3
UPDATES = 50
LONGEST_S = 0.5  # sizes that would take longer are left out
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Places:
    """Where ranks live: hosts in order of their first rank, and the ranks of each."""

    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]


def probe_cluster(progress: Progress = lambda _what: None) -> Cluster:
    """Measure this job's cluster. Every rank calls it, with the default process group initialised on Gloo.

    Raises RuntimeError, as torch.distributed does, where a peer fails meanwhile.
    """
    places = _places()
    progress("latency")
    latency_us = _latency_us(_first_pair_apart(places))
    local_latency_us = _latency_us(_first_pair_together(places))
    progress("goodput")
    rates_gbps = _ring_rates_gbps([ranks[0] for ranks in places.ranks])
    together = next((list(ranks[:2]) for ranks in places.ranks if len(ranks) > 1), [])
    local_gbps = min(_ring_rates_gbps(together), default=20.0)
    hosts = tuple(
        Host(
            name=name,
            workers=len(ranks),
            up_gbps=rates_gbps[index] if len(rates_gbps) > 1 else local_gbps,
            down_gbps=rates_gbps[index - 1] if len(rates_gbps) > 1 else local_gbps,
        )
        for index, (name, ranks) in enumerate(zip(places.hosts, places.ranks, strict=True))
    )
    cluster = Cluster(
        hosts=hosts,
        latency_us=latency_us or local_latency_us,
        local_gbps=local_gbps,
        local_latency_us=local_latency_us or 30.0,
        source="probe",
    )
    if cluster.world_size == 1:
        return cluster
    costs = {}
    for name, program_of, action in (
        (RING, ring_reduce_scatter, _ring_reduce_scatter),
        (GLOO_ALL_REDUCE, ring_all_reduce, _gloo_all_reduce),
    ):
        progress(name)
        costs[name] = _cost_of(cluster, program_of, action)
    progress("computation beside communication")
    slowdown, update_s = _beside_communication(ideal_seconds(cluster, ring_reduce_scatter, BESIDE_BYTES))
    costs["deferred_update"] = AlgorithmCost(overhead_us=update_s * 1e6)
    return cluster.model_copy(update={"algorithms": costs, "compute_slowdown": slowdown})


def _places() -> Places:
    store, rank, world_size = torch_private.default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"headway/host/{rank}", os.environ.get("HEADWAY_HOST") or socket.gethostname())
    names = [store.get(f"headway/host/{each}").decode() for each in range(world_size)]
    hosts = tuple(dict.fromkeys(names))
    return Places(hosts, tuple(tuple(r for r, name in enumerate(names) if name == host) for host in hosts))


def _first_pair_apart(places: Places) -> tuple[int, int] | None:
    return (places.ranks[0][0], places.ranks[1][0]) if len(places.ranks) > 1 else None


def _first_pair_together(places: Places) -> tuple[int, int] | None:
    return next(((ranks[0], ranks[1]) for ranks in places.ranks if len(ranks) > 1), None)


def _latency_us(pair: tuple[int, int] | None) -> float:
    """Half of a quick round trip (lower quartile) of 8 bytes between two ranks; 0 for no pair."""
    if pair is None:
        return 0.0
    first, second = pair
    rank = dist.get_rank()
    message = torch.zeros(1, dtype=torch.int64)
    trips = []
    for _ in range(LATENCY_ROUND_TRIPS):
        begun = time.perf_counter()
        if rank == first:
            dist.send(message, second)
            dist.recv(message, second)
        elif rank == second:
            dist.recv(message, first)
            dist.send(message, first)
        trips.append(time.perf_counter() - begun)
    return _shared(statistics.quantiles(trips, n=4)[0] / 2 * 1e6, first)


def _ring_rates_gbps(ring: Sequence[int]) -> list[float]:
    """Goodput from each rank of ``ring`` to the next one, all at once; empty for fewer than two."""
    if len(ring) < 2:
        return []
    rank = dist.get_rank()
    times = []
    outgoing, incoming = torch.ones(GOODPUT_BYTES // 4), torch.empty(GOODPUT_BYTES // 4)
    for _ in range(REPEATS):
        dist.barrier()
        begun = time.perf_counter()
        if rank in ring:
            place = ring.index(rank)
            following, before = ring[(place + 1) % len(ring)], ring[place - 1]
            # The receive goes first: Gloo tells the peer of it over the connection that then carries the payload,
            # and a payload of our own in front of that message would make both directions take turns.
            receiving = dist.irecv(incoming, before)
            sending = dist.isend(outgoing, following)
            assert sending is not None
            assert receiving is not None
            receiving.wait()
            times.append(time.perf_counter() - begun)
            sending.wait()
    seconds = statistics.median(times[1:]) if times else 0.0
    received = [_shared(seconds, each) for each in ring]
    return [GOODPUT_BYTES * 8 / received[(place + 1) % len(ring)] / 1e9 for place in range(len(ring))]


def _cost_of(
    cluster: Cluster, program_of: ProgramOf, action: Callable[[torch.Tensor], None]
) -> AlgorithmCost:
    measured: list[float] = []
    ideal: list[float] = []
    for size_bytes, count in SIZES_BYTES.items():
        ideal_s = ideal_seconds(cluster, program_of, size_bytes)
        if ideal_s * count > LONGEST_S:
            count = max(1, int(LONGEST_S / ideal_s))
        tensor = torch.ones(size_bytes // 4)
        measured.append(_timed(partial(_repeat, action, tensor, count)) / count)
        ideal.append(ideal_s)
        if ideal_s > LONGEST_S:
            break
    overhead_s, factor = fit_cost(np.array(measured), np.array(ideal))
    return AlgorithmCost(overhead_us=overhead_s * 1e6, byte_factor=factor)


def fit_cost(measured_s: np.ndarray, ideal_s: np.ndarray) -> tuple[float, float]:
    """Overhead (s, >= 0) and factor of ``measured = overhead + factor · ideal``, by least relative error."""
    columns = np.stack([1.0 / measured_s, ideal_s / measured_s], axis=1)
    (overhead_s, factor), *_ = np.linalg.lstsq(columns, np.ones_like(measured_s), rcond=None)
    if len(measured_s) < 2 or overhead_s < 0 or factor <= 0:
        return 0.0, float(np.clip(np.median(measured_s / ideal_s), 0.1, 100.0))
    return float(overhead_s), float(np.clip(factor, 0.1, 100.0))


def _repeat(action: Callable[[torch.Tensor], None], tensor: torch.Tensor, count: int) -> None:
    """Collectives on each other's heels: a pause would let shaped links save up for a burst."""
    for _ in range(count):
        action(tensor)


def ideal_seconds(cluster: Cluster, program_of: ProgramOf, size_bytes: int) -> float:
    """What replay says of one collective alone on ``cluster``, without any cost of its algorithm."""
    links = Links(cluster)
    builder = DataflowBuilder(links.resources)
    begins = [builder.operation() for _ in range(cluster.world_size)]
    ends = [builder.operation() for _ in range(cluster.world_size)]
    expand(builder, links, program_of, size_bytes, begins, ends)
    return float(play(builder.close()).end_ns.max()) / 1e9


def _timed(action: Callable[[], None]) -> float:
    """Median time of ``action`` on a thread of its own, as the slowest rank sees it.

    Every rank computes meanwhile, as it will in training: on busy cores a thread waits for its turn at every message.
    """
    work = _Work()
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        took_s: list[float] = []
        thread = _Aside(partial(_stopwatch, action, took_s))
        thread.start()
        work.seconds_each(thread.is_alive)
        thread.finish()
        longest = torch.tensor(took_s, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        times.append(float(longest))
    return statistics.median(times)


class _Aside(threading.Thread):
    """A thread whose failure is its starter's too."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self._failure: Exception | None = None

    def run(self) -> None:
        try:
            self._action()
        except Exception as failure:  # raised again by finish
            self._failure = failure

    def finish(self) -> None:
        """Wait for the end; raises what the action raised."""
        self.join()
        if self._failure is not None:
            raise self._failure


def _stopwatch(action: Callable[[], None], took_s: list[float]) -> None:
    begun = time.perf_counter()
    action()
    took_s.append(time.perf_counter() - begun)


def _ring_reduce_scatter(tensor: torch.Tensor) -> None:
    group = dist.group.WORLD
    assert group is not None
    program = ring_reduce_scatter(dist.get_rank(), dist.get_world_size())
    scratch = torch.empty(live.scratch_numel(tensor.numel(), program.chunks))
    live.run(program, tensor, group, scratch)


def _gloo_all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _beside_communication(collective_s: float) -> tuple[float, float]:
    """What communication costs the computation beside it, on the same cores; means over ranks.

    Returns how much longer a piece of computation takes while rings run, and the seconds that an optimizer's step
    takes by itself, apart from its arithmetic: what a deferred update pays once a bucket.
    """
    count = max(2, round(BESIDE_S / collective_s))
    tensor = torch.ones(BESIDE_BYTES // 4)
    work, update = _Work(), _tiny_update()
    slowdowns, updates_s = [], []
    for _ in range(BESIDE_ROUNDS):
        dist.barrier()
        until = time.perf_counter() + BESIDE_S / 2
        alone_s = work.seconds_each(lambda until=until: time.perf_counter() < until)  # type: ignore[misc]
        dist.barrier()
        rings = _Aside(partial(_repeat, _ring_reduce_scatter, tensor, count))
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


class _Work:
    """Some of what a layer does: a product that lives in the caches, and a pass over memory that does not."""

    def __init__(self) -> None:
        self._left, self._right = torch.ones(512, 256), torch.ones(256, 512)
        self._source, self._target = torch.ones(1_000_000), torch.empty(1_000_000)

    def seconds_each(self, go_on: Callable[[], bool]) -> float:
        begun = time.perf_counter()
        count = 0
        while go_on():
            torch.mm(self._left, self._right)
            torch.mul(self._source, 0.5, out=self._target)
            count += 1
        return (time.perf_counter() - begun) / max(1, count)


def _tiny_update() -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.zeros(8)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    return torch.optim.AdamW(parameters, lr=1e-3).step


def _shared(value: float, source: int) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(tensor, source)
    return float(tensor)
