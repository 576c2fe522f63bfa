"""Profiles of MXNet workers and servers that were recorded."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headway.errors import TraceError
from headway.interop.readers.foreign import ForeignRank
from headway.interop.readers.formats import SNIFFED_BYTES
from headway.trace.events import Events, Kind, Stream
from headway_readers import mxnet
from headway_readers.mxnet.reader import NO_KEYS, NO_NAMES, SERVER, TOGETHER
from headway_readers.mxnet.steps import DERIVED, SINGLE
from mxnet_files import FIXTURES, a_step, fixture, rank_of

KEYS = {"gluon": 4, "module": 4}


STEPS = {"gluon": 3, "module": 2, "horovod": 3}


SLEEP_NS = 40_000_000


def read(name: str) -> ForeignRank:
    return rank_of(fixture(name), name)


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
