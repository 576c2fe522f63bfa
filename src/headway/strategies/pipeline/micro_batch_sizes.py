"""Interpolates a job between two recordings with different numbers of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headway.graph.computation import Computation, Item, Part, Timeline
from headway.job import Job
from headway.model import HalvedBackward, ModelSpec, StageMemory
from headway.scheduling.pipeline.schedule import Action, Pass
from headway.strategies.pipeline.stage_times import StageTimes, micro_batches


def first_difference(first: Job, second: Job) -> tuple[str, str, str] | None:
    """The first difference between two recordings other than the number of micro-batches, or None.

    Returns what differs and the value of each. Batch sizes are compared by the total size of the tensors between
    stages.
    """
    for what, of in _COMPARED:
        in_first, in_second = of(first), of(second)
        if in_first != in_second:
            return what, in_first, in_second
    return None


def _describe_stages(job: Job) -> str:
    return ", ".join(
        f"{len(stage.parameters)} parameters in {stage.size_bytes} bytes ({stage.fingerprint})"
        for stage in job.stages
    )


def _describe_ranks(job: Job) -> str:
    """The stages of every rank."""
    stages_of_rank = {
        rank: sorted({action.stage for action in StageTimes.of(timeline[0]).passes_ns})
        for rank, timeline in job.steps.timelines.items()
    }
    return ", ".join(f"{stages} on rank {rank}" for rank, stages in sorted(stages_of_rank.items()))


def _describe_messages(job: Job) -> str:
    return ", ".join(f"{micro_batches(job.steps) * size_bytes} bytes" for size_bytes in job.boundary_bytes)


_COMPARED: tuple[tuple[str, Callable[[Job], str]], ...] = (
    ("the world size", lambda job: f"{job.world_size} workers"),
    ("the mesh", lambda job: f"{dict(job.mesh) or 'one pipeline'}"),
    ("the number of stages", lambda job: f"{len(job.stages)} stages"),
    ("the parameters of stages", _describe_stages),
    ("the ranks of stages", _describe_ranks),
    ("the optimizer", lambda job: ", ".join(job.optimizers.names) or "none"),
    ("the batch, by what stages hand on of all of it", _describe_messages),
)


def counts_between(recorded: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Counts between the ``recorded`` ones, each with the next smaller and next larger recorded count.

    Only counts that certainly split the batch evenly: divisors of the least common multiple of the recorded counts.
    """
    every = math.lcm(*recorded)
    ordered = sorted(recorded)
    for few, many in pairwise(ordered):
        for count in range(few + 1, many):
            if every % count == 0:
                yield count, few, many


@dataclass(frozen=True)
class Interpolated:
    """A job with an unrecorded number of micro-batches; its computation may be off by the fraction ``share``."""

    job: Job
    share: float


def interpolated(fewer: Job, more: Job, count: int) -> Interpolated:
    """Interpolate the job of ``count`` micro-batches between two recorded ones.

    Times and memory are affine in the micro-batch size, which is proportional to 1 / ``count``. The error bound follows
    from two facts that hold on any device: a larger micro-batch takes at least as long, and at most as long per sample.
    """
    ends = micro_batches(fewer.steps), micro_batches(more.steps)
    assert ends[0] < count < ends[1]
    mixed = _Interpolation(*ends, count)
    timelines: dict[int, tuple[Timeline, ...]] = {}
    share = 0.0
    for rank, timeline in fewer.steps.timelines.items():
        pairs = list(zip(timeline, more.steps.timelines[rank], strict=False))
        timelines[rank] = tuple(mixed.timeline(*pair) for pair in pairs)
        share = max(share, *(mixed.share(*map(StageTimes.of, pair)) for pair in pairs))
    stages = tuple(map(mixed.model, fewer.stages, more.stages))
    boundary_bytes = tuple(map(mixed.number, fewer.boundary_bytes, more.boundary_bytes))
    steps = Computation(timelines, fewer.steps.warm_up_steps)
    return Interpolated(
        replace(fewer, stages=stages, computation=steps, boundary_bytes=boundary_bytes), share
    )


@dataclass(frozen=True)
class _Interpolation:
    """Linear interpolation between ``fewer`` and ``more`` micro-batches."""

    fewer: int
    more: int
    count: int

    @property
    def weight(self) -> float:
        """The weight of ``fewer``: 1 at its micro-batch size, 0 at that of ``more``."""
        return (1 / self.count - 1 / self.more) / (1 / self.fewer - 1 / self.more)

    def number(self, fewer: float, more: float) -> int:
        return round(self.weight * fewer + (1 - self.weight) * more)

    def timeline(self, fewer: Timeline, more: Timeline) -> Timeline:
        """A step with interpolated passes; everything around them is taken from the nearer recording."""
        ends = StageTimes.of(fewer), StageTimes.of(more)
        near = ends[0] if self.weight >= 0.5 else ends[1]
        items = [item for block in near.before for item in block.items]
        for kind, part in ((Pass.FORWARD, Part.FORWARD), (Pass.BACKWARD, Part.BACKWARD)):
            for stage in sorted({action.stage for action in near.passes_ns}):
                for number in range(self.count):
                    pair = self._pair(ends, kind, stage, number)
                    points = near.first if part == Part.FORWARD else near.last
                    at = 0 if part == Part.FORWARD else self.count - 1
                    if number == at and (block := points.get(stage)) is not None:
                        scaled = block.scaled(self.number(*pair) / max(1, block.duration_ns))
                        items += scaled.of_micro_batch(number).items
                    else:
                        items.append(
                            Item(part, duration_ns=self.number(*pair), stage=stage, micro_batch=number)
                        )
        items += [item for block in near.after for item in block.items]
        return Timeline(fewer.rank, fewer.step, tuple(items), fewer.background_ns)

    def _pair(
        self, ends: tuple[StageTimes, StageTimes], kind: Pass, stage: int, number: int
    ) -> tuple[int, int]:
        """The times (ns) of the corresponding pass in both recordings: at the same position in the batch."""
        fewer, more = (
            times.passes_ns[Action(kind, stage, number * recorded // self.count)]
            for times, recorded in zip(ends, (self.fewer, self.more), strict=True)
        )
        return fewer, more

    def share(self, fewer: StageTimes, more: StageTimes) -> float:
        """The error bound of all passes of a rank together, as a fraction of their time."""
        taken_ns = least_ns = most_ns = 0.0
        for kind, stage in {(action.kind, action.stage) for action in fewer.passes_ns}:
            for number in range(self.count):
                large_ns, small_ns = self._pair((fewer, more), kind, stage, number)
                taken_ns += self.number(large_ns, small_ns)
                least_ns += max(small_ns, large_ns * self.fewer / self.count)
                most_ns += min(large_ns, small_ns * self.more / self.count)
        return max(0.0, taken_ns - least_ns, most_ns - taken_ns) / max(1.0, taken_ns)

    def model(self, fewer: ModelSpec, more: ModelSpec) -> ModelSpec:
        held = (
            None
            if fewer.stage_memory is None or more.stage_memory is None
            else self.memory(fewer.stage_memory, more.stage_memory)
        )
        activation_bytes = self.number(fewer.activation_bytes, more.activation_bytes)
        return fewer.model_copy(update={"stage_memory": held, "activation_bytes": activation_bytes})

    def memory(self, fewer: StageMemory, more: StageMemory) -> StageMemory:
        update: dict[str, object] = self._numbers(fewer, more)
        update["gradients_kept"] = fewer.gradients_kept or more.gradients_kept
        update["halves"] = (
            None
            if fewer.halves is None or more.halves is None
            else fewer.halves.model_copy(update=self._numbers(fewer.halves, more.halves))
        )
        return fewer.model_copy(update=update)

    def _numbers(
        self, fewer: StageMemory | HalvedBackward, more: StageMemory | HalvedBackward
    ) -> dict[str, object]:
        both = ((name, getattr(fewer, name), getattr(more, name)) for name in type(fewer).model_fields)
        return {
            name: self.number(in_fewer, in_more) for name, in_fewer, in_more in both if type(in_fewer) is int
        }
