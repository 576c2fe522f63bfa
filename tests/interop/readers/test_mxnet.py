import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interop.readers.changed_events import changed_events
from tests.interop.readers.damaging import ODD_VALUES, damaged_bytes, refused

from headway.errors import TraceError
from headway.interop.readers import mxnet
from headway.interop.readers.foreign import Document, ForeignRank
from headway.interop.readers.formats import SNIFFED_BYTES
from headway.interop.readers.mxnet.reader import NO_KEYS, NO_NAMES, SERVER, TOGETHER
from headway.interop.readers.mxnet.steps import DERIVED, SINGLE
from headway.trace.events import Events, Kind, Stream

FIXTURES = (
    Path(__file__).parent / "fixtures" / "mxnet"
)  # see make.py there for the jobs that these facts are of
KEYS = {"gluon": 4, "module": 4}
STEPS = {"gluon": 3, "module": 2, "horovod": 3}
SLEEP_NS = 40_000_000
MARKS = 1_000_000
BEGIN_US = 1_790_000_000_000_000


def fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


def rank_of(
    data: bytes, name: str = "worker3.json", *, lenient: bool = False, ending: str = ""
) -> ForeignRank:
    reading = mxnet.read(Document(name, data, ending, lenient))
    assert not reading.companions
    (found,) = reading.ranks
    check_columns(found.events)
    return found


def check_columns(events: Events) -> None:
    assert (events.duration_ns >= 0).all()
    assert (np.diff(events.start_ns) >= 0).all()
    steps = events.of_kind(Kind.STEP)
    assert (steps.end_ns[:-1] <= steps.start_ns[1:]).all()
    assert steps.step.tolist() == list(range(len(steps)))
    waits = events.of_kind(Kind.WAIT)
    assert set(waits.step.tolist()) <= set(steps.step.tolist())
    for one in steps:
        own = waits.of_step(one.step)
        assert not len(own) or one.start_ns <= own.start_ns.min() <= own.end_ns.max() <= one.end_ns


def read(name: str) -> ForeignRank:
    return rank_of(fixture(name), name)


def a_step(events: Events) -> Counter[str]:
    counts = {tuple(sorted(Counter(events.of_step(step).kind.tolist()).items()))
              for step in events.of_kind(Kind.STEP).step.tolist()}  # fmt: skip
    assert counts, "steps"
    return Counter(dict(min(counts)))


def small() -> list[Any]:
    """A part of a profile that has operators, calls and marks."""
    events = json.loads(fixture("module/worker0.json"))["traceEvents"]
    calls = [event for event in events if event.get("cat") == "MXNET_C_API" and event["ph"] != "C"]
    others = [event for event in events if event.get("cat") != "MXNET_C_API" and event["ph"] not in "be"]
    marks = [event for event in events if event["name"] == "step"]
    return [*others, *marks, *calls[:40]]


def spans(
    *rows: tuple[str, float, float], process: str = "cpu/0", begin: str = "B", end: str = "E"
) -> list[Any]:
    """Pairs of events, from names, starts and durations in milliseconds."""
    events: list[Any] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": process}}]
    for name, start_ms, duration_ms in rows:
        common = {
            "name": name,
            "cat": "operator" if process == "cpu/0" else process,
            "pid": process,
            "tid": 7,
        }
        events.append({**common, "ph": begin, "ts": BEGIN_US + round(start_ms * 1000)})
        events.append({**common, "ph": end, "ts": BEGIN_US + round((start_ms + duration_ms) * 1000)})
    return events


def profile(*events: list[Any]) -> bytes:
    return json.dumps({"traceEvents": [event for part in events for event in part]}).encode()


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_profiles_are_recognised(path: Path) -> None:
    assert mxnet.recognises(path.name, path.read_bytes()[:SNIFFED_BYTES])


@pytest.mark.parametrize(
    "head",
    [
        b'{"schemaVersion": 1, "baseTimeNanoseconds": 17, "traceEvents": [{"ph": "M", "name": "process_name",'
        b'"args": {"name": "cpu/0"}}',
        b'{"displayTimeUnit":"ns","metadata":{"highres-ticks":true}, "traceEvents":[{"ph":"M","name":"process_name",'
        b'"args":{"name":"cpu/0"}}',
        b'{"traceEvents": [{"name": "process_name", "ph": "M", "args": {"name": "python"}}',
        b'[{"name": "process_name", "args": {"name": "cpu/0"}}]',
        b"",
        b"\x1f\x8b\x00",
    ],
)
def test_other_documents_are_not_recognised(head: bytes) -> None:
    assert not mxnet.recognises("worker0.json", head)


@pytest.mark.parametrize(("job", "worker"), [("gluon", 0), ("gluon", 1), ("module", 0), ("module", 1)])
def test_a_worker_pushes_and_pulls_each_key_once_a_step(job: str, worker: int) -> None:
    found = read(f"{job}/worker{worker}.json")
    assert (found.framework, found.role, found.rank, found.backend) == ("mxnet", "worker", worker, "kvstore")
    assert found.absolute
    assert found.events.start_ns.min() > 10**18
    assert len(found.events.of_kind(Kind.STEP)) == STEPS[job]
    counts = a_step(found.events)
    assert counts[Kind.PUSH] == counts[Kind.PULL] == KEYS[job]
    assert (
        counts[Kind.FORWARD] == {"gluon": 7, "module": 1}[job]
    )  # operators of Gluon; one bulk with names of Module
    assert counts[Kind.BACKWARD] == 1
    communication = found.events.of_kind(Kind.PUSH, Kind.PULL)
    assert set(communication.stream.tolist()) == {Stream.COMMUNICATION}
    assert set(communication.algorithm.tolist()) == {"push_pull"}
    assert NO_KEYS in found.notes
    assert TOGETHER in found.notes


def test_a_push_that_is_also_a_pull_ends_where_the_pull_does() -> None:
    events = read("gluon/worker0.json").events
    pushes, pulls = ({row.sequence: row for row in events.of_kind(kind)} for kind in (Kind.PUSH, Kind.PULL))
    assert set(pushes) == set(pulls)
    for sequence, push in pushes.items():
        assert push.end_ns == pulls[sequence].end_ns == pulls[sequence].start_ns
        assert push.duration_ns > 0


@pytest.mark.parametrize("job", ["gluon", "module", "horovod"])
def test_what_has_one_number_is_one_exchange_on_all_workers(job: str) -> None:
    """None is done before all workers have begun it; on one machine, that has one clock, all are done together."""
    kind = Kind.COLLECTIVE if job == "horovod" else Kind.PUSH
    both = [
        {row.sequence: row for row in read(f"{job}/worker{worker}.json").events.of_kind(kind)}
        for worker in (0, 1)
    ]
    assert len(both[0]) == 4 * STEPS[job]
    assert set(both[0]) == set(both[1])
    for sequence, row in both[0].items():
        other = both[1][sequence]
        assert max(row.start_ns, other.start_ns) < min(row.end_ns, other.end_ns)
        assert abs(row.end_ns - other.end_ns) < 1_000_000


def test_the_worker_that_slept_is_late_and_the_other_waits() -> None:
    prompt, late = (read(f"gluon/worker{worker}.json").events for worker in (0, 1))

    def first_push_ns(events: Events, step: int) -> int:
        return int(events.of_step(step).of_kind(Kind.PUSH).start_ns.min())

    lateness = [first_push_ns(late, step) - first_push_ns(prompt, step) for step in range(3)]
    assert int(np.argmax(lateness)) == 1
    assert lateness[1] > SLEEP_NS * 0.9
    waited = [int(prompt.of_step(step).of_kind(Kind.WAIT).duration_ns.sum()) for step in range(3)]
    assert waited[1] > SLEEP_NS * 0.9
    assert max(waited[0], waited[2]) < SLEEP_NS / 4


def test_steps_follow_each_other_and_hold_forward_backward_and_push_in_this_order() -> None:
    found = read("gluon/worker1.json")
    assert DERIVED in found.notes
    steps = found.events.of_kind(Kind.STEP)
    assert (steps.end_ns[:-1] == steps.start_ns[1:]).all()
    for number in range(3):
        own = found.events.of_step(number)
        forward, backward, push = (own.of_kind(kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.PUSH))
        assert forward.end_ns.max() <= backward.start_ns.min() < push.start_ns.min()
        assert forward.name.tolist()[0] == "FullyConnected"


def test_marked_steps_are_taken_as_they_are_and_only_where_the_profiler_ran() -> None:
    found = read("module/worker0.json")
    marks = [e for e in json.loads(fixture("module/worker0.json"))["traceEvents"] if e["name"] == "step"]
    assert [one["ph"] for one in marks] == ["b", "e"] * 3
    steps = found.events.of_kind(Kind.STEP)
    assert steps.start_ns.tolist() == [one["ts"] * 1000 for one in marks[2::2]]
    assert steps.end_ns.tolist() == [one["ts"] * 1000 for one in marks[3::2]]
    assert not any("step" in note and "mark" in note.lower() for note in found.notes)


def test_reading_data_is_input() -> None:
    events = read("module/worker1.json").events
    assert events.of_kind(Kind.INPUT).step.tolist() == [0, 1]
    assert set(events.of_kind(Kind.INPUT).name.tolist()) == {"MXDataIterNext"}


@pytest.mark.parametrize(
    ("name", "rank", "sums", "updates"),
    [  # with two workers, each key (or share of one) is added up once a step
        ("gluon/rank0_server.json", 0, 12, 12),
        ("module/rank0_server.json", 0, 8, 8),
        ("two_servers/rank0_server.json", 0, 6, 0),
        ("two_servers/rank1_server.json", 1, 2, 0),
    ],
)
def test_a_server_sums_and_updates(name: str, rank: int, sums: int, updates: int) -> None:
    found = read(name)
    assert (found.role, found.rank, found.notes) == ("server", rank, [SERVER])
    counts = Counter(found.events.kind.tolist())
    assert (counts[Kind.SUM], counts[Kind.OPTIMIZER], counts[Kind.STEP]) == (sums, updates, 0)
    assert set(found.events.stream.tolist()) == {Stream.COMPUTE}
    assert set(found.events.step.tolist()) == {-1}


def test_a_server_is_told_by_what_it_does_whatever_its_name() -> None:
    assert rank_of(fixture("gluon/rank0_server.json"), "profile.json").role == "server"
    assert rank_of(fixture("gluon/worker0.json"), "rank0_server.json").role == "worker"


def test_a_server_sums_a_key_after_the_first_worker_and_before_the_last_is_answered() -> None:
    server = read("gluon/rank0_server.json").events.of_kind(Kind.SUM)
    for worker in (0, 1):
        pushes = read(f"gluon/worker{worker}.json").events.of_kind(Kind.PUSH)
        ends_ns = np.sort(pushes.end_ns)
        assert len(ends_ns) == len(server)
        assert (server.end_ns <= ends_ns).all()
        assert (server.start_ns[::4] > pushes.start_ns[::4]).all()


def test_push_and_pull_apart() -> None:
    found = read("two_servers/worker0.json")
    counts = a_step(found.events)
    assert (counts[Kind.PUSH], counts[Kind.PULL]) == (6, 6)  # three keys, two steps
    assert SINGLE in found.notes
    assert TOGETHER not in found.notes
    pulls = found.events.of_kind(Kind.PULL)
    assert (pulls.duration_ns > 0).all()
    assert set(pulls.sequence.tolist()) == {-1}
    assert set(pulls.name.tolist()) == {"KVStoreDistDefaultStoragePull"}


def test_what_horovod_reduces_is_collective() -> None:
    found = read("horovod/worker1.json")
    assert (found.backend, found.rank) == ("horovod", 1)
    counts = a_step(found.events)
    assert (counts[Kind.COLLECTIVE], counts[Kind.PUSH], counts[Kind.OPTIMIZER]) == (4, 0, 1)
    rows = found.events.of_kind(Kind.COLLECTIVE)
    assert set(rows.name.tolist()) == {"all_reduce"}
    assert set(rows.group.tolist()) == {"horovod"}
    assert (rows.enqueue_ns == rows.start_ns).all()
    assert sorted(rows.bucket.tolist()) == sorted([*range(4)] * 3)
    assert NO_NAMES in found.notes
    updates = found.events.of_kind(Kind.OPTIMIZER)
    assert all(rows.of_step(one.step).end_ns.max() <= one.start_ns for one in updates)


def test_a_document_of_a_killed_process_has_no_end_and_is_whole_all_the_same() -> None:
    data = fixture("killed/worker0.json")
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(data)
    found = rank_of(data)
    assert Counter(found.events.kind.tolist())[Kind.PUSH] == 6
    assert found.dropped_events == 0
    assert any("not closed" in note for note in found.notes)


def test_a_document_of_which_the_end_is_cut_off() -> None:
    data = fixture("gluon/worker0.json")
    cut = data[: data.rindex(b'"ph": "E"')]  # in the end of an operator
    with pytest.raises(TraceError, match="damaged"):
        rank_of(cut)
    found = rank_of(cut, lenient=True)
    assert found.dropped_events == 2  # half of the event, and the operator
    assert Counter(found.events.kind.tolist())[Kind.PUSH] == 11  # of 12
    assert any("could not be read" in note for note in found.notes)


def test_a_truncated_archive_is_reported() -> None:
    with pytest.raises(TraceError, match="truncated"):
        rank_of(fixture("gluon/worker0.json"), ending="the compressed file is truncated")
    assert len(rank_of(fixture("gluon/worker0.json"), ending="truncated", lenient=True).events)


def test_events_in_the_order_of_time_are_paired_too() -> None:
    document = json.loads(fixture("gluon/worker0.json"))
    document["traceEvents"].sort(key=lambda event: event.get("ts", 0))
    whole, found = rank_of(fixture("gluon/worker0.json")), rank_of(json.dumps(document).encode())
    assert Counter(found.events.kind.tolist())[Kind.PUSH] == 12
    assert (
        found.events.of_kind(Kind.STEP).start_ns.tolist() == whole.events.of_kind(Kind.STEP).start_ns.tolist()
    )
    assert found.dropped_events == 0


ODD_TIMES: tuple[Any, ...] = (float("nan"), float("inf"), -5, 10**30, None, "1", [])
FORWARD, PUSH = ("FullyConnected", 0.0, 1.0), ("KVStoreDistDefaultStoragePushPull", 2.0, 3.0)


def test_a_pull_that_reaches_into_the_next_forward_does_not_cut_it() -> None:
    """The next step's forward begins while the step's last parameters are still on their way."""
    step = [
        FORWARD,
        ("_backward_FullyConnected", 1.0, 1.0),
        PUSH,
        ("KVStoreDistDefaultStoragePushPull", 2.1, 8.4),
    ]
    rows = [(name, start + 10 * number, length) for number in range(3) for name, start, length in step]
    events = rank_of(profile(spans(*rows))).events
    steps = events.of_kind(Kind.STEP)
    assert ((steps.start_ns - BEGIN_US * 1000) / MARKS).tolist() == [0.0, 10.0, 20.0]
    assert events.of_kind(Kind.PUSH).step.tolist() == [0, 0, 1, 1, 2, 2]
    waits = events.of_kind(Kind.WAIT)
    assert ((waits.start_ns - BEGIN_US * 1000) / MARKS).tolist() == [2.0, 12.0, 22.0]
    assert waits.duration_ns.tolist()[:2] == [8 * MARKS, 8 * MARKS]


def test_bulks_are_forward_before_the_last_named_forward_and_backward_after() -> None:
    step = [
        ("ImperativeBulk", 0.0, 1.0),
        ("mean", 1.0, 1.0),
        ("ImperativeBulk", 2.0, 1.0),
        (PUSH[0], 3.0, 1.0),
    ]
    rows = [(name, start + 10 * number, length) for number in range(2) for name, start, length in step]
    events = rank_of(profile(spans(*rows))).events
    assert events.of_kind(Kind.FORWARD).name.tolist() == ["ImperativeBulk", "mean"] * 2
    assert events.of_kind(Kind.BACKWARD).name.tolist() == ["ImperativeBulk"] * 2
    assert events.of_kind(Kind.BACKWARD).step.tolist() == [0, 1]


def test_without_communication_backward_tells_steps() -> None:
    rows = [(name, start + 10 * number, 1.0) for number in range(4)
            for name, start in (("dot", 0.0), ("_backward_dot", 2.0), ("sgd_update", 4.0))]  # fmt: skip
    found = rank_of(profile(spans(*rows)))
    assert len(found.events.of_kind(Kind.STEP)) == 4
    assert a_step(found.events) == {"step": 1, "forward": 1, "backward": 1, "optimizer": 1}
    assert "No communication is recorded." in found.notes


@pytest.mark.parametrize(("begin", "end"), [("b", "e"), ("(", ")"), ("B", "E")])
@pytest.mark.parametrize("name", ["step", "train_step 3", "Iteration", "batch"])
def test_tasks_frames_and_events_with_a_steps_name_mark_steps(name: str, begin: str, end: str) -> None:
    marks = spans(
        (name, 0.0, 4.0), (name, 5.0, 4.0), ("other", 0.0, 99.0), process="mine", begin=begin, end=end
    )
    rows = [(FORWARD[0], start, 1.0) for start in (0.5, 2.5, 5.5, 9.5)]
    events = rank_of(profile(spans(*rows), marks)).events
    steps = events.of_kind(Kind.STEP)
    assert ((steps.start_ns - BEGIN_US * 1000) / MARKS).tolist() == [0.0, 5.0]
    assert events.of_kind(Kind.FORWARD).step.tolist() == [0, 0, 1, -1]


def test_markers_with_a_steps_name_begin_steps() -> None:
    markers = [
        {"name": "step", "cat": "mine", "ph": "n", "pid": 9, "tid": 1, "ts": BEGIN_US + at}
        for at in (0, 5000)
    ]
    events = rank_of(profile(spans(FORWARD, (FORWARD[0], 6.0, 1.0)), markers)).events
    assert events.of_kind(Kind.FORWARD).step.tolist() == [0, 1]
    assert events.of_kind(Kind.STEP).duration_ns.tolist()[0] == 5 * MARKS


def test_of_marks_that_overlap_the_shorter_count() -> None:
    marks = spans(
        ("step", 0.0, 99.0), ("step", 0.0, 4.0), ("step", 5.0, 4.0), process="mine", begin="b", end="e"
    )
    rows = [(FORWARD[0], start, 1.0) for start in (0.5, 5.5)]
    steps = rank_of(profile(spans(*rows), marks)).events.of_kind(Kind.STEP)
    assert (steps.duration_ns / MARKS).tolist() == [4.0, 4.0]


def test_names_that_merely_contain_a_steps_name_mark_nothing() -> None:
    marks = spans(("stepladder", 0.0, 1.0), ("mybatches", 0.0, 1.0), process="mine", begin="b", end="e")
    assert SINGLE in rank_of(profile(spans(FORWARD), marks)).notes


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"{}", b'{"traceEvents": []}', b'{"traceEvents": {}}', b'{"traceEvents": [1]}',
        b"[" * 100_000, b'{"traceEvents": [' + b'{"args":' * 100_000, b'{"traceEvents": [' + b"{" * 1_000_000,
        b'{"traceEvents": [{"ph": "B", "ts": ' + b"9" * 100_000 + b"}]}",
        b'{"traceEvents": [{"name": "' + b"x" * 1_000_000, b"\xff\xfe\x00",
        profile(spans(FORWARD)[:-1]), profile(spans(("x", 0.0, -1.0))),
        *(profile([{**one, "ts": wrong} for one in spans(FORWARD)]) for wrong in ODD_TIMES),
        profile([{**one, "name": None} for one in spans(FORWARD)]),
        profile([{**one, "pid": []} for one in spans(FORWARD)]),
    ],
)  # fmt: skip
def test_what_holds_nothing_is_refused_on_one_line(data: bytes) -> None:
    for lenient in (False, True):
        message = refused(lambda lenient=lenient: rank_of(data, lenient=lenient))  # type: ignore[misc]
        assert message
        assert "\n" not in message


def test_leniently_wrong_events_are_left_out_and_counted() -> None:
    rows = spans(*[(FORWARD[0], float(at), 0.5) for at in range(10)])
    rows[1]["ts"] = -1
    rows[4]["ts"] = 0
    del rows[20]
    with pytest.raises(TraceError, match="no time or after its end"):
        rank_of(profile(rows))
    found = rank_of(profile(rows), lenient=True)
    assert len(found.events.of_kind(Kind.FORWARD)) == 7
    assert found.dropped_events == 3
    assert any(note.startswith("3 events") for note in found.notes)


def test_names_from_outside_stay_what_they_are() -> None:
    name = '<script>\x00\x1b[31m"'
    events = rank_of(profile(spans((name, 0.0, 1.0)))).events
    assert events.of_kind(Kind.FORWARD).name.tolist() == [name]


ANY = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SMALL = small()


@ANY
@given(st.data(), st.booleans())
def test_changed_bytes_are_refused_or_read(data: st.DataObject, lenient: bool) -> None:
    which = data.draw(st.sampled_from(["two_servers/rank1_server.json", "killed/worker0.json"]))
    refused(partial(rank_of, damaged_bytes(data, fixture(which)), lenient=lenient))


@ANY
@given(changed_events(SMALL), st.booleans())
def test_changed_events_are_refused_or_read(events: list[Any], lenient: bool) -> None:
    refused(partial(rank_of, profile(events), lenient=lenient))


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("field", ["ph", "ts", "name", "pid", "tid", "cat", "args"])
def test_odd_values_cost_at_most_what_holds_them(field: str, value: Any) -> None:
    events = list(SMALL)
    picked = next(
        index for index, event in enumerate(events) if event.get("cat") == "operator" and event["ph"] == "B"
    )
    events[picked] = {**events[picked], field: value}
    refused(partial(rank_of, profile(events)))
    found = rank_of(profile(events), lenient=True)
    assert abs(len(found.events) - len(rank_of(profile(SMALL)).events)) <= 3


@ANY
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dot", "_backward_dot", "ImperativeBulk", PUSH[0], "KVStoreDistDefaultPush", "sgd_update",
                             "KVStoreDistDefaultStoragePull", "horovod_allreduce", "DeleteVariable", "BinaryOpKernel"]),
            st.integers(0, 60),
            st.integers(0, 20),
        ),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_operators_in_any_order_make_steps_that_hold_them(rows: list[tuple[str, int, int]]) -> None:
    found = rank_of(profile(spans(*rows)))
    counts = Counter(found.events.kind.tolist())
    assert counts[Kind.PUSH] == sum("Push" in name for name, _, _ in rows)
    assert counts[Kind.COLLECTIVE] == sum(name == "horovod_allreduce" for name, _, _ in rows)
    if found.role == "worker":
        assert counts[Kind.STEP] >= 1
        steps = found.events.of_kind(Kind.STEP)
        for kind in (Kind.PUSH, Kind.COLLECTIVE):
            own = found.events.of_kind(kind)
            inside = own.where(own.step >= 0)
            assert (inside.start_ns >= steps.start_ns[inside.step]).all()
            assert (inside.start_ns < steps.end_ns[inside.step]).all()
