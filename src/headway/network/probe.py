"""Probing: what the links and the collectives of this job cost, measured between its own ranks.

Links give latency (half of a small round trip) and goodput (every host sends to the next one at once, as a ring
does). Then collectives are timed (``collective_costs``), and at last computation alone and beside communication.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway import torch_private
from headway.cluster import DEFERRED_UPDATE, AlgorithmCost, Cluster, Host
from headway.network.beside import beside_communication
from headway.network.collective_costs import CANDIDATES, measure_costs

REPEATS = 5
LATENCY_ROUND_TRIPS = 60
GOODPUT_BYTES = 4_194_304
BESIDE_BYTES = 1_048_576
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Places:
    """Where ranks live: hosts in order of their first rank, and the ranks of each."""

    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]


def probe_cluster(progress: Progress = lambda _what: None, *, busy_cores: bool = True) -> Cluster:
    """Measure this job's cluster. Every rank calls it, with the default process group initialised on Gloo.

    ``busy_cores`` says that training computes on the cores that communicate, so ranks compute while they are timed.
    Raises RuntimeError, as torch.distributed does, where a peer fails meanwhile.
    """
    places = _places()
    second = dist.new_group(backend="gloo") if dist.get_world_size() == 2 else None
    assert second is None or isinstance(second, dist.ProcessGroup)
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
    progress("ring and native collectives")
    costs = measure_costs(cluster, second, busy_cores=busy_cores)
    if not busy_cores:
        return cluster.model_copy(update={"algorithms": costs})
    progress("computation beside communication")
    beside = CANDIDATES[0]
    slowdown, update_s = beside_communication(
        beside.prepared(BESIDE_BYTES, second), beside.ideal_s(cluster, BESIDE_BYTES)
    )
    costs[DEFERRED_UPDATE] = AlgorithmCost(overhead_us=update_s * 1e6)
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


def _shared(value: float, source: int) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(tensor, source)
    return float(tensor)
