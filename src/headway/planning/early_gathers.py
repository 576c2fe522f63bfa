"""Schedules early gathers: gathers during backward, while the link would be idle."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from headway.planning.link_cost import LinkCost
from headway.planning.surrogate import BucketFacts


def gathers_after(
    facts: Sequence[BucketFacts], gather_order: Sequence[int], cost: LinkCost, early_gather_threshold: float
) -> tuple[int, ...]:
    """For each gather of ``gather_order``, the reduce-scatter that it follows.

    Simulates one link: between the end of a reduce-scatter and the next full bucket, reduced buckets are gathered in
    the order of forward. A gather starts early if at least the fraction ``early_gather_threshold`` of it (0 to 1) fits
    into the idle gap; 0 keeps the link busy whenever possible.
    """
    last = len(facts) - 1
    behind = [last] * len(facts)
    place = {bucket: index for index, bucket in enumerate(gather_order)}
    finished: list[int] = []  # places in gather_order of reduced buckets
    now_ns = launched_ns = 0.0
    for index, bucket in enumerate(facts[:-1]):
        launched_ns = max(launched_ns, bucket.ready_ns)
        now_ns = max(now_ns, launched_ns) + cost.reduce_scatter.time_ns(bucket.size_bytes)
        heapq.heappush(finished, place[index])
        next_ns = max(launched_ns, facts[index + 1].ready_ns)
        while finished:
            gather_ns = cost.all_gather.time_ns(facts[gather_order[finished[0]]].size_bytes)
            if now_ns >= next_ns or now_ns + early_gather_threshold * gather_ns > next_ns:
                break
            behind[gather_order[heapq.heappop(finished)]] = index
            now_ns += gather_ns
    return tuple(behind[bucket] for bucket in gather_order)
