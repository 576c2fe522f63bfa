"""Probing: what the links and the collectives of this job cost, measured between its own ranks.

Links give latency (half of a small round trip) and goodput (every host sends to the next one at once, as a ring
does). A collective is timed at several sizes and held against the replay of its chunk program on those links;
what is left is its overhead and its byte factor.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from headway import torch_private
from headway.cluster import AlgorithmCost, Cluster, Host
from headway.collectives import live
from headway.collectives.dataflow import Links, ProgramOf, expand
from headway.collectives.program import ring_all_reduce, ring_reduce_scatter
from headway.graph.dataflow import DataflowBuilder
from headway.replay.engine import play

SIZES_BYTES = (4_096, 131_072, 1_048_576, 2_097_152, 4_194_304, 8_388_608)
REPEATS = 7
LATENCY_ROUND_TRIPS = 60
GOODPUT_BYTES = 4_194_304
LONGEST_S = 1.0  # sizes that would take longer are left out
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Places:
    """Where ranks live: hosts in order of their first rank, and the ranks of each."""

    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]


def probe_cluster(progress: Progress = lambda _what: None) -> Cluster:
    """Measure this job's cluster. Every rank calls it, with the default process group initialised on Gloo."""
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
        ("ring", ring_reduce_scatter, _ring_reduce_scatter),
        ("gloo_all_reduce", ring_all_reduce, _gloo_all_reduce),
    ):
        progress(name)
        costs[name] = _cost_of(cluster, program_of, action)
    return cluster.model_copy(update={"algorithms": costs})


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
    for size_bytes in SIZES_BYTES:
        ideal_s = ideal_seconds(cluster, program_of, size_bytes)
        if ideal_s > LONGEST_S and len(measured) >= 2:
            break
        tensor = torch.ones(size_bytes // 4)
        measured.append(_timed(lambda tensor=tensor: action(tensor)))  # type: ignore[misc]
        ideal.append(ideal_s)
    overhead_s, factor = fit_cost(np.array(measured), np.array(ideal))
    return AlgorithmCost(overhead_us=overhead_s * 1e6, byte_factor=factor)


def fit_cost(measured_s: np.ndarray, ideal_s: np.ndarray) -> tuple[float, float]:
    """Overhead (s) and factor of ``measured = overhead + factor · ideal``, for sizes in rising order.

    The smallest message tells the overhead. The factor is taken from the largest half only: shaped and virtual
    links let a small message after a pause pass faster than their rate.
    """
    overhead_s = max(0.0, float(measured_s[0] - ideal_s[0]))
    half = len(measured_s) // 2
    factors = (measured_s[half:] - overhead_s) / ideal_s[half:]
    return overhead_s, float(np.clip(np.median(factors), 0.1, 100.0))


def ideal_seconds(cluster: Cluster, program_of: ProgramOf, size_bytes: int) -> float:
    """What replay says of one collective alone on ``cluster``, without any cost of its algorithm."""
    links = Links(cluster)
    builder = DataflowBuilder(links.resources)
    begins = [builder.operation() for _ in range(cluster.world_size)]
    ends = [builder.operation() for _ in range(cluster.world_size)]
    expand(builder, links, program_of, size_bytes, begins, ends)
    return float(play(builder.close()).end_ns.max()) / 1e9


def _timed(action: Callable[[], None]) -> float:
    """Median time of ``action`` from the last rank's start, as the slowest rank sees it."""
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        begun = time.perf_counter()
        action()
        longest = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        times.append(float(longest))
    return statistics.median(times[1:])


def _ring_reduce_scatter(tensor: torch.Tensor) -> None:
    group = dist.group.WORLD
    assert group is not None
    program = ring_reduce_scatter(dist.get_rank(), dist.get_world_size())
    scratch = torch.empty(live.scratch_numel(tensor.numel(), program.chunks))
    live.run(program, tensor, group, scratch)


def _gloo_all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _shared(value: float, source: int) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(tensor, source)
    return float(tensor)
