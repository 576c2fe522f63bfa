"""Proposes starting groups for the planner: by published policies, fixed caps and graded caps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from headway.planning import draft
from headway.planning.surrogate import Predictor
from headway.scheduling import fusion
from headway.scheduling.fusion import Groups, cut, fill

CAPS_BYTES = tuple(2**exponent for exponent in range(16, 27))
MOST_GROUPS = 1024
_GRADES = ((8, 0.5), (16, 0.25), (32, 1.0))  # smallest group as a fraction of the cap, growth per byte


def starting_groups(drafter: draft.ScheduleDrafter) -> Iterator[draft.Groups]:
    """The starting groups to predict, without duplicates.

    Graded groups start small, so that reduction begins early, grow to the cap, and end small, because the reduction of
    the last group is exposed and holds what forward needs first.
    """
    seen: set[tuple[tuple[str, int, int, int], ...]] = set()
    for parts in _grouped(drafter.predictor):
        groups = drafter.groups(parts)
        signature = tuple(
            (g.parts[0].parameter, g.parts[0].start, len(g.parts), g.facts.size_bytes) for g in groups
        )
        if signature not in seen and len(groups) <= MOST_GROUPS:
            seen.add(signature)
            yield groups


def _grouped(predictor: Predictor) -> Iterator[Groups]:
    model, cost = predictor.model, predictor.cost.reduce_scatter.large
    ready = sorted(model.ready_parameters(), key=lambda parameter: predictor.ready_ns[parameter.name])
    yield fusion.mg_wfbp(model, predictor.profile.ready_ns, cost.alpha_ns, cost.ns_per_byte)
    for cap in _caps(predictor):
        yield fusion.fixed(model, cap)
        yield fill(cut(ready, cap), model, cap)
        parts = cut(ready, cap / 4)
        for share, growth in _GRADES:
            yield fill(parts, model, graded(predictor.total_bytes, cap, cap / share, growth))


def graded(total_bytes: float, cap_bytes: float, least_bytes: float, growth: float) -> Callable[[int], float]:
    """Caps that start at ``least_bytes``, grow by ``growth`` per byte to ``cap_bytes``, and shrink alike at the end."""

    def cap_at(begun: int) -> float:
        return min(cap_bytes, least_bytes + growth * begun, least_bytes + growth * (total_bytes - begun))

    return cap_at


def _caps(predictor: Predictor) -> list[int]:
    """Caps in bytes: powers of two, and a finer grid between the bytes of one latency and the full model."""
    total, cost = predictor.total_bytes, predictor.cost.reduce_scatter.large
    alpha_bytes = cost.alpha_ns / cost.ns_per_byte if cost.ns_per_byte else total
    least = min(total, max(total / 256, alpha_bytes / 4, 1.0))
    count = max(2, math.ceil(2 * math.log2(total / least)) + 1)
    grid = [math.ceil(least * (total / least) ** (index / (count - 1))) for index in range(count)]
    return sorted({*grid, *(cap for cap in CAPS_BYTES if total / MOST_GROUPS < cap < total)})
