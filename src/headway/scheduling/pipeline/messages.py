"""What ranks of a pipeline send each other: what a stage computes goes to the next one, its gradient comes back."""

from __future__ import annotations

from typing import NamedTuple

from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule


class Message(NamedTuple):
    """What ``of`` computed, an activation or the gradient of one, on its way to the rank that needs it."""

    of: Action
    sender: int
    receiver: int

    @property
    def is_gradient(self) -> bool:
        """Whether it goes backward."""
        return self.of.kind is not Pass.FORWARD

    @property
    def to_stage(self) -> int:
        """The stage that needs it."""
        return self.of.stage + (-1 if self.is_gradient else 1)

    @property
    def boundary(self) -> int:
        """The stage before the boundary that it crosses."""
        return min(self.of.stage, self.to_stage)

    def needed_by(self, schedule: PipelineSchedule) -> Action:
        """The first action of its receiver that needs it."""
        if not self.is_gradient:
            return Action(Pass.FORWARD, self.to_stage, self.of.micro_batch)
        return schedule.first_of_backward(self.to_stage, self.of.micro_batch)

    def __str__(self) -> str:
        return f"{self.of}→{self.to_stage}"


def message_of(schedule: PipelineSchedule, action: Action) -> Message | None:
    """What another rank needs of ``action``; None where none does."""
    if action.kind is Pass.WEIGHT_GRADIENT:
        return None
    target = action.stage + (1 if action.kind is Pass.FORWARD else -1)
    if not 0 <= target < schedule.stages:
        return None
    sender, receiver = schedule.rank_of_stage[action.stage], schedule.rank_of_stage[target]
    return None if sender == receiver else Message(action, sender, receiver)


def message_for(schedule: PipelineSchedule, action: Action) -> Message | None:
    """What ``action`` needs of another rank; None where what it needs was computed on its own."""
    for need in schedule.needs(action):
        message = message_of(schedule, need)
        if message is not None and message.to_stage == action.stage:
            return message
    return None
