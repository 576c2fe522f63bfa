"""What the link of each host carries where they are unequal, measured in place between the ranks that train."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.cluster import Cluster
from headway.collectives.hosts import Hosts
from headway.network.link_rates import link_rates
from headway.strategies.adaptive.tuning.agreement import Agreement
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.communication import Job

REPEATS = 2
MESSAGE_S = 0.1  # of a message over the slowest link
MOST_BYTES = 16 * 2**20
LEAST_UNEQUAL = 1.25  # times the slowest rate: what is closer may be noise of busy cores


def with_link_rates(cluster: Cluster, transport: BucketTransport, agreement: Agreement) -> Cluster:
    """``cluster``, whose links are as the slowest of them, with what each link carries besides.

    Every rank sends to the next one at once, and to others where links prove to be unequal. Every rank calls it at the
    same point, with nothing in flight. It stays as it is where links are about equal, and where hosts have several
    workers, which share one.
    """
    if transport.world_size < 3 or not apart(transport.hosts):
        return cluster
    slowest_gbps = cluster.hosts[0].up_gbps
    size_bytes = min(MOST_BYTES, int(slowest_gbps * 1e9 / 8 * MESSAGE_S) + cluster.burst_bytes)

    def rates(stride: int) -> list[float]:
        """By sender."""
        took_s = _received_s(transport, agreement, size_bytes, stride)
        return [1 / took_s[(place + stride) % len(took_s)] for place in range(len(took_s))]

    up, down = link_rates(rates)
    slowest = min(*up, *down)
    if max(*up, *down) < slowest * LEAST_UNEQUAL:
        return cluster
    scale = slowest_gbps / slowest
    hosts = [
        host.model_copy(update={"up_gbps": sends * scale, "down_gbps": receives * scale})
        for host, sends, receives in zip(cluster.hosts, up, down, strict=True)
    ]
    return cluster.model_copy(update={"hosts": tuple(hosts)})


def apart(hosts: Hosts) -> bool:
    """Whether every rank has a host, and with it a link, of its own."""
    return len(hosts.ranks) == hosts.world_size


def _received_s(
    transport: BucketTransport, agreement: Agreement, size_bytes: int, stride: int
) -> Sequence[float]:
    """By rank, the seconds after which a message of the rank ``stride`` before it has come."""
    outgoing, incoming = torch.zeros(2, size_bytes, dtype=torch.uint8, device="cpu")
    took_s: list[float] = []

    def run(channel: int) -> None:
        took_s.append(transport.exchange(outgoing, incoming, stride, channel))

    for _ in range(REPEATS):
        transport.meet()
        transport.wait(transport.submit(Job("all_reduce", -1, size_bytes, run)))
    return [min(each) for each in agreement.from_each(took_s)]
