"""How long a rank's passes take, by what of a step they are: taken from its timeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.errors import PlanError
from headway.graph.blocks import ComputeBlock, blocks_of
from headway.graph.computation import Computation
from headway.graph.timeline import Item, Part, Point, Timeline
from headway.scheduling.pipeline.schedule import Action, Pass

INPUT_SHARE = 0.5
"""Of a backward's time, for the gradients of inputs, where the other half is put off."""
PASSES = {Part.FORWARD: Pass.FORWARD, Part.BACKWARD: Pass.BACKWARD}


@dataclass(frozen=True)
class StageTimes:
    """One step of one rank: ``passes_ns`` of its actions, and what it computes before the first and after the last.

    What stands between two passes counts to the one before it. ``passes_ns`` has whole backwards only. ``first`` is of
    each stage a forward with the points at which it uses modules, ``last`` the backward that readies gradients, with
    those at which it does. ``finalize_ns`` is the part of a stage's passes in which buckets were copied back.
    """

    before: tuple[ComputeBlock, ...]
    passes_ns: dict[Action, int]
    after: tuple[ComputeBlock, ...]
    first: dict[int, ComputeBlock] = field(default_factory=dict)
    last: dict[int, ComputeBlock] = field(default_factory=dict)
    finalize_ns: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline) -> StageTimes:
        """Read them off the blocks of ``timeline``, in whatever order it has them."""
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
        """How long ``action`` takes; of a backward that is halved, the gradients of inputs take ``input_share``.

        Raises KeyError for a pass that the timeline does not have.
        """
        kind, stage, micro_batch = action
        if kind in (Pass.FORWARD, Pass.BACKWARD):
            return self.passes_ns[action]
        whole_ns = self.passes_ns[Action(Pass.BACKWARD, stage, micro_batch)]
        inputs_ns = round(whole_ns * input_share)
        return inputs_ns if kind is Pass.INPUT_GRADIENT else whole_ns - inputs_ns

    def using(self, action: Action) -> tuple[Item, ...]:
        """The forward ``action`` with the points at which it uses modules: it is the first of its stage."""
        return self._with_points(self.first.get(action.stage), Part.FORWARD, action)

    def readying(self, action: Action) -> tuple[Item, ...]:
        """The backward ``action`` with the points at which gradients are ready: it is the last of its stage."""
        return self._with_points(self.last.get(action.stage), Part.BACKWARD, action)

    def _with_points(self, block: ComputeBlock | None, part: str, action: Action) -> tuple[Item, ...]:
        """Where ``block`` is another micro-batch's, the points are at the same shares of ``action``."""
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
    """What every rank of a pipeline computed in its first recorded step, in its order; of several, the first's."""
    timelines = computation.timelines
    found: dict[frozenset[int], tuple[Action, ...]] = {}
    for rank in sorted(timelines):
        actions = tuple(StageTimes.of(timelines[rank][0]).passes_ns)
        found.setdefault(frozenset(action.stage for action in actions), actions)
    return tuple(found.values())


def check_as_many(planned: int, computation: Computation) -> None:
    """Raise PlanError where ``planned`` is another number of micro-batches than recorded steps have."""
    recorded = micro_batches(computation)
    if recorded != planned:
        raise PlanError(
            "the plan is for another number of micro-batches than was recorded", got=f"{planned}",
            expected=f"{recorded}", fix="Replay it on a recording of as many, or give optimize both recordings.",
        )  # fmt: skip


def micro_batches(computation: Computation) -> int:
    """How many micro-batches the first recorded step goes through its stages in; 0 where it is no pipeline's."""
    actions = (action for own in recorded_actions(computation) for action in own)
    return 1 + max((action.micro_batch for action in actions), default=-1)
