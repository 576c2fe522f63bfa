"""Reimplements NCCL's tuning model: which algorithm and protocol NCCL chooses for a size, and the expected time.

NCCL derives a latency and a bandwidth for each algorithm and protocol from the GPU, the links within hosts and the
network cards (NVIDIA/nccl, src/graph/tuning.cc, versions 2.27 and 2.30). These are the same rules, for identical hosts.
If a communicator was timed, a factor corrects its bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from headway.cluster import Cluster, Ways

Architecture = Literal["volta", "ampere", "hopper", "blackwell"]
Cpu = Literal["intel", "amd", "other"]
Algorithm = Literal["ring", "tree", "nvls", "nvls_tree", "collnet_direct", "collnet_chain", "pat"]
Protocol = Literal["ll", "ll128", "simple"]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]

PROTOCOLS: tuple[Protocol, ...] = ("ll", "ll128", "simple")
ALGORITHMS: tuple[Algorithm, ...] = (
    "ring", "tree", "nvls", "nvls_tree", "collnet_direct", "collnet_chain", "pat",
)  # fmt: skip

# In microseconds, for LL, LL128 and Simple.
_Three = tuple[float, float, float]
_BASE_US: dict[Algorithm, _Three] = {
    "tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0),
}  # fmt: skip
_NOTHING: _Three = (0.0, 0.0, 0.0)
_STEP_US: dict[str, dict[Algorithm, _Three]] = {
    "nvlink": {
        "tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "collnet_direct": (0, 0, 3.7), "collnet_chain": (0, 0, 2.8),
        "nvls": (0, 0, 25.0), "nvls_tree": (0, 0, 25.0), "pat": (0, 0, 4.0),
    },
    "pci": {
        "tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "collnet_direct": (0, 0, 3.7), "collnet_chain": (0, 0, 2.8),
        "pat": (0, 0, 4.0),
    },
    "net": {
        "tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "collnet_direct": (0, 0, 31.0),
        "collnet_chain": (0, 0, 30.0), "nvls": (0, 0, 18.0), "nvls_tree": (0, 0, 20.9), "pat": (0, 0, 14.0),
    },
}  # fmt: skip
NETWORK_US = _STEP_US["net"]["ring"][
    2
]  # of a Simple step between hosts; a cluster's latency is compared with it

# In GB/s per communicator or per channel; for one, two, and more hosts.
_LL_OF_ONE_HOST = {"volta": 39.0, "ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
_LL_BY_CPU: dict[str, tuple[float, float]] = {
    "intel": (39.0, 20.4),
    "amd": (22.5, 19.0),
    "other": (39.0, 20.4),
}
_RING_LL128: dict[str, float] = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}
_TREE_LL128: dict[str, _Three] = {
    "volta": (20.0, 20.0, 20.0), "ampere": (20.0, 20.0, 20.0), "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}  # fmt: skip
_TREE: dict[str, _Three] = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}  # fmt: skip
_NVLS_TREE: dict[str, _Three] = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (0.0, 57.7, 45.5),
    "blackwell": (0.0, 96.0, 80.0),
}  # fmt: skip
_NVLS_EFFICIENCY = {"volta": 0.0, "ampere": 0.0, "hopper": 0.85, "blackwell": 0.74}
# The share of their bandwidth that trees reach, by powers of two of the size from 64 bytes on.
_TREE_SHARE: dict[Protocol, tuple[float, ...]] = {
    "ll": (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    "simple": (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
}  # fmt: skip
_SLOWER_NVLS = (2, 29)
_EARLIER_NVLS_TREE_US = 14.0  # of a step between hosts before that version
MOST_REACHED = 1.1  # largest ratio to the speed that NCCL assumes for a card
_PLATEAU_BYTES = 64  # per channel and rank; from here on, a ring has a longer latency


@dataclass(frozen=True, slots=True)
class Fabric:
    """The GPUs of a communicator and their interconnect.

    ``inside_gb_s`` is the one-way bandwidth of a GPU's links within its host, ``outside_gb_s`` the total of the host's
    cards that the communicator uses; both as NCCL assumes them, in GB/s. ``channels`` is the number of channels of its
    rings. ``version`` is NCCL's; from 2.29 on it expects NVLS to be slower.

    NCCL does not know the following when it chooses: ``reached`` is the reached share of ``outside_gb_s``,
    ``network_factor`` multiplies latencies between hosts, ``tree_factor`` those of trees, and ``passing_gb_s`` limits
    rings through a GPU's links. ``scaled`` has the factors of what-ifs on all bandwidths and latencies.
    """

    architecture: Architecture = "hopper"
    cpu: Cpu = "intel"
    inside_gb_s: float = 320.0
    outside_gb_s: float = 384.0
    channels: int = 8
    inside: Literal["nvlink", "pci"] = "nvlink"
    nvls: bool = False
    collnet: bool = False
    reached: float = 1.0
    network_factor: float = 1.0
    tree_factor: float = 1.0
    passing_gb_s: float = math.inf
    scaled: tuple[float, float] = (1.0, 1.0)
    version: tuple[int, int] = (2, 27)


def fabric_of(cluster: Cluster, hosts: Sequence[int], a_host: int) -> Fabric:
    """The fabric of a communicator with ``a_host`` ranks on each of ``hosts`` (indices); the cluster has ``nccl``."""
    model = cluster.nccl
    assert model is not None, "a cluster of NCCL's"
    ring_hosts = [cluster.hosts[at] for at in hosts]
    # A host's link stands for all its cards; a communicator uses those of its ranks.
    cards = {host.name: model.cards or host.workers for host in ring_hosts}
    used = min(max(1, -(-a_host * cards[host.name] // host.workers)) for host in ring_hosts)
    reached = (
        min(min(host.up_gbps, host.down_gbps) / 8 / cards[host.name] for host in ring_hosts)
        / model.cards_gb_s
    )
    longer = 1.0
    if (
        cluster.paths and len(hosts) > 1
    ):  # a ring uses the paths between neighbours, with one connection per card
        ways, ring = Ways(cluster), list(zip(hosts, (*hosts[1:], hosts[0]), strict=True))
        taken = [path.gbps for pair in ring if (path := ways.paths.get(pair)) and path.gbps is not None]
        reached = min([reached, *(gbps / 8 / model.cards_gb_s for gbps in taken)])
        if cluster.latency_us:
            longer = max(ways.latency_us(*pair) for pair in ring) / cluster.latency_us
    return Fabric(
        model.architecture,
        model.cpu,
        model.inside_gb_s,
        model.cards_gb_s * used,
        channels_of(a_host),
        model.inside,
        nvls=model.nvls,
        reached=min(reached, MOST_REACHED),
        network_factor=model.network_factor * longer,
        tree_factor=model.tree_factor,
        passing_gb_s=model.inside_gb_s,
        scaled=model.scaled,
        version=model.version,
    )


def channels_of(a_host: int) -> int:
    """The number of ring channels for ``a_host`` GPUs per host, each with its own card."""
    return min(8, 2 * a_host)


class Tuned(NamedTuple):
    """NCCL's expectation for an algorithm and protocol; ``gb_s`` is tensor size by time, 0 if unsupported."""

    latency_us: float
    gb_s: float


class Choice(NamedTuple):
    """NCCL's choice for a collective, and its time."""

    algorithm: Algorithm
    protocol: Protocol
    time_us: float


@cache
def tuned(
    kind: Kind, algorithm: Algorithm, protocol: Protocol, ranks: int, hosts: int, fabric: Fabric
) -> Tuned:
    """The latency and bandwidth of one algorithm and protocol, over ``ranks`` on identical ``hosts``.

    ``ranks`` is a multiple of ``hosts``, and at least 2.
    """
    assert ranks >= 2, "a collective needs at least two ranks"
    assert ranks % hosts == 0, "hosts have equally many ranks"
    bus_gb_s = _bus_gb_s(kind, algorithm, protocol, ranks, hosts, fabric)
    if bus_gb_s <= 0:
        return Tuned(0.0, 0.0)
    steps = 2 * (ranks - 1) if kind == "all_reduce" else ranks - 1
    if algorithm in ("nvls", "nvls_tree") and fabric.version < _SLOWER_NVLS:
        bus_gb_s *= 5 / 6
    elif algorithm in ("ring", "nvls", "nvls_tree"):
        bus_gb_s *= ranks / steps
    elif kind == "all_reduce":
        bus_gb_s *= 0.5
    return Tuned(_latency_us(kind, algorithm, protocol, ranks, hosts, steps, fabric), bus_gb_s)


def _bus_gb_s(
    kind: Kind, algorithm: Algorithm, protocol: Protocol, ranks: int, hosts: int, fabric: Fabric
) -> float:
    """The algorithm's bus bandwidth; 0 if NCCL does not use it here."""
    a_host, simple = ranks // hosts, protocol == "simple"
    count = min(hosts, 3) - 1  # one host, two, more
    reduces = kind == "all_reduce"
    outside = fabric.outside_gb_s * fabric.reached
    ceiling_gb_s = fabric.inside_gb_s if hosts == 1 else min(outside, fabric.inside_gb_s * a_host)
    by_cpu = _LL_BY_CPU[fabric.cpu]
    ll_most = by_cpu[count - 1] if count else _LL_OF_ONE_HOST[fabric.architecture]
    if algorithm == "ring":
        ceiling_gb_s = min(ceiling_gb_s, fabric.passing_gb_s)
        if protocol == "ll":
            return min(ll_most, 0.5 * ceiling_gb_s)
        return (
            ceiling_gb_s
            if simple
            else min(0.92 * ceiling_gb_s, fabric.channels * _RING_LL128[fabric.architecture])
        )
    if algorithm == "tree":
        if not reduces:
            return 0.0
        most = fabric.channels * _TREE[fabric.architecture][count]
        # Between two hosts, a tree uses both directions of the cards.
        carried = min(0.92 * (ceiling_gb_s if hosts != 2 else 2 * ceiling_gb_s), most)
        if protocol == "ll":
            carried = min(carried / 3.8, ll_most)
        elif protocol == "ll128":
            share = 7 / 9 if hosts == 1 else 120 / 128
            carried = min(carried * share, fabric.channels * _TREE_LL128[fabric.architecture][count])
        return carried if hosts == 1 else 0.85 * carried
    if not simple:
        return 0.0
    if algorithm in ("nvls", "nvls_tree"):
        return _nvls_gb_s(kind, algorithm, a_host, hosts, count, fabric)
    if algorithm == "pat":
        return 0.75 * ceiling_gb_s if not reduces and a_host == 1 and hosts > 1 else 0.0
    if not fabric.collnet or hosts == 1:
        return 0.0
    if algorithm == "collnet_chain":
        return fabric.inside_gb_s if reduces else 0.0
    if not reduces:
        return a_host * min(fabric.inside_gb_s, 0.9 * outside) / fabric.channels
    crowd = a_host / fabric.channels
    crowd -= (crowd - 1) / 2
    modern = fabric.architecture in ("hopper", "blackwell")
    return fabric.inside_gb_s / crowd * (0.85 if modern else 1.0)


def _nvls_gb_s(
    kind: Kind, algorithm: Algorithm, a_host: int, hosts: int, count: int, fabric: Fabric
) -> float:
    """The bandwidth of NVLS (reducing switches) inside a host, and of NVLS with a tree between hosts."""
    reduces = kind == "all_reduce"
    efficiency = _NVLS_EFFICIENCY[fabric.architecture]
    if not fabric.nvls or not efficiency or a_host < 2 or fabric.channels < 2:
        return 0.0
    inside = fabric.inside_gb_s * efficiency * (fabric.channels - 1) / fabric.channels
    inside *= 2 if reduces else (a_host - 1) / a_host
    if algorithm == "nvls":
        return inside if hosts == 1 else 0.0
    if not reduces or hosts == 1:
        return 0.0
    # The tree uses both directions of a card, one up and one down.
    outside = fabric.outside_gb_s * fabric.reached / (2 if hosts > 2 else 1)
    inside = min(inside, fabric.inside_gb_s) if fabric.version < _SLOWER_NVLS else inside
    return min(inside, outside, fabric.channels * _NVLS_TREE[fabric.architecture][count])


def _latency_us(
    kind: Kind,
    algorithm: Algorithm,
    protocol: Protocol,
    ranks: int,
    hosts: int,
    steps: int,
    fabric: Fabric,
) -> float:
    place = PROTOCOLS.index(protocol)
    a_host = ranks // hosts
    base_us = _BASE_US.get(algorithm, _NOTHING)[place]
    inside_us = _STEP_US[fabric.inside].get(algorithm, _NOTHING)[place]
    # With one GPU per host nothing hides a step between hosts, so it takes as long as a tree's.
    between: Algorithm = "tree" if a_host == 1 else algorithm
    outside_us = _STEP_US["net"].get(between, _NOTHING)[place] * fabric.network_factor
    rounds = hosts.bit_length() - 1
    if algorithm == "ring":
        if hosts > 1:
            posting_us = (2.0 if fabric.cpu == "amd" else 1.0) * (3 if protocol == "simple" else 1)
            inside_us = max(inside_us, posting_us)
        crossings = 0 if hosts == 1 else (2 if kind == "all_reduce" else 1) * (hosts - 1)
        return base_us + (steps - crossings) * inside_us + crossings * outside_us
    if algorithm == "tree":
        return fabric.tree_factor * (base_us + 2 * ((a_host - 1) * inside_us + rounds * outside_us))
    if algorithm == "nvls":
        return inside_us + (outside_us if hosts > 1 else 0.0)
    if algorithm == "nvls_tree":
        if fabric.version < _SLOWER_NVLS:
            outside_us = _EARLIER_NVLS_TREE_US * fabric.network_factor
        return inside_us + 2 * rounds * outside_us
    if algorithm == "collnet_direct":
        return base_us + 2 * (min(1, a_host - 1) * inside_us + (a_host - 1) * 0.4) + outside_us
    if algorithm == "collnet_chain":
        return base_us + 2 * (a_host - 1) * inside_us + outside_us
    return base_us + rounds * (outside_us / 3.5) + ranks * 2.8


def time_us(
    kind: Kind,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: float,
    ranks: int,
    hosts: int,
    fabric: Fabric,
) -> float | None:
    """The time that NCCL expects for a tensor of ``size_bytes``; None if the combination is unsupported.

    ``size_bytes`` is the full tensor's: the output of an all-gather, or the input of a reduce-scatter.
    """
    latency_us, gb_s = tuned(kind, algorithm, protocol, ranks, hosts, fabric)
    if gb_s <= 0:
        return None
    if kind == "all_reduce" and (
        algorithm == "tree" or (algorithm == "nvls_tree" and fabric.architecture == "blackwell")
    ):
        power = (int(size_bytes) >> 6).bit_length() - 1
        shares = _TREE_SHARE[protocol]
        gb_s *= shares[power] if 0 <= power < len(shares) else 1.0
    long = size_bytes >= _PLATEAU_BYTES * fabric.channels * ranks
    if algorithm == "ring" and protocol == "simple" and kind == "all_reduce" and hosts > 1 and long:
        latency_us *= 1.9 if fabric.architecture == "volta" else 1.4
    return latency_us + size_bytes / (1e3 * gb_s)


def choose(kind: Kind, size_bytes: float, ranks: int, hosts: int, fabric: Fabric) -> Choice:
    """NCCL's choice, the algorithm and protocol with the shortest expected time, and its predicted time.

    After a what-if, the previous choice is also allowed (as with NCCL_ALGO), so that no faster network slows down a step.
    """
    choices = {_expected_best(kind, size_bytes, ranks, hosts, _as_nccl_sees_it(fabric))}
    if fabric.scaled != (1.0, 1.0):
        choices.add(_expected_best(kind, size_bytes, ranks, hosts, _as_nccl_saw_it(fabric)))
    timed = []
    for algorithm, protocol in choices:
        latency_us, gb_s = tuned(kind, algorithm, protocol, ranks, hosts, fabric)
        timed.append(Choice(algorithm, protocol, latency_us + size_bytes / (1e3 * gb_s)))
    return min(timed, key=lambda choice: choice.time_us)


@lru_cache(maxsize=100_000)
def _expected_best(
    kind: Kind, size_bytes: float, ranks: int, hosts: int, fabric: Fabric
) -> tuple[Algorithm, Protocol]:
    expected_us = {
        (algorithm, protocol): expected
        for algorithm in ALGORITHMS
        for protocol in PROTOCOLS
        if (expected := time_us(kind, algorithm, protocol, size_bytes, ranks, hosts, fabric)) is not None
    }
    assert expected_us, "a ring always can"
    return min(expected_us, key=lambda pair: expected_us[pair])


@cache
def _as_nccl_sees_it(fabric: Fabric) -> Fabric:
    return replace(
        fabric, reached=1.0, network_factor=1.0, tree_factor=1.0, passing_gb_s=math.inf, scaled=(1.0, 1.0)
    )


@cache
def _as_nccl_saw_it(fabric: Fabric) -> Fabric:
    before = _as_nccl_sees_it(fabric)
    bandwidth = fabric.scaled[0]
    return replace(
        before, inside_gb_s=before.inside_gb_s / bandwidth, outside_gb_s=before.outside_gb_s / bandwidth
    )
