"""Which ranks to look at: selections for the timeline, and the order in which tables name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from headway.diagnosis.breakdown import Breakdown
from headway.report import words
from headway.units import counted

ALL_SHOWN = 12  # a table of so many ranks shows them all
SHOWN_FIRST = 8  # of more, so many before the others
NEIGHBOURS = 2
MAX_BLAMED_VIEWS = 3
MAX_HOST_VIEWS = 128


@dataclass(frozen=True, slots=True)
class RankView:
    """A selection of ranks that the timeline can be narrowed to."""

    label: str
    ranks: tuple[int, ...]


def rank_views(
    drawn: tuple[int, ...],
    hosts: Mapping[int, str],
    blamed: tuple[int, ...],
    on_path: tuple[int, ...],
    *,
    of_ranks: int,
) -> tuple[RankView, ...]:
    """All that are drawn; the blamed ones and their neighbours; those on the critical path; those of each host.

    ``of_ranks`` is how many ranks there are, drawn or not. What would show all of them again, or is there already,
    is left out.
    """
    every = "All" if len(drawn) == of_ranks else "All drawn:"
    whole = RankView(f"{every} {counted(len(drawn), 'rank')}", drawn)
    views = [whole]

    def offer(label: str, ranks: tuple[int, ...]) -> None:
        if ranks and all(ranks != view.ranks for view in views):
            views.append(RankView(label, ranks))

    for rank in [rank for rank in blamed if rank in drawn][:MAX_BLAMED_VIEWS]:
        at = drawn.index(rank)
        offer(f"Rank {rank} and its neighbours", drawn[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1])
    offer("On the critical path", tuple(rank for rank in drawn if rank in on_path))
    of_host: dict[str, list[int]] = {}
    for rank in drawn:
        of_host.setdefault(hosts.get(rank, ""), []).append(rank)
    for host, ranks in list(of_host.items())[:MAX_HOST_VIEWS]:
        if len(ranks) > 1:
            label = f"Host {words.plain(host, 60) or 'without a name'}"
            offer(f"{label}: rank {words.runs(ranks)}" if words.runs(ranks) else label, tuple(ranks))
    return tuple(views)


def split_by_interest(
    breakdown: Mapping[int, Breakdown], blamed: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """The ranks to show first and the others.

    Few ranks are all shown, in order. Of many, those that are blamed and then those that differ most from the
    median rank come first; the others follow in order.
    """
    ranks = sorted(breakdown)
    if len(ranks) <= ALL_SHOWN:
        return ranks, []
    parts = np.array([list(asdict(breakdown[rank]).values()) for rank in ranks])
    distance = np.abs(parts - np.median(parts, axis=0)).sum(axis=1)
    by_distance = [ranks[index] for index in np.argsort(-distance, kind="stable").tolist()]
    first = [*(rank for rank in blamed if rank in breakdown), *by_distance]
    first = list(dict.fromkeys(first))[:SHOWN_FIRST]
    return first, [rank for rank in ranks if rank not in first]
