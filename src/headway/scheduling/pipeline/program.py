"""Programs: all that a rank of a pipeline does in one step and in which order, its messages included.

One program is carried out live and laid out in replay. Receives are posted before they are needed, so that a message
travels while other micro-batches are computed, and a send is never waited for before the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
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


class Post(NamedTuple):
    """A rank begins to receive ``message``, into memory of its own."""

    message: Message


class Await(NamedTuple):
    """A rank goes on when ``message``, whose receive it has posted, has arrived."""

    message: Message


class Send(NamedTuple):
    """A rank begins to send ``message``, which it has computed."""

    message: Message


class ComputeAndSend(NamedTuple):
    """A rank computes ``action``, and begins to send ``message`` within it, once that is computed.

    It ends with what replicas of the stage do about the gradients of its parameters, which ``message`` does not need.
    """

    action: Action
    message: Message


class Release(NamedTuple):
    """The memory of ``message`` may go: what has just arrived was sent after its receiver had needed it."""

    message: Message


Instruction = Action | ComputeAndSend | Post | Await | Send | Release


def program_of(
    schedule: PipelineSchedule, rank: int, replicated: Collection[int] = ()
) -> tuple[Instruction, ...]:
    """What ``rank`` does in a step, where stages that are ``replicated`` add up gradients in their last backward.

    It has at most ``schedule.receive_buffers`` messages of each sender posted that have not been needed yet, or as many
    as it takes to get at one that is needed. Of each sender they are posted in the order in which they are sent: that
    alone tells them apart on a network without tags. Sends that nothing comes back for end with the step.
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
    """What one sender sends one receiver: what is still to be posted, and what is posted and not needed yet."""

    def __init__(self, schedule: PipelineSchedule, sender: int, receiver: int) -> None:
        sent = (message_of(schedule, action) for action in schedule.ranks[sender])
        self._to_post = deque(
            message for message in sent if message is not None and message.receiver == receiver
        )
        self._posted: set[Message] = set()
        self._most = schedule.receive_buffers

    def fill(self) -> Iterator[Post]:
        """Post as many as there is room for."""
        while self._to_post and len(self._posted) < self._most:
            yield self._post()

    def until(self, needed: Message) -> Iterator[Post]:
        """Post ``needed`` and what is sent before it; it takes no room any more."""
        while needed not in self._posted:
            yield self._post()
        self._posted.remove(needed)

    def _post(self) -> Post:
        message = self._to_post.popleft()
        self._posted.add(message)
        return Post(message)
