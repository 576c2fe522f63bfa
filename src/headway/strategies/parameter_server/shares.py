"""How much each worker should serve where links are unequal: so that the slowest carries the least that it has to."""

from __future__ import annotations

from headway.cluster import Cluster

LEAST_DIFFERENCE = 0.1
"""By so much the rates of links have to differ."""
PARTS, PARTS_A_WORKER, MOST_PARTS_OF_ONE = 96, 8, 1000
LEAST_RATE = 0.05
"""What other traffic leaves of a link's rate at the least."""
HALVINGS = 60


def shares_on(cluster: Cluster) -> tuple[int, ...]:
    """The shares of the workers of ``cluster``; none where equal ones are about the best.

    With ``n`` workers, one that serves the part ``s`` sends and receives ``1 + (n - 2) s`` times the gradients
    (``collectives.servers``). So in the time ``t`` a link of rate ``r`` has room for ``s = (t r - 1) / (n - 2)``, and
    the least ``t`` is that in which all parts find room, but for workers whose link does not even bring their own
    gradients away: these serve one part. With two workers, and with several on a host, all serve alike.
    """
    count = cluster.world_size
    if count < 3 or any(host.workers > 1 for host in cluster.hosts):
        return ()
    rates = _rates(cluster)
    if max(rates) < min(rates) * (1 + LEAST_DIFFERENCE):
        return ()

    def room(time: float) -> list[float]:
        return [max(0.0, (time * rate - 1) / (count - 2)) for rate in rates]

    low, high = 0.0, count / min(rates)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(room(middle)) >= 1 else (middle, high)
    rooms = room(high)
    parts = min(max(PARTS, PARTS_A_WORKER * count), MOST_PARTS_OF_ONE / max(rooms))
    shares = tuple(max(1, round(part * parts)) for part in rooms)
    return () if len(set(shares)) == 1 else shares


def _rates(cluster: Cluster) -> list[float]:
    """What each host's link can carry both ways, in Gbit/s, besides what others send over it all the time."""
    up = {host.name: host.up_gbps for host in cluster.hosts}
    down = {host.name: host.down_gbps for host in cluster.hosts}
    for traffic in (each for each in cluster.traffic if not each.start_ms and each.end_ms is None):
        up[traffic.source] -= traffic.gbps
        down[traffic.target] -= traffic.gbps
    return [
        min(
            max(up[host.name], LEAST_RATE * host.up_gbps),
            max(down[host.name], LEAST_RATE * host.down_gbps),
        )
        for host in cluster.hosts
    ]
