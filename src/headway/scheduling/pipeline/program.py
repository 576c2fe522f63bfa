"""Compiles a pipeline schedule into each rank's program: its passes, sends and receives of one step, in order.

The live runtime and the replay carry out the same program. Receives are posted before they are needed, so that messages
travel while other micro-batches are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple

from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule


class Message(NamedTuple):
    """The result of the action ``of``, an activation or its gradient, sent to the rank that needs it."""

    of: Action
    sender: int
    receiver: int

    @property
    def is_gradient(self) -> bool:
        """Whether it goes backward."""
        return self.of.kind is not Pass.FORWARD

    @property
    def to_stage(self) -> int:
        """The stage that receives it."""
        return self.of.stage + (-1 if self.is_gradient else 1)

    @property
    def boundary(self) -> int:
        """The stage before the boundary that it crosses."""
        return min(self.of.stage, self.to_stage)

    def needed_by(self, schedule: PipelineSchedule) -> Action:
        """The first action of the receiver that needs it."""
        if not self.is_gradient:
            return Action(Pass.FORWARD, self.to_stage, self.of.micro_batch)
        return schedule.first_of_backward(self.to_stage, self.of.micro_batch)

    def __str__(self) -> str:
        return f"{self.of}→{self.to_stage}"


def message_of(schedule: PipelineSchedule, action: Action) -> Message | None:
    """The message that ``action`` sends to another rank, or None."""
    if action.kind is Pass.WEIGHT_GRADIENT:
        return None
    target = action.stage + (1 if action.kind is Pass.FORWARD else -1)
    if not 0 <= target < schedule.stages:
        return None
    sender, receiver = schedule.rank_of_stage[action.stage], schedule.rank_of_stage[target]
    return None if sender == receiver else Message(action, sender, receiver)


def message_for(schedule: PipelineSchedule, action: Action) -> Message | None:
    """The message from another rank that ``action`` needs, or None."""
    for need in schedule.needs(action):
        message = message_of(schedule, need)
        if message is not None and message.to_stage == action.stage:
            return message
    return None


class Post(NamedTuple):
    """Post the receive of ``message``."""

    message: Message


class Await(NamedTuple):
    """Wait until ``message``, whose receive was posted, has arrived."""

    message: Message


class Send(NamedTuple):
    """Begin to send ``message``."""

    message: Message


class ComputeAndSend(NamedTuple):
    """Compute ``action``, and begin to send ``message`` as soon as it is computed.

    ``action`` ends with the gradient reduction among the stage's replicas, for which ``message`` need not wait.
    """

    action: Action
    message: Message


class Release(NamedTuple):
    """Free the memory of a sent ``message``: the last arrival shows that its receiver has used it."""

    message: Message


Instruction = Action | ComputeAndSend | Post | Await | Send | Release


def program_of(
    schedule: PipelineSchedule, rank: int, replicated: Collection[int] = ()
) -> tuple[Instruction, ...]:
    """The program of ``rank`` for a step; ``replicated`` stages reduce gradients in their last backward.

    At most ``schedule.receive_buffers`` unneeded receives are posted per sender, or as many as are needed to reach a
    needed one. They are posted in the order of the sends, because messages have no tags. Sends without a reply end with
    the step.
    """
    return tuple(_program(schedule, rank, last_backwards(schedule, rank, replicated)))


def last_backwards(schedule: PipelineSchedule, rank: int, stages: Collection[int]) -> frozenset[Action]:
    """The last whole backward of each of ``stages`` that ``rank`` has."""
    last_of_stage = {
        action.stage: action
        for action in schedule.ranks[rank]
        if action.kind is Pass.BACKWARD and action.stage in stages
    }
    return frozenset(last_of_stage.values())


def _program(schedule: PipelineSchedule, rank: int, reducing: frozenset[Action]) -> Iterator[Instruction]:
    receives = {
        sender: _Receives(schedule, sender, rank) for sender in range(len(schedule.ranks)) if sender != rank
    }
    places = {action: place for actions in schedule.ranks for place, action in enumerate(actions)}
    sent: dict[int, deque[tuple[int, Message]]] = {peer: deque() for peer in receives}
    for queue in receives.values():
        yield from queue.fill()
    for action in schedule.ranks[rank]:
        if needed := message_for(schedule, action):
            queue = receives[needed.sender]
            yield from queue.until(needed)
            yield Await(needed)
            yield from queue.fill()
            unreleased = sent[needed.sender]
            while unreleased and unreleased[0][0] <= places[needed.of]:
                yield Release(unreleased.popleft()[1])
        message = message_of(schedule, action)
        if message and action in reducing:
            yield ComputeAndSend(action, message)
        else:
            yield action
        if message:
            if action not in reducing:
                yield Send(message)
            sent[message.receiver].append((places[message.needed_by(schedule)], message))


class _Receives:
    """The receives from one sender: those still to be posted, and those posted but not needed yet."""

    def __init__(self, schedule: PipelineSchedule, sender: int, receiver: int) -> None:
        sent = (message_of(schedule, action) for action in schedule.ranks[sender])
        self._to_post = deque(
            message for message in sent if message is not None and message.receiver == receiver
        )
        self._posted: set[Message] = set()
        self._most = schedule.receive_buffers

    def fill(self) -> Iterator[Post]:
        """Post receives up to the buffer limit."""
        while self._to_post and len(self._posted) < self._most:
            yield self._post()

    def until(self, needed: Message) -> Iterator[Post]:
        """Post receives up to ``needed``, which then frees its place."""
        while needed not in self._posted:
            yield self._post()
        self._posted.remove(needed)

    def _post(self) -> Post:
        message = self._to_post.popleft()
        self._posted.add(message)
        return Post(message)
