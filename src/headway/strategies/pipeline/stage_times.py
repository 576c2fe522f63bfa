"""Splits layers into balanced stages (``split``), and reads the times of passes off timelines (``StageTimes``).

A step takes about as long as one micro-batch through all stages and messages and back, plus the slowest stage or
message for each further one. Splits are compared by that sum, which a replay then refines.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from headway.errors import PlanError
from headway.graph.computation import Computation, ComputeBlock, Item, Part, Point, Timeline, blocks_of
from headway.scheduling.pipeline.schedule import Action, Pass


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """The costs of one layer for one micro-batch.

    ``kept_bytes`` are its activations. ``cut_bytes`` is the size of the message in each direction if the model is split
    after this layer; None if it cannot be split there.
    """

    name: str
    forward_ns: float
    backward_ns: float
    parameter_bytes: int = 0
    kept_bytes: int = 0
    cut_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SplitMemory:
    """A memory limit for stages: ``parameter_factor`` times the parameters plus activations within ``limit_bytes``.

    Stage ``s`` holds the activations of ``min(micro_batches, group_size * (stages - s))`` micro-batches.
    """

    limit_bytes: int
    micro_batches: int
    parameter_factor: float = 3.0
    group_size: int = 1

    def permits(self, stage: int, stages: int, parameter_bytes: int, kept_bytes: int) -> bool:
        """Whether a stage of such layers fits."""
        held = min(self.micro_batches, self.group_size * (stages - stage))
        return self.parameter_factor * parameter_bytes + held * kept_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class Split:
    """A split of layers: stage ``s`` has the layers from ``ends[s - 1]`` (0 for the first) up to ``ends[s]``.

    ``once_ns`` is the time of one micro-batch forward and back, ``bottleneck_ns`` what each further one adds.
    """

    ends: tuple[int, ...]
    once_ns: float
    bottleneck_ns: float

    def step_ns(self, micro_batches: int) -> float:
        """The estimated time of a step."""
        return self.once_ns + (micro_batches - 1) * self.bottleneck_ns

    def layers(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])


Passing = Callable[[int, int], float]
"""(stage, bytes) -> ns: the time of a message from a stage to the next, or back."""


def split(
    layers: Sequence[SplitLayer],
    stages: int,
    micro_batches: int,
    passing_ns: Passing,
    *,
    speeds: Sequence[float] = (),
    memory: SplitMemory | None = None,
    keep: int = 1,
) -> tuple[Split, ...]:
    """Find the best splits of ``layers`` into ``stages``: up to ``keep`` Pareto-optimal ones, best first.

    ``speeds[s]`` is the speed of the device of stage ``s`` relative to that on which layers were timed. Messages overlap
    with computation, one at a time in each direction. Empty if there are too few places to split or stages do not fit
    ``memory``. Raises ValueError for fewer than one stage or micro-batch.

    The search is exact: a partial split that is worse in both times than another up to the same layer stays worse.
    """
    if stages < 1 or micro_batches < 1:
        raise ValueError("a pipeline has at least one stage and one micro-batch")
    speeds = speeds or (1.0,) * stages
    times = _sums(layer.forward_ns + layer.backward_ns for layer in layers)
    parameters = _sums(layer.parameter_bytes for layer in layers)
    kept = _sums(layer.kept_bytes for layer in layers)
    cuts = [0, *(i for i, layer in enumerate(layers[:-1], 1) if layer.cut_bytes is not None), len(layers)]
    frontiers: dict[int, _Frontier] = {0: _Frontier([Split((), 0.0, 0.0)])}
    for stage in range(stages):
        reached: dict[int, _Frontier] = {}
        last = stage == stages - 1
        for end in cuts[-1:] if last else cuts[1:-1]:
            cut_bytes = 0 if last else layers[end - 1].cut_bytes or 0
            message_ns = 0.0 if last else passing_ns(stage, cut_bytes)
            for begin, frontier in frontiers.items():
                if begin >= end:
                    continue
                if memory and not memory.permits(
                    stage, stages, int(parameters[end] - parameters[begin]), int(kept[end] - kept[begin])
                ):
                    continue
                busy_ns = (times[end] - times[begin]) / speeds[stage]
                for candidate in frontier.splits:
                    more = Split(
                        (*candidate.ends, end),
                        candidate.once_ns + busy_ns + 2 * message_ns,
                        max(candidate.bottleneck_ns, busy_ns, message_ns),
                    )
                    reached.setdefault(end, _Frontier([])).add(more)
        frontiers = reached
    ends = frontiers.get(len(layers))
    best = sorted(ends.splits if ends else (), key=lambda candidate: candidate.step_ns(micro_batches))
    return tuple(best[:keep])


class _Frontier:
    """Pareto-optimal splits, sorted by bottleneck."""

    def __init__(self, splits: list[Split]) -> None:
        self.splits = splits

    def add(self, new: Split) -> None:
        """Add a split unless it is dominated, and drop those that it dominates."""
        at = bisect_left(self.splits, _key(new), key=_key)
        if at and self.splits[at - 1].once_ns <= new.once_ns:
            return
        while at < len(self.splits) and self.splits[at].once_ns >= new.once_ns:
            del self.splits[at]
        insort(self.splits, new, key=_key)


def _key(split: Split) -> tuple[float, float]:
    return split.bottleneck_ns, split.once_ns


def _sums(values: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(values)]


INPUT_SHARE = 0.5
"""The fraction of a backward's time that input gradients take, if weight gradients are deferred."""
PASSES = {Part.FORWARD: Pass.FORWARD, Part.BACKWARD: Pass.BACKWARD}


@dataclass(frozen=True)
class StageTimes:
    """The times of one rank's step: ``passes_ns`` of its actions, and the blocks before the first and after the last.

    Time between two passes counts to the earlier one. ``passes_ns`` has whole backwards only. ``first[s]`` is a forward
    of stage ``s`` with the points at which it uses modules, ``last[s]`` the backward with the points at which gradients
    become ready. ``finalize_ns[s]`` is the part of its passes in which buckets were copied back.
    """

    before: tuple[ComputeBlock, ...]
    passes_ns: dict[Action, int]
    after: tuple[ComputeBlock, ...]
    first: dict[int, ComputeBlock] = field(default_factory=dict)
    last: dict[int, ComputeBlock] = field(default_factory=dict)
    finalize_ns: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline) -> StageTimes:
        """Read the times off ``timeline``, whatever its order of passes."""
        blocks = blocks_of(timeline)
        places = [index for index, block in enumerate(blocks) if _action(block) is not None]
        if not places:
            return cls(blocks, {}, ())
        first, last = places[0], places[-1] + 1
        passes_ns: dict[Action, int] = {}
        finalize_ns: dict[int, int] = {}
        current = _action(blocks[first])
        assert current is not None
        passes = blocks[first:last]
        first_of = {block.stage: block for block in reversed(passes) if _has(block, Part.FORWARD, Point.USE)}
        last_of = {block.stage: block for block in passes if _has(block, Part.BACKWARD, Point.READY)}
        for block in passes:
            current = _action(block) or current
            passes_ns[current] = passes_ns.get(current, 0) + block.duration_ns
            if block.kind == Part.FINALIZE:
                finalize_ns[current.stage] = finalize_ns.get(current.stage, 0) + block.duration_ns
        return cls(blocks[:first], passes_ns, blocks[last:], first_of, last_of, finalize_ns)

    def duration_ns(self, action: Action, input_share: float) -> int:
        """The time of ``action``; input gradients take ``input_share`` of a split backward.

        Raises KeyError for a pass that is not in the timeline.
        """
        kind, stage, micro_batch = action
        if kind in (Pass.FORWARD, Pass.BACKWARD):
            return self.passes_ns[action]
        whole_ns = self.passes_ns[Action(Pass.BACKWARD, stage, micro_batch)]
        inputs_ns = round(whole_ns * input_share)
        return inputs_ns if kind is Pass.INPUT_GRADIENT else whole_ns - inputs_ns

    def using(self, action: Action) -> tuple[Item, ...]:
        """The items of ``action``, the first forward of its stage, with the points at which it uses modules."""
        return self._with_points(self.first.get(action.stage), Part.FORWARD, action)

    def readying(self, action: Action) -> tuple[Item, ...]:
        """The items of ``action``, the last backward of its stage, with the points at which gradients become ready."""
        return self._with_points(self.last.get(action.stage), Part.BACKWARD, action)

    def _with_points(self, block: ComputeBlock | None, part: str, action: Action) -> tuple[Item, ...]:
        """The items of ``block``, scaled to ``action`` if they belong to another micro-batch."""
        if block is None:
            return (Item(part, duration_ns=self.passes_ns[action]),)
        if block.micro_batch != action.micro_batch:
            block = block.scaled(self.passes_ns[action] / max(1, block.duration_ns))
        return block.items


def _has(block: ComputeBlock, part: str, point: str) -> bool:
    return block.kind == part and any(item.kind == point for item in block.items)


def _action(block: ComputeBlock) -> Action | None:
    kind = PASSES.get(block.kind)
    return None if kind is None or block.micro_batch < 0 else Action(kind, block.stage, block.micro_batch)


def recorded_actions(computation: Computation) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank of a pipeline in its first recorded step; of several pipelines those of the first."""
    timelines = computation.timelines
    actions_of_stages: dict[frozenset[int], tuple[Action, ...]] = {}
    for rank in sorted(timelines):
        actions = tuple(StageTimes.of(timelines[rank][0]).passes_ns)
        actions_of_stages.setdefault(frozenset(action.stage for action in actions), actions)
    return tuple(actions_of_stages.values())


def check_as_many(planned: int, computation: Computation) -> None:
    """Raise PlanError if ``planned`` differs from the recorded number of micro-batches."""
    recorded = micro_batches(computation)
    if recorded != planned:
        raise PlanError(
            "the plan's number of micro-batches differs from the recording's", got=f"{planned}",
            expected=f"{recorded}", fix="Replay a recording with that number, or pass both recordings to optimize.",
        )  # fmt: skip


def micro_batches(computation: Computation) -> int:
    """The number of micro-batches in the first recorded step; 0 if it is not a pipeline."""
    actions = (action for recorded_action in recorded_actions(computation) for action in recorded_action)
    return 1 + max((action.micro_batch for action in actions), default=-1)
