"""Cutting a model into the stages of a pipeline: which contiguous layers each stage has.

A micro-batch takes the sum of all stages and messages to go through once and come back, and behind the first the others
follow as fast as the slowest stage or message lets them. Splits are compared by that sum, which a replay then refines.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """A layer of one micro-batch: its times, its parameters, and what it leaves for backward.

    ``cut_bytes`` is what the next stage is handed if the model is cut behind this layer, and what comes back; None
    where it cannot be cut.
    """

    name: str
    forward_ns: float
    backward_ns: float
    parameter_bytes: int = 0
    kept_bytes: int = 0
    cut_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SplitMemory:
    """What a stage may hold: ``limit_bytes`` of ``parameter_factor`` times its parameters and what layers keep.

    Stage ``s`` keeps ``min(micro_batches, group_size * (stages - s))`` micro-batches.
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
    """``ends[s]`` is the number of layers of the stages up to and with ``s``; the last is that of all.

    ``once_ns`` is what one micro-batch takes there and back, ``bottleneck_ns`` what each further one adds.
    """

    ends: tuple[int, ...]
    once_ns: float
    bottleneck_ns: float

    def step_ns(self, micro_batches: int) -> float:
        """About how long a step of so many micro-batches takes."""
        return self.once_ns + (micro_batches - 1) * self.bottleneck_ns

    def layers(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])


Passing = Callable[[int, int], float]
"""How long a message of so many bytes (second) takes from a stage (first) to the next, or back."""


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
    """The best splits of ``layers`` into ``stages``, best first: at most ``keep`` that no other beats in both times.

    ``speeds[s]`` is how fast the device of stage ``s`` is (1 as that on which layers take their times). A message does
    not slow its stages' computation down, but no more than one goes each way at a time. None are found where the layers
    permit too few cuts, or stages do not fit ``memory``. Raises ValueError for fewer than one stage or micro-batch.

    The search is exact: of the first stages up to a layer, whatever is worse in both times than another split of them
    is worse in whatever follows.
    """
    if stages < 1 or micro_batches < 1:
        raise ValueError("a pipeline has at least one stage and one micro-batch")
    speeds = speeds or (1.0,) * stages
    times = _sums(layer.forward_ns + layer.backward_ns for layer in layers)
    parameters = _sums(layer.parameter_bytes for layer in layers)
    kept = _sums(layer.kept_bytes for layer in layers)
    cuts = [0, *(i for i, layer in enumerate(layers[:-1], 1) if layer.cut_bytes is not None), len(layers)]
    found: dict[int, _Frontier] = {0: _Frontier([Split((), 0.0, 0.0)])}
    for stage in range(stages):
        reached: dict[int, _Frontier] = {}
        last = stage == stages - 1
        for end in cuts[-1:] if last else cuts[1:-1]:
            cut_bytes = 0 if last else layers[end - 1].cut_bytes or 0
            message_ns = 0.0 if last else passing_ns(stage, cut_bytes)
            for begin, frontier in found.items():
                if begin >= end:
                    continue
                if memory and not memory.permits(
                    stage, stages, int(parameters[end] - parameters[begin]), int(kept[end] - kept[begin])
                ):
                    continue
                busy_ns = (times[end] - times[begin]) / speeds[stage]
                for each in frontier.splits:
                    more = Split(
                        (*each.ends, end),
                        each.once_ns + busy_ns + 2 * message_ns,
                        max(each.bottleneck_ns, busy_ns, message_ns),
                    )
                    reached.setdefault(end, _Frontier([])).add(more)
        found = reached
    ends = found.get(len(layers))
    best = sorted(ends.splits if ends else (), key=lambda each: each.step_ns(micro_batches))
    return tuple(best[:keep])


class _Frontier:
    """Splits of which none is beaten in both times: the longer the bottleneck, the less the time for one."""

    def __init__(self, splits: list[Split]) -> None:
        self.splits = splits

    def add(self, new: Split) -> None:
        """Add a split, unless it is beaten, and drop those that it beats."""
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
