"""Cuts: what has to pass which links of a cluster, whatever algorithm exchanges gradients.

Every element of a gradient ends up, summed over all workers, on each of them. Nobody adds anything up on the way, so:

- a host sends each element at least once, or the others would lack its part; and receives it at least once, or it would
  lack theirs;
- between ``H`` hosts an element is sent at least ``2 (H - 1)`` times: ``H - 1`` times until one of them has the sum of
  all, and once more to each of the others (Patarasuk and Yuan, 2009). In rings every host sends an equal part of that;
- the same holds for workers instead of hosts, over links and memory together;
- and for the workers of one host and everything outside of it, taken for one more worker.

Where hosts have several workers that counts an algorithm that adds up within hosts first. A link is a token bucket:
within any time ``t`` it lets ``credit + rate * t`` pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headway.cluster import Cluster, Host

BYTES_A_NS_AND_GBPS = 1 / 8


@dataclass(frozen=True, slots=True)
class Cut:
    """Some links over which each byte of gradients passes at least ``copies`` times.

    Together they carry ``rate`` bytes a nanosecond, and ``credit_bytes`` more after a pause. What passes them arrives
    ``latency_ns`` later. ``in_halves`` says that half of the copies are of the finished sum.
    """

    name: str
    copies: int
    rate: float
    credit_bytes: float
    latency_ns: float
    in_halves: bool = False

    @property
    def credit_ns(self) -> float:
        """How long the links need for their burst."""
        return self.credit_bytes / self.rate

    def time_ns(self, size_bytes: float) -> float:
        """How long each of ``size_bytes`` of gradients uses the links."""
        return self.copies * size_bytes / self.rate


def cuts_of(cluster: Cluster) -> tuple[Cut, ...]:
    """The cuts of ``cluster`` that may decide; none of a single worker.

    A link that others use for the whole time carries what they leave. It lets more pass until they have queued up:
    then there is a second cut of the same name, of a smaller rate and a larger credit, and both hold. Slower paths
    between hosts are left out, as others may lead around them, and others' traffic that begins or ends meanwhile.
    """
    return tuple(dict.fromkeys((*_cuts(cluster, shared=False), *_cuts(cluster, shared=True))))


def least_byte_factor(cluster: Cluster) -> float:
    """The least that a byte costs on ``cluster``, in bytes: what was measured of an algorithm may be below 1."""
    return min((1.0, *(cost.byte_factor for cost in cluster.algorithms.values())))


def _cuts(cluster: Cluster, *, shared: bool) -> Iterator[Cut]:
    hosts, workers = cluster.hosts, cluster.world_size
    others = len(hosts) - 1
    ways = {
        way: [_Link.of(cluster, host, way, shared=shared) for host in hosts] if others else []
        for way in ("from", "to")
    }
    between_ns, inside_ns = cluster.least_latency_us * 1e3, cluster.local_latency_us * 1e3
    if others:
        for way, links in ways.items():
            yield from _between(hosts, way, links, between_ns)
    if workers == len(hosts):
        return
    memory = cluster.local_gbps * BYTES_A_NS_AND_GBPS
    least_ns = min(between_ns, inside_ns) if others else inside_ns
    sending = _Link.together(ways["from"])
    yield Cut(
        "the memory and links of all workers", 2 * (workers - 1), sending.rate + workers * memory,
        sending.credit_bytes, least_ns, in_halves=True,
    )  # fmt: skip
    if others:
        yield _slowest(
            _inside(host, memory, _Link.together([up, down]), least_ns)
            for host, up, down in zip(hosts, ways["from"], ways["to"], strict=True)
        )


def _between(hosts: Sequence[Host], way: str, links: Sequence[_Link], latency_ns: float) -> Iterator[Cut]:
    """One direction of the links of all hosts: of each by itself, and of all together."""
    yield _slowest(
        Cut(f"the link {way} host {host.name}", 1, link.rate, link.credit_bytes, latency_ns)
        for host, link in zip(hosts, links, strict=True)
    )
    total, copies = _Link.together(links), 2 * (len(hosts) - 1)
    yield Cut(
        f"the links {way} all hosts", copies, total.rate, total.credit_bytes, latency_ns, in_halves=True
    )


def _inside(host: Host, memory: float, links: _Link, latency_ns: float) -> Cut:
    """The workers of a host and what is outside of it: each copy uses the memory of a sender or one of the links."""
    rate = host.workers * memory + links.rate
    return Cut(
        f"the memory and link of host {host.name}", 2 * host.workers, rate, links.credit_bytes, latency_ns
    )


def _slowest(cuts: Iterable[Cut]) -> Cut:
    return max(cuts, key=lambda cut: cut.time_ns(1))


@dataclass(frozen=True, slots=True)
class _Link:
    """What a direction of a link carries (bytes a nanosecond), and its burst after a pause."""

    rate: float
    credit_bytes: float

    @classmethod
    def of(cls, cluster: Cluster, host: Host, way: str, *, shared: bool) -> _Link:
        """That of a host; where it is ``shared``, what those leave who use it for the whole time."""
        gbps = host.up_gbps if way == "from" else host.down_gbps
        lasting = [each for each in cluster.traffic if each.start_ms == 0 and each.end_ms is None]
        here = [each for each in lasting if (each.source if way == "from" else each.target) == host.name]
        left = 1.0
        if shared and here:
            taken = sum(each.gbps for each in here) / gbps
            left = min(1.0, max(1 - taken, 1 / (1 + sum(each.connections for each in here))))
        ahead_bytes = cluster.window_bytes * (1 / left - 1)
        return cls(gbps * left * BYTES_A_NS_AND_GBPS, cluster.burst_bytes + ahead_bytes)

    @classmethod
    def together(cls, links: Iterable[_Link]) -> _Link:
        """All of them as one."""
        each = list(links)
        return cls(sum(link.rate for link in each), sum(link.credit_bytes for link in each))
