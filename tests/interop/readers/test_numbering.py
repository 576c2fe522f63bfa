"""Numbers for collectives that have none: jobs are made up, so that what belongs together is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.job_views import Job, precision_and_recall, views

from headway.interop.readers.numbering import number_collectives
from headway.trace.events import Event, Events, Kind, Stream

BY_ENDS = "Collectives have no sequence numbers: they were matched across ranks by common ends."
MS = 1_000_000


def collective(
    end_ns: int, *, name: str = "all_reduce", size: int = 8, step: int = 0, took_ns: int = MS, **more: object
) -> Event:
    event = Event(
        Kind.COLLECTIVE, name, Stream.COMMUNICATION, step, end_ns - took_ns, took_ns, size_bytes=size
    )
    return event._replace(**more)  # type: ignore[arg-type]


def measured(job: Job, seeds: range) -> tuple[float, float]:
    """Mean precision and recall."""
    found = []
    for seed in seeds:
        events, truth = views(job, seed)
        number_collectives(events)
        for own in events.values():
            assert len(np.unique(own.sequence)) == len(own)
            assert (own.sequence >= 0).all()
        found.append(precision_and_recall(events, truth))
    precision, recall = np.mean(found, axis=0)
    return float(precision), float(recall)


@pytest.mark.parametrize(
    "job",
    [
        Job(), Job(loss=0.05), Job(loss=0.1, late_steps=3), Job(loss=0.2), Job(kinds=1), Job(kinds=1, regular=True),
        Job(kinds=1, regular=True, loss=0.1, late_steps=3), Job(extra=5), Job(ranks=4, loss=0.1, extra=5),
        Job(step_ns=2 * MS, loss=0.05), Job(steps=1, a_step=60, step_ns=600 * MS, loss=0.1),
        Job(ranks=5, steps=30, a_step=12, step_ns=10 * MS, kinds=1, extra=2, late_steps=3),
        Job(steps=6, regular=True, loss=0.05), Job(ranks=8, steps=20, loss=0.02, late_steps=2),
    ],
    ids=repr,
)  # fmt: skip
def test_views_of_one_collective_are_told_by_their_ends(job: Job) -> None:
    precision, recall = measured(job, range(40))
    assert precision >= 0.99
    assert recall >= 0.99


@settings(max_examples=examples(60))
@given(
    st.builds(
        Job, ranks=st.integers(2, 5), steps=st.integers(10, 30), a_step=st.integers(3, 12), loss=st.floats(0, 0.1),
        step_ns=st.integers(10, 400).map(lambda ms: ms * MS), kinds=st.integers(1, 6), regular=st.booleans(),
        extra=st.integers(0, 2), late_steps=st.integers(0, 3),
    ),
    st.integers(0, 2**32),
)  # fmt: skip
def test_any_job_of_thirty_collectives(job: Job, seed: int) -> None:
    precision, recall = measured(job, range(seed, seed + 3))
    assert precision >= 0.92  # of three views of a job; the mean of more stands above
    assert recall >= 0.92


def test_clocks_may_be_any_distance_apart() -> None:
    events, truth = views(Job(offset_ns=0, loss=0.05), 1)
    events[1] = replace(events[1], start_ns=events[1].start_ns + 10**18)
    assert number_collectives(events)[0] == BY_ENDS
    assert precision_and_recall(events, truth) == (1.0, 1.0)


@pytest.mark.parametrize("steps", [1, 40])
def test_a_rank_may_have_begun_long_after_another(steps: int) -> None:
    """By 200 collectives, whether or not steps are known."""
    events, truth = views(Job(steps=40, a_step=20, step_ns=100 * MS, kinds=2, loss=0.02), 1)
    begun = events[1].start_ns >= events[1].start_ns[200]
    events[1], truth[1] = events[1].where(begun), truth[1][begun]
    if steps == 1:
        events = {rank: replace(own, step=np.zeros_like(own.step)) for rank, own in events.items()}
    number_collectives(events)
    assert min(precision_and_recall(events, truth)) > 0.99


def test_clocks_may_drift() -> None:
    events, truth = views(Job(steps=200, step_ns=50 * MS, loss=0.02), 1)  # ten seconds
    start_ns = events[1].start_ns + ((events[1].start_ns - events[1].start_ns[0]) * 100e-6).astype(np.int64)
    events[1] = replace(events[1], start_ns=start_ns)
    number_collectives(events)
    precision, recall = precision_and_recall(events, truth)
    assert min(precision, recall) > 0.99


def test_ends_that_are_far_apart_once_are_told_by_order() -> None:
    ends = [10 * MS * number for number in range(1, 20)]
    rows = [[collective(end) for end in ends] for _ in range(2)]
    rows[1][9] = collective(ends[9] + 4 * MS, took_ns=5 * MS)
    events = {rank: Events.from_rows(own) for rank, own in enumerate(rows)}
    assert number_collectives(events) == [BY_ENDS]
    assert events[0].sequence.tolist() == events[1].sequence.tolist() == list(range(19))


def test_what_only_others_recorded_is_one_among_them() -> None:
    """The first rank, which has most, lacks the seventh."""
    ends = [10 * MS * number for number in range(1, 20)]
    rows = {rank: [collective(end) for end in ends] for rank in range(3)}
    del rows[0][6], rows[1][0], rows[2][1]
    rows[0] += [collective(300 * MS), collective(320 * MS)]
    events = {rank: Events.from_rows(own) for rank, own in rows.items()}
    assert number_collectives(events) == [BY_ENDS, "2 collectives have no counterpart on rank 0."]
    seventh = [events[rank].sequence[events[rank].end_ns == 70 * MS].tolist() for rank in (1, 2)]
    assert seventh[0] == seventh[1] == [20]


def test_order_decides_where_ends_do_not_agree() -> None:
    random = np.random.default_rng(5)
    events = {}
    for rank in range(2):
        ends = np.sort(random.integers(0, 10_000 * MS, 12))
        events[rank] = Events.from_rows(
            [collective(int(end), step=number // 4) for number, end in enumerate(ends)]
        )
    notes = number_collectives(events)
    assert notes == [
        BY_ENDS,
        "Too few collectives of rank 1 end together with another rank's: they were matched by order.",
    ]
    assert events[0].sequence.tolist() == events[1].sequence.tolist() == list(range(12))


def test_few_collectives() -> None:
    one = {rank: Events.from_rows([collective(10**15 * rank)]) for rank in range(2)}
    assert number_collectives(one) == [BY_ENDS]
    assert one[0].sequence.tolist() == one[1].sequence.tolist() == [0]
    other = {rank: Events.from_rows([collective(MS, size=8 + rank)]) for rank in range(2)}
    number_collectives(other)
    assert other[0].sequence.tolist() != other[1].sequence.tolist()
    alone = {3: Events.from_rows([collective(2 * MS), collective(MS)])}
    assert number_collectives(alone) == []
    assert sorted(alone[3].sequence.tolist()) == [0, 1]
    nothing = {rank: Events.from_rows([]) for rank in range(2)}
    assert number_collectives(nothing) == []
    half = {0: Events.from_rows([]), 1: Events.from_rows([collective(MS)])}
    number_collectives(half)
    assert half[1].sequence.tolist() == [0]


def test_sizes_that_ranks_may_state_differently() -> None:
    for name, same in (("all_to_all", True), ("all_gather", True), ("all_reduce", False)):
        events = {
            rank: Events.from_rows(
                [collective(10 * MS * n, name=name, size=n + 100 * rank) for n in range(9)]
            )
            for rank in range(2)
        }
        number_collectives(events)
        assert bool(set(events[0].sequence.tolist()) & set(events[1].sequence.tolist())) == same


def test_numbers_that_are_stated_stay() -> None:
    rows = [collective(10 * MS * n, group="tp", sequence=n if n % 2 else -1) for n in range(1, 10)]
    rows.append(Event(Kind.SEND, "send", Stream.COMMUNICATION, 0, 0, 5))
    events = {rank: Events.from_rows(rows) for rank in range(2)}
    number_collectives(events)
    own = events[0].of_kind(Kind.COLLECTIVE)
    assert own.sequence[own.end_ns // (10 * MS) % 2 == 1].tolist() == [1, 3, 5, 7, 9]
    assert len(set(own.sequence.tolist())) == 9  # and none stands for another
    assert events[0].of_kind(Kind.SEND).sequence.tolist() == [-1]
    assert events[1].sequence.tolist() == events[0].sequence.tolist()


def test_a_rank_without_numbers_takes_those_of_a_rank_that_has_them() -> None:
    numbered = [collective(10 * MS * n, group="dp" if n % 2 else "tp", sequence=n // 2) for n in range(1, 20)]
    bare = [collective(10 * MS * n + 77 * MS) for n in range(3, 20)]
    events = {0: Events.from_rows(bare), 1: Events.from_rows(numbered), 2: Events.from_rows(numbered[:9])}
    assert number_collectives(events) == [
        "Rank 0 has no sequence numbers: its collectives were matched to rank 1's by their ends."
    ]
    assert events[0].group.tolist() == events[1].group[2:].tolist()
    assert events[0].sequence.tolist() == events[1].sequence[2:].tolist()
    assert events[2].sequence.tolist() == events[1].sequence[:9].tolist()


@pytest.mark.timeout(60)
def test_a_hundred_thousand() -> None:
    events, truth = views(Job(steps=20_000, a_step=5, loss=0.01), 1)
    number_collectives(events)
    assert min(precision_and_recall(events, truth)) > 0.999


def test_collectives_like_the_ticks_of_a_clock() -> None:
    """Every millisecond, all alike: only that steps are numbered alike tells one tick from the next."""
    random, count = np.random.default_rng(0), 30_000
    tick = np.arange(count)
    events = {
        rank: Events.from_columns(
            kind=Kind.COLLECTIVE, stream=Stream.COMMUNICATION, name="all_reduce", step=tick // 1000,
            start_ns=tick * MS + random.integers(0, 50_000, count) + 123_456_789 * rank, duration_ns=1000,
        )
        for rank in range(2)
    }  # fmt: skip
    assert number_collectives(events) == [BY_ENDS]
    assert events[0].sequence.tolist() == events[1].sequence.tolist()


@settings(max_examples=examples(100))
@given(st.data())
def test_anything_gets_numbers(draw: st.DataObject) -> None:
    times = st.integers(-(2**61), 2**61) | st.integers(0, 50).map(lambda ms: ms * MS)
    row = st.builds(
        collective, times, name=st.sampled_from(["all_reduce", "broadcast", ""]), size=st.integers(-1, 3),
        step=st.integers(-5, 5), took_ns=st.integers(0, 2**60), group=st.sampled_from(["", "a"]),
        sequence=st.integers(-1, 3), enqueue_ns=st.integers(-1, 2**61),
    )  # fmt: skip
    events = {rank: Events.from_rows(draw.draw(st.lists(row, max_size=20))) for rank in range(3)}
    number_collectives(events)
    for own in events.values():
        assert (own.sequence >= 0).all()
