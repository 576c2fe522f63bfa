from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.clocks.jobs import BEGIN_NS, SECOND, Clock, collectives, messages

from headway.clocks import Meetings, meetings_of
from headway.clocks.meetings import LOOSE, MAX_CLOCKS, MAX_MEETINGS, MESSAGE
from headway.trace.events import Event, Events, Kind, Stream

EACH = {0: "a", 1: "b", 2: "c", 3: "d"}


def one(name: str, start: int, end: int, sequence: int = -1, /, **fields: Any) -> Event:
    kind = {"send": Kind.SEND, "receive": Kind.RECEIVE}.get(name, Kind.COLLECTIVE)
    event = Event(
        kind, name, Stream.COMMUNICATION, 0, start, end - start, group="g", sequence=sequence, size_bytes=8
    )
    return event._replace(**fields)


def met(rows: dict[int, list[Event]], clocks: dict[int, str] = EACH) -> Meetings:
    return meetings_of({rank: Events.from_rows(own) for rank, own in rows.items()}, clocks)


def ends(meetings: Meetings) -> list[list[tuple[int, int]]]:
    """The (clock, end) pairs of each meeting, in no particular order of meetings."""
    found: dict[int, list[tuple[int, int]]] = {}
    columns = (meetings.meeting, meetings.clock, meetings.end_ns)
    for meeting, clock, end_ns in zip(*(column.tolist() for column in columns), strict=True):
        found.setdefault(meeting, []).append((clock, end_ns))
    return sorted(found.values())


@given(st.integers(-(2**61), 2**61))
def test_what_belongs_together_is_known_by_number_whatever_the_time(epoch_ns: int) -> None:
    jobs = collectives(2, 20)
    here = meetings_of(jobs, EACH)
    there = meetings_of({0: jobs[0], 1: Clock(epoch_ns=epoch_ns).read(jobs[1])}, EACH)
    own = there.clock == 1
    assert len(here) == len(there) == 40
    assert np.array_equal(there.end_ns[own] - epoch_ns, here.end_ns[own])
    assert np.array_equal(there.end_ns[~own], here.end_ns[~own])


def test_of_a_clocks_ranks_the_last_arrival_and_the_first_end_count() -> None:
    rows = {rank: [one("all_reduce", 10 + rank, 30 - rank, 0)] for rank in range(4)}
    meetings = met(rows, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert meetings.clocks == ("a", "b")
    assert meetings.arrival_ns.tolist() == [11, 13]
    assert meetings.end_ns.tolist() == [29, 27]
    assert meetings.first_ns.tolist() == [10, 12]
    assert meetings.last_ns.tolist() == [30, 28]


def test_ranks_of_one_clock_do_not_meet() -> None:
    assert len(met({0: [one("barrier", 0, 9, 0)], 1: [one("barrier", 0, 9, 0)]}, {0: "a", 1: "a"})) == 0
    assert len(met({0: []})) == 0
    assert len(meetings_of({}, {})) == 0


def test_another_group_name_or_number_is_another_meeting() -> None:
    first = [one("all_reduce", 0, 9, 0), one("all_gather", 0, 9, 1), one("all_reduce", 0, 9, 2)]
    second = [one("all_reduce", 0, 9, 0, group="h"), one("all_reduce", 0, 9, 1), one("all_reduce", 0, 9, 2)]
    assert len(met({0: first, 1: second})) == 2


def test_without_numbers_the_order_in_a_step_counts_where_all_have_as_many() -> None:
    first = [one("all_reduce", 10 * i, 10 * i + 5, step=i // 2) for i in range(4)]
    second = [one("all_reduce", 500 + 10 * i, 505 + 10 * i, step=i // 2) for i in range(4)]
    assert ends(met({0: first, 1: second})) == [[(0, 10 * i + 5), (1, 505 + 10 * i)] for i in range(4)]
    # One is missing in step 0, and it cannot be known which.
    assert ends(met({0: first, 1: second[1:]})) == [[(0, 10 * i + 5), (1, 505 + 10 * i)] for i in (2, 3)]


def test_a_number_that_stands_twice_is_no_ones_alone() -> None:
    first = [one("all_reduce", 0, 5, 7), one("all_reduce", 10, 15, 7)]
    assert ends(met({0: first, 1: [one("all_reduce", 90, 95, 7)]})) == []
    second = [one("all_reduce", 90, 95, 7), one("all_reduce", 80, 85, 7, enqueue_ns=70)]
    assert ends(met({0: first, 1: second})) == [[(0, 5), (1, 85)], [(0, 15), (1, 95)]]


def test_messages_are_matched_by_both_ends_and_order() -> None:
    rows = {
        0: [one("send", 10, 12, peer=1), one("send", 20, 22, peer=1), one("send", 30, 32, peer=2)],
        1: [one("receive", 5, 112, peer=0), one("receive", 15, 122, peer=0), one("send", 40, 41, peer=0)],
        2: [one("receive", 1, 132, peer=0)],
    }
    meetings = met(rows)
    assert ends(meetings) == [[(0, 12), (1, 112)], [(0, 22), (1, 122)], [(0, 32), (2, 132)]]
    assert (meetings.form == MESSAGE).all()
    assert meetings.holds.tolist() == (meetings.clock == 0).tolist()
    assert meetings.waits.tolist() == (meetings.clock != 0).tolist()


def test_messages_of_a_collective_are_matched_by_its_number() -> None:
    rows = {
        0: [
            one("send", 10, 12, 4, name="all_reduce", peer=1),
            one("send", 20, 22, 5, name="all_reduce", peer=1),
        ],
        1: [one("receive", 1, 32, 5, name="all_reduce", peer=0)],
    }
    assert ends(met(rows)) == [[(0, 22), (1, 32)]]


def test_a_broadcast_orders_clocks_where_its_root_is_known() -> None:
    rows = {rank: [one("broadcast", rank, 9, 0, peer=1), one("broadcast", rank, 9, 1)] for rank in range(3)}
    meetings = met(rows)
    assert (meetings.form == LOOSE).all()
    known = meetings.meeting == meetings.meeting[meetings.holds]
    assert meetings.clock[meetings.holds].tolist() == [1]
    assert meetings.clock[known & meetings.waits].tolist() == [0, 2]
    assert not meetings.waits[~known].any()


def test_of_many_meetings_some_are_chosen_at_all_times_and_of_all_who_met() -> None:
    many, few = collectives(3, 20_000, seconds=1000.0), messages([0, 3], 5, seconds=3.0)
    meetings = meetings_of(
        {
            rank: Events.concatenated([part[rank] for part in (many, few) if rank in part])
            for rank in range(4)
        },
        EACH,
    )
    assert 100 < meetings.meeting[-1] + 1 <= 1.5 * MAX_MEETINGS
    assert (meetings.clock == 3).sum() == 10
    since_s = (meetings.end_ns[meetings.clock == 1] - BEGIN_NS) / SECOND
    filled = np.bincount((since_s // 100).astype(int), minlength=10)
    assert filled.min() > 0.5 * filled.max()
    assert (np.diff(meetings.meeting) >= 0).all()


def test_of_a_large_meeting_some_take_part_and_all_do_in_turn() -> None:
    meetings = meetings_of(collectives(100, 2000), {rank: f"host {rank}" for rank in range(100)})
    assert np.bincount(meetings.meeting).max() <= MAX_CLOCKS + 1
    assert len(np.unique(meetings.clock)) == 100


def test_times_that_are_none_do_no_harm() -> None:
    jobs = collectives(2, 5)
    wild = replace(
        jobs[1], duration_ns=np.array([-5, 2**62, 0, 1, 2**62]), start_ns=np.array([0, 1, 2, 2**62, 2**62])
    )
    assert len(meetings_of({0: jobs[0], 1: wild}, EACH)) == 10
