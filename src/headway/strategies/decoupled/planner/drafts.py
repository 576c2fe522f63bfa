"""Drafts of schedules: where a search starts from, and how one is improved."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.model import ModelSpec
from headway.network.link_cost import LinkCost
from headway.scheduling import fusion
from headway.scheduling.buckets import BucketSchedule, GatherMode, Part, make_buckets
from headway.scheduling.fusion import Groups, coalesced, cut, fill, size_bytes
from headway.strategies.decoupled.planner.surrogate import BucketFacts, Played, Predictor
from headway.time_limit import time_is_up


def gathers_after(
    facts: Sequence[BucketFacts], gather_order: Sequence[int], cost: LinkCost, early_gather_threshold: float
) -> tuple[int, ...]:
    """For each gather of ``gather_order``, the reduce-scatter that it stands right behind.

    Played on one link: in the time between a reduce-scatter's end and the next full bucket, buckets that have been
    reduced are gathered, those that forward needs first. A gather starts early if at least the fraction
    ``early_gather_threshold`` of it (0 to 1) fits into the idle gap; 0 keeps the link busy whenever it can be.
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


class Group(NamedTuple):
    """Parts that share a bucket."""

    parts: tuple[Part, ...]
    facts: BucketFacts


DraftGroups = tuple[Group, ...]
CAUTION, CORE_CAUTION = 2e-5, 0.1
"""What each group counts for on top of its prediction, as shares of the step and of its collectives' overheads.

No model knows all that a job costs: overheads that hide under messages keep cores busy all the same.
"""


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Everything of a schedule but its groups; for ``early_gather_threshold`` see ``early_gathers``."""

    gather: GatherMode
    channels: int = 1
    early_gather_threshold: float | None = None


class ScheduleDrafter:
    """Predicts drafts and makes schedules of them. ``evaluated`` counts predictions."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.evaluated = 0
        halves = (predictor.cost.reduce_scatter.large, predictor.cost.all_gather.large)
        self._group_ns = CORE_CAUTION * sum(half.overhead_ns for half in halves)

    def group(self, parts: Iterable[Part]) -> Group:
        """A group of these parts."""
        own = tuple(coalesced(parts))
        return Group(own, self.predictor.facts(own))

    def groups(self, parts: Iterable[Sequence[Part]]) -> DraftGroups:
        """Groups of these parts."""
        return tuple(self.group(each) for each in parts)

    def step_ns(self, groups: Sequence[Group], options: ScheduleOptions) -> float:
        """The predicted step."""
        self.evaluated += 1
        return self._played(groups, options).step_ns

    def critical(self, groups: Sequence[Group], options: ScheduleOptions) -> list[int]:
        """Groups on the critical path, from its end to its beginning."""
        return self._played(groups, options).critical

    def _played(self, groups: Sequence[Group], options: ScheduleOptions) -> Played:
        facts = [group.facts for group in groups]
        order = _gather_order(facts)
        behind: list[list[int]] = [[] for _ in groups]
        if options.gather == "gradients":
            for bucket, after in zip(order, self._after(facts, order, options), strict=True):
                behind[after].append(bucket)
        return self.predictor.played(facts, order, behind, options.gather, options.channels)

    def cost_ns(self, groups: Sequence[Group], options: ScheduleOptions) -> float:
        """The predicted step, and a little for every group."""
        return self.step_ns(groups, options) * (1 + CAUTION * len(groups)) + self._group_ns * len(groups)

    def schedule(self, groups: Sequence[Group], options: ScheduleOptions) -> BucketSchedule:
        """The draft as a schedule."""
        facts = [group.facts for group in groups]
        order = _gather_order(facts)
        early = options.gather == "gradients" and options.early_gather_threshold is not None
        return BucketSchedule(
            buckets=make_buckets([group.parts for group in groups], self.predictor.model),
            gather_order=order,
            gather=options.gather,
            channels=options.channels,
            gathers_after=self._after(facts, order, options) if early else (),
            algorithms=self.predictor.algorithms,
        )

    def _after(
        self, facts: Sequence[BucketFacts], order: tuple[int, ...], options: ScheduleOptions
    ) -> tuple[int, ...]:
        if options.early_gather_threshold is None:
            return (len(facts) - 1,) * len(facts)
        return gathers_after(facts, order, self.predictor.cost, options.early_gather_threshold)


def _gather_order(facts: Sequence[BucketFacts]) -> tuple[int, ...]:
    return tuple(sorted(range(len(facts)), key=lambda index: (facts[index].need, index)))


CAPS_BYTES = tuple(2**exponent for exponent in range(16, 27))
MOST_GROUPS = 1024
_GRADES = ((8, 0.5), (16, 0.25), (32, 1.0))  # smallest group as a part of the cap, growth with every byte


def starting_groups(drafter: ScheduleDrafter) -> Iterator[DraftGroups]:
    """Groups worth a prediction, each once.

    Graded groups begin small, so that reduction begins early, grow to the cap, and end small: the last group's
    reduction is exposed, and holds what forward needs first.
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
    """Caps that begin at ``least_bytes``, grow by ``growth`` with every byte to ``cap_bytes``, and end alike."""

    def cap_at(begun: int) -> float:
        return min(cap_bytes, least_bytes + growth * begun, least_bytes + growth * (total_bytes - begun))

    return cap_at


def _caps(predictor: Predictor) -> list[int]:
    """Fixed powers of two and a finer grid between an alpha's worth of bytes and the whole model."""
    total, cost = predictor.total_bytes, predictor.cost.reduce_scatter.large
    alpha_bytes = cost.alpha_ns / cost.ns_per_byte if cost.ns_per_byte else total
    least = min(total, max(total / 256, alpha_bytes / 4, 1.0))
    count = max(2, math.ceil(2 * math.log2(total / least)) + 1)
    grid = [math.ceil(least * (total / least) ** (index / (count - 1))) for index in range(count)]
    return sorted({*grid, *(cap for cap in CAPS_BYTES if total / MOST_GROUPS < cap < total)})


_LEAST_GAIN = 1e-5
_SHARES = (0.5, 0.25, 0.75)
Change = tuple[Group, ...]  # what one or two neighbours become


def refine(
    drafter: ScheduleDrafter, groups: DraftGroups, options: ScheduleOptions, effort: int
) -> tuple[float, DraftGroups]:
    """Merge, split and shift neighbouring groups while the step's cost gets less; returns it and the groups.

    Groups on the critical path are changed first, its ends before its middle: where computation leads into it and where
    training waits for it. At most ``effort`` predictions, and none when time is up (``time_limit``).
    """
    best_ns = drafter.cost_ns(groups, options)
    tried = 0
    improved = True
    while improved and tried < effort and not time_is_up():
        improved = False
        for index in _most_promising(drafter, groups, options):
            for changed in _changes(drafter, groups, index):
                cost_ns = drafter.cost_ns(changed, options)
                tried += 1
                if cost_ns < best_ns * (1 - _LEAST_GAIN):
                    best_ns, groups, improved = cost_ns, changed, True
                    break
                if tried >= effort or time_is_up():
                    return best_ns, groups
    return best_ns, groups


def _most_promising(drafter: ScheduleDrafter, groups: DraftGroups, options: ScheduleOptions) -> Iterable[int]:
    """All groups, those on the critical path first."""
    critical = _from_both_ends(drafter.critical(groups, options))
    return dict.fromkeys([*critical, *_from_both_ends(range(len(groups) - 1, -1, -1))])


def _from_both_ends(items: Sequence[int]) -> Iterator[int]:
    """The first, the last, the second, the last but one, and so on."""
    for index in range((len(items) + 1) // 2):
        yield items[index]
        if index != len(items) - 1 - index:
            yield items[-1 - index]


def _changes(drafter: ScheduleDrafter, groups: DraftGroups, index: int) -> Iterator[DraftGroups]:
    """The neighbours of ``groups`` that differ at group ``index`` and the one behind it."""
    if index >= len(groups):
        return
    model = drafter.predictor.model
    own = groups[index].parts

    def replaced(count: int, *parts: Sequence[Part]) -> DraftGroups:
        return groups[:index] + drafter.groups(parts) + groups[index + count :]

    for share in _SHARES:
        if (halves := split(own, model, share)) is not None:
            yield replaced(1, *halves)
    if index + 1 < len(groups):
        other = groups[index + 1].parts
        if _dtype(own, model) != _dtype(other, model):
            return
        yield replaced(2, own + other)
        for share in _SHARES:
            if (halves := split(own, model, share)) is not None:
                yield replaced(2, halves[0], halves[1] + other)
            if (halves := split(other, model, share)) is not None:
                yield replaced(2, own + halves[0], halves[1])


def _dtype(parts: Sequence[Part], model: ModelSpec) -> str:
    return model.by_name[parts[0].parameter].dtype


def split(
    parts: tuple[Part, ...], model: ModelSpec, share: float
) -> tuple[tuple[Part, ...], tuple[Part, ...]] | None:
    """Cut a group in two, the first with about ``share`` of its bytes. None if there is nothing to cut.

    A part is cut itself where it is more than an eighth of the group.
    """
    total = sum(size_bytes(part, model) for part in parts)
    wanted, begun = share * total, 0
    for index, part in enumerate(parts):
        size = size_bytes(part, model)
        if begun + size < wanted:
            begun += size
            continue
        if size > total / 8 and part.numel > 1:
            middle = part.start + max(1, min(part.numel - 1, round((wanted - begun) / size * part.numel)))
            first = (*parts[:index], Part(part.parameter, part.start, middle))
            return first, (Part(part.parameter, middle, part.end), *parts[index + 1 :])
        border = index + 1 if index + 1 < len(parts) else index
        return (parts[:border], parts[border:]) if border else None
    return None
