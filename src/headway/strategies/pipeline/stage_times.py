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

    What stands between two passes counts to the one before it. ``passes_ns`` has whole backwards only. ``last``
    is of each stage the backward that readies gradients, with the points at which it does.
    """

    before: tuple[ComputeBlock, ...]
    passes_ns: dict[Action, int]
    after: tuple[ComputeBlock, ...]
    last: dict[int, ComputeBlock] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline) -> StageTimes:
        """Read them off the blocks of ``timeline``, in whatever order it has them."""
        blocks = blocks_of(timeline)
        places = [index for index, block in enumerate(blocks) if _action(block) is not None]
        if not places:
            return cls(blocks, {}, ())
        first, last = places[0], places[-1] + 1
        passes_ns: dict[Action, int] = {}
        current = _action(blocks[first])
        assert current is not None
        last_of = {
            block.stage: block
            for block in blocks[first:last]
            if block.kind == Part.BACKWARD and any(item.kind == Point.READY for item in block.items)
        }
        for block in blocks[first:last]:
            current = _action(block) or current
            passes_ns[current] = passes_ns.get(current, 0) + block.duration_ns
        return cls(blocks[:first], passes_ns, blocks[last:], last_of)

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

    def readying(self, action: Action) -> tuple[Item, ...]:
        """The backward ``action`` with the points at which gradients are ready: it is a stage's last one of the step.

        Where another micro-batch's was the last, the points are at the same shares of it.
        """
        block = self.last.get(action.stage)
        if block is None:
            return (Item(Part.BACKWARD, duration_ns=self.passes_ns[action]),)
        if block.micro_batch != action.micro_batch:
            block = block.scaled(self.passes_ns[action] / max(1, block.duration_ns))
        return block.items


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
