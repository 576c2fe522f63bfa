"""Computes cuts: the least traffic over the links of a cluster, for any algorithm that exchanges gradients.

Every worker ends up with every gradient element, summed over all workers. No switch reduces on the way, so:

- a host sends each element at least once (its own part) and receives it at least once (the others' parts);
- between ``H`` hosts, an element is sent at least ``2 (H - 1)`` times: ``H - 1`` times until one host has the sum, and
  once more to every other host (Patarasuk and Yuan, 2009). In a ring, every host sends an equal part;
- the same holds for workers instead of hosts, over links and memory together;
- and for the workers of one host plus everything outside, taken as one more worker.

This also covers algorithms that first reduce within hosts. A link is a token bucket: within any time ``t`` it lets
``credit + rate * t`` pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headway.cluster import Cluster, Host

BYTES_A_NS_AND_GBPS = 1 / 8


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of links that each gradient byte passes at least ``copies`` times.

    Together they carry ``rate`` bytes per ns, and ``credit_bytes`` more after a pause, with ``latency_ns``. If
    ``in_halves``, half of the copies carry the finished sum.
    """

    name: str
    copies: int
    rate: float
    credit_bytes: float
    latency_ns: float
    in_halves: bool = False

    @property
    def credit_ns(self) -> float:
        """The time that the burst would take at the links' rate."""
        return self.credit_bytes / self.rate

    def time_ns(self, size_bytes: float) -> float:
        """How long ``size_bytes`` of gradients occupy the links."""
        return self.copies * size_bytes / self.rate


def cuts_of(cluster: Cluster) -> tuple[Cut, ...]:
    """The cuts of ``cluster`` that may bind; none for a single worker.

    Permanent traffic on a link leaves the remaining rate, once it has queued up. Such links get a second cut of the same
    name with a smaller rate and a larger credit; both hold. Ignores slower paths between hosts (others may lead around
    them) and traffic that begins or ends meanwhile.
    """
    return tuple(dict.fromkeys((*_cuts(cluster, shared=False), *_cuts(cluster, shared=True))))


def least_byte_factor(cluster: Cluster) -> float:
    """The least byte factor on ``cluster``; measured algorithms may be below 1."""
    return min((1.0, *(cost.byte_factor for cost in cluster.algorithms.values())))


def _cuts(cluster: Cluster, *, shared: bool) -> Iterator[Cut]:
    hosts, workers = cluster.hosts, cluster.world_size
    other_hosts = len(hosts) - 1
    ways = {
        way: [_Link.of(cluster, host, way, shared=shared) for host in hosts] if other_hosts else []
        for way in ("from", "to")
    }
    between_ns, inside_ns = cluster.least_latency_us * 1e3, cluster.local_latency_us * 1e3
    if other_hosts:
        for way, links in ways.items():
            yield from _between(hosts, way, links, between_ns)
    if workers == len(hosts):
        return
    memory = cluster.local_gbps * BYTES_A_NS_AND_GBPS
    least_ns = min(between_ns, inside_ns) if other_hosts else inside_ns
    sending = _Link.together(ways["from"])
    yield Cut(
        "the memory and links of all workers", 2 * (workers - 1), sending.rate + workers * memory,
        sending.credit_bytes, least_ns, in_halves=True,
    )  # fmt: skip
    if other_hosts:
        yield _slowest(
            _inside(host, memory, _Link.together([up, down]), least_ns)
            for host, up, down in zip(hosts, ways["from"], ways["to"], strict=True)
        )


def _between(hosts: Sequence[Host], way: str, links: Sequence[_Link], latency_ns: float) -> Iterator[Cut]:
    """The cuts of one direction of the hosts' links: the slowest host's, and all together."""
    yield _slowest(
        Cut(f"the link {way} host {host.name}", 1, link.rate, link.credit_bytes, latency_ns)
        for host, link in zip(hosts, links, strict=True)
    )
    total, copies = _Link.together(links), 2 * (len(hosts) - 1)
    yield Cut(
        f"the links {way} all hosts", copies, total.rate, total.credit_bytes, latency_ns, in_halves=True
    )


def _inside(host: Host, memory: float, links: _Link, latency_ns: float) -> Cut:
    """The cut of a host's workers and its outside: each copy uses a sender's memory or a link."""
    rate = host.workers * memory + links.rate
    return Cut(
        f"the memory and link of host {host.name}", 2 * host.workers, rate, links.credit_bytes, latency_ns
    )


def _slowest(cuts: Iterable[Cut]) -> Cut:
    return max(cuts, key=lambda cut: cut.time_ns(1))


@dataclass(frozen=True, slots=True)
class _Link:
    """One direction of a link: its rate (bytes per ns), and its burst after a pause."""

    rate: float
    credit_bytes: float

    @classmethod
    def of(cls, cluster: Cluster, host: Host, way: str, *, shared: bool) -> _Link:
        """The link of a host; if ``shared``, without the rate that permanent traffic uses."""
        gbps = host.up_gbps if way == "from" else host.down_gbps
        lasting = [flow for flow in cluster.traffic if flow.start_ms == 0 and flow.end_ms is None]
        here = [flow for flow in lasting if (flow.source if way == "from" else flow.target) == host.name]
        left = 1.0
        if shared and here:
            taken = sum(flow.gbps for flow in here) / gbps
            left = min(1.0, max(1 - taken, 1 / (1 + sum(flow.connections for flow in here))))
        ahead_bytes = cluster.window_bytes * (1 / left - 1)
        return cls(gbps * left * BYTES_A_NS_AND_GBPS, cluster.burst_bytes + ahead_bytes)

    @classmethod
    def together(cls, links: Iterable[_Link]) -> _Link:
        """All of them as one."""
        all_links = list(links)
        return cls(sum(link.rate for link in all_links), sum(link.credit_bytes for link in all_links))
