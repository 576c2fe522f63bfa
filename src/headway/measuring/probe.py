"""Measures a job's cluster from inside its ranks: links, collectives, codecs and interference.

Latency is half of a small round trip. For goodput, all hosts send to the next one at once, as in a ring, and to others
if links are unequal. Then collectives (``collective_costs``) and codecs (``codecs``) are timed, and finally
computation with and without concurrent communication.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from headway import torch_private
from headway.cluster import BACKGROUND_UPDATE, DEFERRED_UPDATE, RUNTIME_COSTS, AlgorithmCost, Cluster, Host
from headway.collectives.hierarchical import Hosts
from headway.measuring.codecs import codec_costs
from headway.network.collective_costs import CANDIDATES, THOROUGH, Effort, with_costs
from headway.network.fit import link_rates
from headway.network.interference import communication_interference, stop_if_asked
from headway.rpc import interface

REPEATS = 5
LATENCY_ROUND_TRIPS = 60
GOODPUT_BYTES = 4_194_304
SHORT_BYTES = 1_048_576
REST_S = 0.05  # pause before a message, so that links can let a burst through
LEAST_BURST_S = 0.0005
CONCURRENT_BYTES = 1_048_576
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Places:
    """The hosts in order of their first rank, and the ranks of each.

    On ``one_machine`` the hosts are containers or a lab.
    """

    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    one_machine: bool = False


def probe_cluster(
    progress: Progress = lambda _what: None, *, busy_cores: bool = True, effort: Effort = THOROUGH
) -> Cluster:
    """Measure this job's cluster. Every rank calls it, with the default process group on Gloo.

    ``busy_cores`` says that training computes on the same cores as communication, so ranks compute while they are
    timed. Raises RuntimeError, as torch.distributed does, if a peer fails, and HaltedError if one is stopping.
    """
    second = dist.new_group(backend="gloo") if dist.get_world_size() == 2 else None
    assert second is None or isinstance(second, dist.ProcessGroup)
    try:
        with _usual_defaults():
            return _probed(progress, second, busy_cores=busy_cores, effort=effort)
    finally:
        if second is not None:
            torch_private.let_gloo_finish()
            dist.destroy_process_group(second)


@contextmanager
def _usual_defaults() -> Iterator[None]:
    """Create float32 tensors on the CPU, whatever defaults the recorded script has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _probed(
    progress: Progress, second: dist.ProcessGroup | None, *, busy_cores: bool, effort: Effort
) -> Cluster:
    places = _places()
    progress("latency")
    latency_us = _latency_us(_first_pair_apart(places))
    local_latency_us = _latency_us(_first_pair_together(places))
    progress("goodput")
    up_gbps, down_gbps, burst_bytes = _link_rates([ranks[0] for ranks in places.ranks], latency_us)
    together = next((list(ranks[:2]) for ranks in places.ranks if len(ranks) > 1), [])
    local_gbps = min(_ring_rates(together, local_latency_us).gbps, default=20.0)
    hosts = tuple(
        Host(
            name=name,
            workers=len(ranks),
            up_gbps=up_gbps[index] if up_gbps else local_gbps,
            down_gbps=down_gbps[index] if down_gbps else local_gbps,
        )
        for index, (name, ranks) in enumerate(zip(places.hosts, places.ranks, strict=True))
    )
    cluster = Cluster(
        hosts=hosts,
        latency_us=latency_us or local_latency_us,
        local_gbps=local_gbps,
        local_latency_us=local_latency_us or 30.0,
        shared_cores=os.cpu_count() if places.one_machine else None,
        burst_bytes=burst_bytes,
        source="measured by headway probe",
    )
    if cluster.world_size == 1:
        return cluster
    progress("collectives by every algorithm")
    cluster = with_costs(cluster, second, busy_cores=busy_cores, effort=effort)
    progress("codecs of gradients")
    cluster = cluster.model_copy(update={"codecs": codec_costs(busy_cores=busy_cores)})
    if not busy_cores:
        return cluster
    progress("computation concurrent with communication")
    concurrent = CANDIDATES[0].prepared(CONCURRENT_BYTES, Hosts.of_cluster(cluster), second)
    slowdown, update_s = communication_interference(concurrent, effort.interference_rounds)
    progress("interference of decoupled training and its communication")
    from headway.strategies.decoupled.training_interference import training_interference

    factors = training_interference(slowdown)
    costs_us = {
        DEFERRED_UPDATE: update_s * 1e6,
        BACKGROUND_UPDATE: max(update_s * 1e6, factors.update_us),
        **_runtime_costs_us(),
    }
    costs = {**cluster.algorithms, **{name: AlgorithmCost(overhead_us=us) for name, us in costs_us.items()}}
    return cluster.model_copy(
        update={"algorithms": costs, "compute_slowdown": slowdown, "decoupled_slowdown": factors.slowdown}
    )


def _runtime_costs_us() -> dict[str, float]:
    """The decoupled runtime's cost to the main thread, averaged over ranks."""
    from headway.strategies.decoupled.own_cost import own_cost

    mean = torch.tensor(own_cost(), dtype=torch.float64)
    dist.all_reduce(mean)
    return dict(zip(RUNTIME_COSTS, (mean / dist.get_world_size()).tolist(), strict=True))


def _places() -> Places:
    store, rank, world_size = torch_private.default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"headway/host/{rank}", interface.host_name())
    names = [store.get(f"headway/host/{source}").decode() for source in range(world_size)]
    hosts = tuple(dict.fromkeys(names))
    store.set(f"headway/machine/{rank}", _machine())
    machines = {store.get(f"headway/machine/{source}") for source in range(world_size)}
    return Places(
        hosts=hosts,
        ranks=tuple(tuple(r for r, name in enumerate(names) if name == host) for host in hosts),
        one_machine=len(hosts) > 1 and len(machines) == 1,
    )


def _machine() -> str:
    """An id of the running kernel, which containers and labs share; or else the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _first_pair_apart(places: Places) -> tuple[int, int] | None:
    return (places.ranks[0][0], places.ranks[1][0]) if len(places.ranks) > 1 else None


def _first_pair_together(places: Places) -> tuple[int, int] | None:
    return next(((ranks[0], ranks[1]) for ranks in places.ranks if len(ranks) > 1), None)


def _latency_us(pair: tuple[int, int] | None) -> float:
    """Half of a fast round trip (lower quartile) of 8 bytes between two ranks; 0 for no pair."""
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


class _Rates(NamedTuple):
    """Goodput from each rank of a ring to the next, and the median burst that a rested link lets through."""

    gbps: list[float]
    burst_bytes: int


def _link_rates(ring: Sequence[int], latency_us: float) -> tuple[list[float], list[float], int]:
    """Upload and download rates of each host, measured by one rank of each, and the burst of rested links.

    A message is as slow as the slower of its two links, so if rates differ, each host sends to several others.
    """
    rates: list[_Rates] = []

    def measured(stride: int) -> list[float]:
        rates.append(_ring_rates(ring, latency_us, stride))
        return rates[-1].gbps

    return *link_rates(measured), rates[0].burst_bytes


def _ring_rates(ring: Sequence[int], latency_us: float, stride: int = 1) -> _Rates:
    """Goodput and bursts, with all ranks of ``ring`` sending to the ``stride``-th next; none for fewer than two."""
    if len(ring) < 2:
        return _Rates([], 0)
    short_s, long_s = (_ring_times_s(ring, size_bytes, stride) for size_bytes in (SHORT_BYTES, GOODPUT_BYTES))
    saved = []
    for short, long in zip(short_s, long_s, strict=True):
        byte_s = max(0.0, long - short) / (GOODPUT_BYTES - SHORT_BYTES)
        saved.append((SHORT_BYTES * byte_s + latency_us / 1e6 - short, byte_s))
    saved_s, byte_s = sorted(saved)[len(saved) // 2]
    if saved_s < LEAST_BURST_S:
        return _Rates([GOODPUT_BYTES * 8 / long / 1e9 for long in long_s], 0)
    burst_bytes = round(saved_s / byte_s)
    return _Rates([(GOODPUT_BYTES - burst_bytes) * 8 / long / 1e9 for long in long_s], burst_bytes)


def _ring_times_s(ring: Sequence[int], size_bytes: int, stride: int) -> list[float]:
    """Seconds of a message from each rank of ``ring`` to another, all at once and on rested links."""
    rank = dist.get_rank()
    times = []
    outgoing, incoming = torch.ones(size_bytes // 4), torch.empty(size_bytes // 4)
    for _ in range(REPEATS):
        stop_if_asked()
        time.sleep(REST_S)
        dist.barrier()
        begun = time.perf_counter()
        if rank in ring:
            place = ring.index(rank)
            following, before = ring[(place + stride) % len(ring)], ring[place - stride]
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
    received = [_shared(seconds, source) for source in ring]
    return [received[(place + stride) % len(ring)] for place in range(len(ring))]


def _shared(value: float, source: int) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(tensor, source)
    return float(tensor)
