"""Chooses how much each worker serves as a parameter server if links are unequal."""

from __future__ import annotations

from headway.cluster import Cluster
from headway.strategies.candidates import Candidate, Question
from headway.strategies.parameter_server.policy import LEAST_PIECE_MB, ParameterServerStrategy

LEAST_DIFFERENCE = 0.1
"""The least relative difference of link rates for unequal shares."""
PARTS, PARTS_A_WORKER, MOST_PARTS_OF_ONE = 96, 8, 1000
LEAST_RATE = 0.05
"""The least share of a link's rate that other traffic leaves."""
HALVINGS = 60


def shares_on(cluster: Cluster) -> tuple[int, ...]:
    """The shares of the workers of ``cluster``; empty if equal shares are about optimal.

    With ``n`` workers, one that serves the share ``s`` sends and receives ``1 + (n - 2) s`` times the gradients
    (``collectives.servers``). In time ``t``, a link of rate ``r`` thus has room for ``s = (t r - 1) / (n - 2)``. The
    optimum is the least ``t`` in which all shares fit; workers whose link is too slow for their own gradients serve the
    least share. With two workers, or several on a host, all serve alike.
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
    """The rate of each host's link in both directions, in Gbit/s, besides permanent traffic."""
    up = {host.name: host.up_gbps for host in cluster.hosts}
    down = {host.name: host.down_gbps for host in cluster.hosts}
    lasting = (flow for flow in cluster.traffic if not flow.start_ms and flow.end_ms is None)
    for traffic in lasting:
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
