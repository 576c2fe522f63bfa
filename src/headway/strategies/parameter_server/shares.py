"""How much each worker should serve where links are unequal: so that the slowest carries as little as possible."""

from __future__ import annotations

from headway.cluster import Cluster
from headway.strategies.candidates import Candidate, Question
from headway.strategies.parameter_server.policy import LEAST_PIECE_MB, ParameterServerStrategy

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


MOST_KEY_MB = 16.0  # and half of the model at the most
SMALLER = 4  # as many times smaller are the other keys that are tried
MOST_PIECES = 16


def worth_trying(question: Question) -> list[Candidate]:
    """Servers that serve as much as their links carry, other than those in force; keys of the largest size first.

    Nothing is predicted of them. Links that are equal now are a reason to try equal shares where those in force are
    not.
    """
    if not question.may_serve or question.learned is None:
        return []
    shares = shares_on(question.learned.cluster)
    begun = question.on_stock_ddp if isinstance(question.on_stock_ddp, ParameterServerStrategy) else None
    model_mb = question.model.size_bytes / 2**20
    largest_mb = min(MOST_KEY_MB, model_mb / 2)
    caps_mb = [largest_mb, largest_mb / SMALLER] if shares else []
    caps_mb = list(dict.fromkeys(caps_mb if begun is None else [begun.bucket_cap_mb, *caps_mb]))
    tried = [
        ParameterServerStrategy(
            bucket_cap_mb=cap_mb,
            channels=min(2, question.channels) if begun is None else begun.channels,
            shares=shares,
            pieces=_pieces(min(cap_mb, model_mb)) if shares else 1,
        )
        for cap_mb in caps_mb
    ]
    return [Candidate(name="servers", strategy=strategy) for strategy in tried if strategy != begun]


def _pieces(key_mb: float) -> int:
    return max(1, min(MOST_PIECES, int(key_mb / LEAST_PIECE_MB)))
