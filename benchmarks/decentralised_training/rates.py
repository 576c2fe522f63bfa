"""Iterations a second, of blocks that ranks made or that were simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]


def throughput(ranks: Sequence[Found]) -> float:
    """Iterations a second of all ranks together in one round, without its warm-up, while every rank trains."""
    if ranks[0]["by_itself"]:
        since = max(block["begin_s"] + block["warm_s"] for block in ranks)
        until = min(block["begin_s"] + block["until_s"] for block in ranks)
    else:  # as many steps on each: a rank that averages one late may be some of them ahead of a slow one
        since = max(block["ends_s"][block["warm_steps"] - 1] for block in ranks)
        until = min(block["ends_s"][-1] for block in ranks)
    ends = [[at for at in block["ends_s"] if since <= at <= until] for block in ranks]
    if ranks[0]["by_itself"]:
        # A rank may stand still at the end: what it did since its last iteration counts too.
        return float(sum(map(len, ends)) / (until - since))
    return sum(_rate(own, until - since) for own in ends)


def _rate(ends_s: Sequence[float], window_s: float) -> float:
    """Iterations a second of one rank: between the first and the last that ended in the window, where there are two."""
    if len(ends_s) < 2:
        return len(ends_s) / window_s
    return (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])
