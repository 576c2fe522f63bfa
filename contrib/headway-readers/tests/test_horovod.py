import json
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.changed_events import changed_events
from tests.interop.readers.damaging import damaged_bytes, refused

from headway.errors import TraceError
from headway.interop.readers.foreign import Document, ForeignRank
from headway.interop.readers.formats import SNIFFED_BYTES
from headway.trace.events import Kind, Stream
from headway_readers import horovod
from headway_readers.horovod.reader import NO_CYCLES, NOTHING_COMPUTED, ONE_STEP

FIXTURES = (
    Path(__file__).parent / "fixtures" / "horovod"
)  # see make.py there for the jobs that these facts are of
TIMELINES = ("arrivals", "cached", "unmarked")
RANKS, STEPS, LATE, LATE_STEP, SLEEP_NS = 3, 5, 1, 3, 60_000_000
TENSORS = {f"horovod_allreduce.{number}" for number in range(6)}
STEP_BYTES = 4 * (
    100 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10
)  # of the job's three layers, weights and biases


def fixture(name: str) -> bytes:
    return (FIXTURES / f"{name}.json").read_bytes()


def ranks_of(data: bytes, name: str = "timeline.json", *, lenient: bool = False) -> list[ForeignRank]:
    reading = horovod.read(Document(name, data, "", lenient))
    assert not reading.companions
    assert reading.ranks
    for one in reading.ranks:
        steps = one.events.of_kind(Kind.STEP)
        assert (one.events.duration_ns >= 0).all()
        assert (steps.end_ns[:-1] == steps.start_ns[1:]).all()
        assert len({rank.clock for rank in reading.ranks}) == 1
        rows = one.events.of_kind(Kind.COLLECTIVE)
        assert len(set(rows.sequence.tolist())) == len(rows)
    return list(reading.ranks)


def small() -> list[Any]:
    events = json.loads(fixture("arrivals"))
    return [event for event in events if event.get("name") != "CYCLE_START" or event["ts"] % 8 == 0]


def timeline(
    *events: dict[str, Any], tensors: int = 4, begin_us: int | None = 1_790_000_000_000_000
) -> bytes:
    began = [] if begin_us is None else [{"start_time_since_epoch_in_micros": begin_us}]
    named = [{"name": f"tensor {pid}"} for pid in range(1, tensors + 1)]
    described = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": args}
        for pid, args in [*((0, one) for one in began), *enumerate(named, 1)]
    ]
    return json.dumps([*described, *events]).encode()


def reduction(
    pid: int, at: int, arrivals: dict[int, int], *, length: int = 100, shape: str = "[25]"
) -> list[Any]:
    """One tensor: negotiated from ``at``, reduced when all have come, in microseconds; without ``arrivals``, cached."""
    complete = max(arrivals.values(), default=at + 50)
    phases: list[Any] = [{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": at, "pid": pid}]
    phases += [
        {"ph": "X", "name": str(rank), "ts": ts, "pid": pid, "dur": 0} for rank, ts in arrivals.items()
    ]
    return [
        *phases,
        {"ph": "E", "ts": complete, "pid": pid},
        {"ph": "B", "name": "ALLREDUCE", "ts": complete + 1, "pid": pid},
        {"ph": "B", "name": "NCCL_ALLREDUCE", "ts": complete + 2, "pid": pid},
        {"ph": "E", "ts": complete + length, "pid": pid},
        {"ph": "E", "ts": complete + length, "pid": pid, "args": {"dtype": "float32", "shape": shape}},
    ]


@pytest.mark.parametrize("name", TIMELINES)
def test_timelines_are_recognised(name: str) -> None:
    assert horovod.recognises("timeline.json", fixture(name)[:SNIFFED_BYTES])
    assert horovod.recognises("x", timeline(*reduction(1, 5, {}), begin_us=None))


@pytest.mark.parametrize(
    "head", [b"", b"[]", b'[{"ph": "X"}]', b'{"traceEvents": [{"name": "NEGOTIATE_ALLREDUCE"']
)
def test_other_documents_are_not_recognised(head: bytes) -> None:
    assert not horovod.recognises("timeline.json", head)


@pytest.mark.parametrize("name", TIMELINES)
def test_every_rank_takes_part_in_every_step(name: str) -> None:
    ranks = ranks_of(fixture(name), name)
    assert [one.rank for one in ranks] == list(range(RANKS))
    for one in ranks:
        assert (one.framework, one.backend, one.world_size, one.role) == ("horovod", "gloo", RANKS, "worker")
        assert one.absolute
        assert one.events.start_ns.min() > 10**18
        assert one.dropped_events == 0
        assert NOTHING_COMPUTED in one.notes
        assert len(one.events.of_kind(Kind.STEP)) == STEPS
        for step in range(STEPS):
            rows = one.events.of_step(step).of_kind(Kind.COLLECTIVE)
            assert int(rows.size_bytes.sum()) == STEP_BYTES
            assert set(rows.name.tolist()) == {"all_reduce"}
            assert rows.bucket.tolist() == list(range(len(rows)))
            assert set(rows.stream.tolist()) == {Stream.COMMUNICATION}
    for field in ("sequence", "start_ns", "duration_ns", "size_bytes", "group", "name", "step"):
        columns = [getattr(one.events.of_kind(Kind.COLLECTIVE), field).tolist() for one in ranks]
        assert columns[0] == columns[1] == columns[2]


def test_what_precedes_the_steps_belongs_to_none() -> None:
    rows = ranks_of(fixture("arrivals"))[0].events.of_kind(Kind.COLLECTIVE)
    before = rows.where(rows.step < 0)
    assert before.name.tolist() == ["broadcast"] * 6
    assert set(before.size_bytes.tolist()) == {-1}  # a broadcast in place has no output that is told of
    assert set(before.bucket.tolist()) == {-1}


@pytest.mark.parametrize("name", ["arrivals", "unmarked"])
def test_the_rank_that_slept_comes_last_and_the_others_wait_for_it(name: str) -> None:
    ranks = ranks_of(fixture(name))
    first = [one.events.of_step(LATE_STEP).of_kind(Kind.COLLECTIVE).enqueue_ns[0] for one in ranks]
    assert int(np.argmax(first)) == LATE
    waited = [int(one.events.of_step(LATE_STEP).of_kind(Kind.WAIT).duration_ns.sum()) for one in ranks]
    for rank in range(RANKS):
        if rank != LATE:
            assert first[LATE] - first[rank] > 0.8 * SLEEP_NS
            assert waited[rank] > waited[LATE] + 0.8 * SLEEP_NS


@pytest.mark.parametrize("name", ["arrivals", "unmarked"])
def test_every_tensor_of_every_step_and_rank_has_its_arrival(name: str) -> None:
    for one in ranks_of(fixture(name)):
        for step in range(STEPS):
            own = one.events.of_step(step)
            ready = own.of_kind(Kind.GRADIENT_READY)
            assert set(ready.name.tolist()) == TENSORS
            assert len(ready) == len(TENSORS)
            for row in own.of_kind(Kind.COLLECTIVE):
                assert row.enqueue_ns == ready.where(ready.bucket == row.bucket).start_ns.max()
                assert row.enqueue_ns <= row.start_ns


def test_arrivals_of_cached_tensors_are_not_made_up() -> None:
    ranks = ranks_of(fixture("cached"))
    (note,) = [note for note in ranks[0].notes if "cached" in note]
    rows = [one.events.of_kind(Kind.COLLECTIVE) for one in ranks]
    later = len(rows[0].where(rows[0].step >= 1))
    assert f"For {later} of {len(rows[0])} collectives" in note
    for column in rows[1:]:
        assert (column.enqueue_ns[column.step >= 1] == rows[0].enqueue_ns[rows[0].step >= 1]).all()
    for one in ranks:
        assert set(one.events.of_kind(Kind.GRADIENT_READY).step.tolist()) == {0}


def test_a_timeline_without_cycles_says_what_that_means() -> None:
    assert NO_CYCLES in ranks_of(fixture("unmarked"))[0].notes
    assert NO_CYCLES not in ranks_of(fixture("arrivals"))[0].notes


@pytest.mark.parametrize("ending", [b"", b",", b",\n", b"\n"])
def test_a_timeline_that_was_not_closed_as_old_versions_leave_it_is_whole(ending: bytes) -> None:
    """No file of such a version was at hand: this is one of 0.28.1 without its last bracket."""
    data = fixture("arrivals")
    assert data.endswith(b"]")
    found = ranks_of(data[:-1] + ending)
    assert len(found[0].events) == len(ranks_of(data)[0].events)
    assert found[0].dropped_events == 0
    assert any("not closed" in note for note in found[0].notes)


def test_a_step_whose_end_was_lost_at_shutdown_is_none() -> None:
    events = json.loads(fixture("arrivals"))
    last = max(index for index, event in enumerate(events) if event.get("name") == "GLOO_ALLREDUCE")
    found = ranks_of(json.dumps(events[:last]).encode())
    assert len(found[0].events.of_kind(Kind.STEP)) == STEPS - 1
    assert any("had not been answered" in note for note in found[0].notes)


def test_a_timeline_cut_in_an_event_is_damaged() -> None:
    data = fixture("arrivals")
    cut = data[: data.index(b'"ts"', len(data) // 2) + 7]
    with pytest.raises(TraceError, match="damaged"):
        ranks_of(cut)
    found = ranks_of(cut, lenient=True)
    assert found[0].dropped_events == 1
    assert 2 <= len(found[0].events.of_kind(Kind.STEP)) < STEPS


def test_ticks_of_one_cycle_are_one_moment() -> None:
    cycles = [{"ph": "i", "name": "CYCLE_START", "ts": ts, "s": "g"} for ts in (0, 1000, 2000, 3000)]
    events = [
        *cycles,
        *reduction(1, 1100, {0: 1100, 1: 1900, 2: 2500}),
        *reduction(1, 3100, {1: 3200, 0: 3300}),
    ]
    ranks = ranks_of(timeline(*events))
    asked = [one.events.of_kind(Kind.COLLECTIVE).enqueue_ns - 1_790_000_000_000_000_000 for one in ranks]
    assert [one.tolist() for one in asked] == [[1_000_000, 3_000_000], [1_000_000, 3_000_000], [2_000_000]]


def test_tensors_reduced_as_one_are_one_collective_that_a_rank_asks_for_with_its_last() -> None:
    first, second = reduction(1, 0, {0: 0, 1: 30}), reduction(2, 5, {0: 5, 1: 20}, shape="[2, 5, 5]")
    fused = [*first[:4], *second[:4], first[4], second[4], *first[5:], *second[5:]]
    apart = [*reduction(1, 500, {0: 500, 1: 510}), *reduction(2, 700, {0: 700, 1: 710}, shape="[2, 5, 5]")]
    begun = 1_790_000_000_000_000_000
    rows = [one.events.of_kind(Kind.COLLECTIVE) for one in ranks_of(timeline(*fused, *apart))]
    assert rows[0].size_bytes.tolist() == [300, 100, 200]
    assert (rows[0].enqueue_ns - begun).tolist() == [5_000, 500_000, 700_000]
    assert (rows[1].enqueue_ns - begun).tolist() == [30_000, 510_000, 710_000]
    assert rows[0].bucket.tolist() == [0, 0, 1]
    assert set(rows[0].algorithm.tolist()) == {"nccl"}


def test_a_rank_that_did_not_ask_takes_no_part() -> None:
    events = [*reduction(1, 0, {0: 0, 1: 5, 2: 9}), *reduction(1, 500, {0: 500, 2: 510})]
    assert [len(one.events.of_kind(Kind.COLLECTIVE)) for one in ranks_of(timeline(*events))] == [2, 1, 2]


def test_steps_whose_tensors_come_in_another_order() -> None:
    orders = [(1, 2, 3), (2, 1, 3), (3, 1, 2), (1, 2, 3)]
    events: list[Any] = []
    for number, order in enumerate(orders):
        for place, pid in enumerate(order):
            at = number * 10_000 + place * 500
            events += reduction(pid, at, {0: at, 1: at + 10})
    events += reduction(4, 50_000, {0: 50_000, 1: 50_010})  # once, as a metric of an epoch
    rows = ranks_of(timeline(*events))[0].events.of_kind(Kind.COLLECTIVE)
    assert rows.step.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_a_last_step_that_lacks_tensors_is_none() -> None:
    events = [
        event
        for at in (0, 1000, 2000)
        for pid in (1, 2)
        for event in reduction(pid, at + 200 * pid, {0: at, 1: at})
    ]
    found = ranks_of(timeline(*events, *reduction(1, 3000, {0: 3000, 1: 3000})))[0]
    assert len(found.events.of_kind(Kind.STEP)) == 3
    assert found.events.of_kind(Kind.COLLECTIVE).step.tolist() == [0, 0, 1, 1, 2, 2, -1]


def test_without_repetition_everything_is_one_step() -> None:
    found = ranks_of(timeline(*reduction(1, 0, {0: 0}), *reduction(2, 500, {0: 500})))
    assert [one.rank for one in found] == [0]
    assert found[0].world_size is None
    assert ONE_STEP in found[0].notes
    assert len(found[0].events.of_kind(Kind.STEP)) == 1


def test_a_timeline_without_a_beginning_has_times_of_its_own() -> None:
    (found,) = ranks_of(timeline(*reduction(1, 7, {0: 7}), begin_us=None))
    assert not found.absolute
    assert found.events.start_ns.min() == 7000


def test_the_end_of_what_began_before_the_recording_is_passed_over() -> None:
    rest = [
        {"ph": "E", "ts": 1, "pid": 1},
        {"ph": "X", "name": "1", "ts": 2, "pid": 2},
        {"ph": "E", "ts": 3, "pid": 2},
    ]
    found = ranks_of(timeline(*rest, *reduction(1, 10, {0: 10, 1: 11})))
    assert len(found[0].events.of_kind(Kind.COLLECTIVE)) == 1


def test_barriers_and_other_collectives() -> None:
    def other(kind: str, at: int) -> list[Any]:
        return [{**one, "name": one["name"].replace("ALLREDUCE", kind)} if "name" in one else one
                for one in reduction(1, at, {0: at, 1: at + 5})]  # fmt: skip

    events = [
        *other("ALLGATHER", 0),
        *other("REDUCESCATTER", 1000),
        *other("ALLTOALL", 2000),
        *other("BARRIER", 3000)[:4],
    ]
    rows = ranks_of(timeline(*events))[1].events.of_kind(Kind.COLLECTIVE)
    assert rows.name.tolist() == ["all_gather", "reduce_scatter", "all_to_all", "barrier"]
    assert rows.size_bytes.tolist() == [100, -1, -1, -1]  # of the middle two, rank 0's output is a share
    assert rows.duration_ns.tolist()[-1] == 0


@pytest.mark.parametrize(
    "shape",
    ["[" + "9" * 400 + "]", "[" + ", ".join(["99999"] * 40) + "]", "x" * 10_000, "", "[-4]", 7, None, ["4"]],
)
def test_sizes_that_cannot_be_are_not_told(shape: Any) -> None:
    events = reduction(1, 0, {0: 0})
    events[-1]["args"]["shape"] = shape
    (found,) = ranks_of(timeline(*events))
    assert found.events.of_kind(Kind.COLLECTIVE).size_bytes.tolist()[0] in (-1, 4, 16)


def test_a_document_that_tells_of_more_ranks_than_it_can_is_bounded() -> None:
    many = {rank: rank for rank in range(0, 99_000, 3)}
    events = reduction(1, 0, many)
    for number in range(1500):
        events += reduction(1, 200_000 + 400 * number, {})
    data = timeline(*events, {"ph": "X", "name": "9" * 5000, "ts": 1, "pid": 1})
    begun = time.process_time()
    found = ranks_of(data)
    assert time.process_time() - begun < 60
    assert 1 <= len(found) < len(many)
    assert sum(len(one.events) for one in found) < 100 * (len(data) // 50 + 10_000)
    assert any("ranks were kept" in note for note in found[0].notes)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[", b"[]", b"{}", b"null", b"[1]", b"[[[[", b"[" * 100_000, b"[" + b'{"args":' * 100_000,
        b"[" + b"{" * 1_000_000, b'[{"ph": "B", "name": "' + b"x" * 1_000_000,
        b'[{"ph": "B", "ts": ' + b"9" * 100_000 + b"}]", b"\xff\xfe", timeline(),
        timeline({"ph": "E", "ts": 4, "pid": 1}), timeline(*reduction(1, 5, {0: 5})[:3]),
    ],
)  # fmt: skip
def test_what_holds_nothing_is_refused_on_one_line(data: bytes) -> None:
    for lenient in (False, True):
        message = refused(partial(ranks_of, data, lenient=lenient))
        assert message
        assert "\n" not in message


@pytest.mark.parametrize("ts", [-1, None, "7", 1e300, 10**25, float("nan"), float("inf"), [], {}, True])
def test_wrong_times_are_refused_or_counted(ts: Any) -> None:
    events = [
        *reduction(1, 0, {0: 0, 1: 3}),
        *reduction(1, 500, {0: 500, 1: 503}),
        *reduction(2, 900, {0: 900, 1: 903}),
    ]
    events[-2] = {**events[-2], "ts": ts}
    with pytest.raises(TraceError, match="damaged"):
        ranks_of(timeline(*events))
    found = ranks_of(timeline(*events), lenient=True)
    assert found[0].dropped_events >= 1
    assert len(found[0].events.of_kind(Kind.COLLECTIVE)) == 2


def test_names_from_outside_stay_what_they_are() -> None:
    data = timeline(*reduction(1, 0, {0: 0}), *reduction(1, 500, {0: 500}))
    named = data.replace(b'"tensor 1"', json.dumps("<script>\x00\x1b[31m").encode())
    assert set(ranks_of(named)[0].events.of_kind(Kind.GRADIENT_READY).name.tolist()) == {
        "<script>\x00\x1b[31m"
    }


ANY = settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
SMALL = small()


@ANY
@given(st.data(), st.booleans())
def test_changed_bytes_are_refused_or_read(data: st.DataObject, lenient: bool) -> None:
    which = data.draw(st.sampled_from(TIMELINES))
    refused(partial(ranks_of, damaged_bytes(data, fixture(which)), lenient=lenient))


@ANY
@given(changed_events(SMALL), st.booleans())
def test_changed_events_are_refused_or_read(events: list[Any], lenient: bool) -> None:
    refused(partial(ranks_of, json.dumps(events).encode(), lenient=lenient))


@ANY
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.dictionaries(st.integers(0, 3), st.integers(0, 50), max_size=4)),
        min_size=1, max_size=30,
    )
)  # fmt: skip
def test_collectives_in_any_order_are_those_of_all_that_asked(rows: list[tuple[int, dict[int, int]]]) -> None:
    events: list[Any] = []
    asked: Counter[int] = Counter()
    for number, (pid, arrivals) in enumerate(rows):
        at = 1000 * number
        events += reduction(pid, at, {rank: at + ts for rank, ts in arrivals.items()})
        asked.update(list(arrivals))
    cached = sum(not arrivals for _, arrivals in rows)
    for one in ranks_of(timeline(*events)):
        own = one.events.of_kind(Kind.COLLECTIVE)
        assert one.rank is not None
        assert len(own) == asked[one.rank] + cached
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(own))
        assert (own.enqueue_ns <= own.start_ns).all()
