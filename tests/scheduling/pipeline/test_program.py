"""Programs of all known orders: complete, in one order on both sides of a pair, never stuck however sends behave."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.scheduling.pipeline.test_orders import MOST_STAGES, all_of

from headway.scheduling.pipeline.orders import gpipe, grouped, one_forward_one_backward
from headway.scheduling.pipeline.program import (
    Await,
    ComputeAndSend,
    Instruction,
    Message,
    Post,
    Release,
    Send,
    message_of,
    program_of,
)
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule

Programs = tuple[tuple[Instruction, ...], ...]


def programs(schedule: PipelineSchedule) -> Programs:
    return tuple(program_of(schedule, rank) for rank in range(len(schedule.ranks)))


@pytest.mark.parametrize("stages", range(1, MOST_STAGES + 1))
def test_nobody_waits_for_ever(stages: int) -> None:
    """With any memory where a send returns at once; with an order's own where it waits for its receive."""
    for schedule in all_of(stages):
        assert left_over(programs(schedule), schedule, blocking=True) == []
        for buffers in (1, schedule.receive_buffers, schedule.receive_buffers + 1):
            found = programs(replace(schedule, receive_buffers=buffers))
            assert left_over(found, schedule, blocking=False) == []


def test_groups_need_a_buffer_a_member_where_sends_wait() -> None:
    """All of a group is sent before its first gradient is waited for."""
    for size in (2, 3, 4):
        schedule = grouped(2, 3 * size, size)
        fewer = programs(replace(schedule, receive_buffers=size - 1))
        assert schedule.receive_buffers == size
        assert left_over(fewer, schedule, blocking=True)


@pytest.mark.parametrize("stages", range(1, MOST_STAGES + 1))
def test_what_is_sent_is_posted_and_needed_once(stages: int) -> None:
    for schedule in all_of(stages):
        found = programs(schedule)
        sent: dict[tuple[int, int], list[Message]] = {}
        posted: dict[tuple[int, int], list[Message]] = {}
        awaited: Counter[Message] = Counter()
        for rank, own in enumerate(found):
            assert tuple(each for each in own if isinstance(each, Action)) == schedule.ranks[rank]
            for each in own:
                match each:
                    case Send(message):
                        sent.setdefault((message.sender, message.receiver), []).append(message)
                    case Post(message):
                        posted.setdefault((message.sender, message.receiver), []).append(message)
                    case Await(message):
                        awaited[message] += 1
        assert sent == posted, "a network without tags gives a receive what was sent first"
        every = [message for messages in sent.values() for message in messages]
        assert awaited == Counter(every)
        assert len(every) == len(set(every)) == schedule.transfers


@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_no_more_receives_are_posted_than_there_is_memory_for(buffers: int) -> None:
    for schedule in (one_forward_one_backward(3, 6), gpipe(3, 6)):
        most: Counter[int] = Counter()
        for own in programs(replace(schedule, receive_buffers=buffers)):
            held: Counter[int] = Counter()
            for each in own:
                if isinstance(each, Post):
                    held[each.message.sender] += 1
                elif isinstance(each, Await):
                    held[each.message.sender] -= 1
                most |= held
        assert max(most.values()) == buffers


def test_what_is_sent_first_is_posted_first_even_where_it_is_needed_last() -> None:
    """The second rank takes the second micro-batch first."""
    drawn = ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F1 1F0 3F0 3B0 3F1 3B1 1B0 1B1")
    ranks = tuple(
        tuple(Action(Pass(each[1]), int(each[0]), int(each[2])) for each in own.split()) for own in drawn
    )
    schedule = PipelineSchedule(ranks, 2)
    found = programs(schedule)
    assert left_over(found, schedule, blocking=False) == []
    for sender, receiver in ((0, 1), (1, 0)):
        sends = [each.message for each in found[sender] if isinstance(each, Send)]
        assert [each.message for each in found[receiver] if isinstance(each, Post)] == sends


def test_a_schedule_without_memory_for_a_message_is_none() -> None:
    with pytest.raises(ValueError, match="at least one receive buffer, not 0"):
        replace(gpipe(2, 2), receive_buffers=0)


@pytest.mark.parametrize("stages", range(1, MOST_STAGES + 1))
def test_last_gradients_are_sent_within_the_backward_that_replicas_end(stages: int) -> None:
    """Only those of replicated stages, and nothing else changes."""
    for schedule in all_of(stages):
        for rank, actions in enumerate(schedule.ranks):
            plain = program_of(schedule, rank)
            mine = {each.stage for each in actions}
            assert program_of(schedule, rank, {stages + 9}) == plain
            found = program_of(schedule, rank, mine)
            apart: list[Instruction] = []
            within = []
            for each in found:
                if isinstance(each, ComputeAndSend):
                    within.append(each.action)
                    apart += [each.action, Send(each.message)]
                else:
                    apart.append(each)
            assert tuple(apart) == plain
            lasts = {each.stage: each for each in actions if each.kind is Pass.BACKWARD}
            assert set(within) == {last for last in lasts.values() if message_of(schedule, last)}


def left_over(found: Programs, schedule: PipelineSchedule, *, blocking: bool) -> list[Instruction]:
    """What ranks stand at when none can go on: nothing where all come to their ends."""
    at = [0] * len(found)
    done: list[set[Action]] = [set() for _ in found]
    posted: set[Message] = set()
    sent: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(found):
            while at[rank] < len(own):
                match own[at[rank]]:
                    case Post(message):
                        posted.add(message)
                    case Send(message):
                        assert message.of in done[rank], "what is sent has been computed"
                        if blocking and message not in posted:
                            break
                        sent.add(message)
                    case Await(message):
                        if message not in posted & sent:
                            break
                        done[rank].add(message.of)
                    case Release(message):
                        assert message in posted & sent
                        assert any(message.of in schedule.needs(each) for each in done[message.receiver])
                    case Action() as action:
                        assert set(schedule.needs(action)) <= done[rank]
                        done[rank].add(action)
                at[rank] += 1
                moved = True
    return [own[place] for own, place in zip(found, at, strict=True) if place < len(own)]
