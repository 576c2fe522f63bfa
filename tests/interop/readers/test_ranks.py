"""Who is who among recordings, which are made up here."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interop.readers.kineto_documents import document, job_events

from headway.errors import TraceError
from headway.interop.readers.foreign import ForeignRank
from headway.interop.readers.importing import Imported, import_trace
from headway.interop.readers.ranks import rank_in_name, settle
from headway.trace.events import Events, Kind, Stream
from headway.trace.format import MAX_WORLD_SIZE

HOUR_NS = 3_600 * 10**9


def recording(
    source: str, *, begin_ns: int = 0, steps: range = range(1, 4), rows: int = 1, **more: Any
) -> ForeignRank:
    """One recording: steps of a second, of ``rows`` events each."""
    step = np.repeat(np.array(steps, dtype=np.int64), rows)
    start_ns = begin_ns + (np.repeat(np.arange(len(steps)), rows) * 10**9)
    events = Events.from_columns(
        kind=Kind.STEP, stream=Stream.COMPUTE, start_ns=start_ns, step=step, duration_ns=10**9
    )
    return ForeignRank(source, "pytorch", events, **{"absolute": True, **more})


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank0.json", 0), ("trace_rank-17.json.gz", 17), ("RANK_3.json", 3), ("r/global_rank5.pt.trace.json", 5),
        ("worker12.json", 12), ("rank7/trace.json", 7), ("job3/rank.2/trace.json", 2), ("a.zip:rank4/trace.json", 4),
        ("0.json", 0), ("12_trace.json", 12), ("nccl_trace_rank_8", 8), ("task-1.xplane.pb", 1),
        ("host3_1234.1700000000.pt.trace.json", None), ("trace.json", None), ("frank3.json", None),
        ("kineto_nccl_128ranks_rank1.json.gz", 1), ("kineto_rccl_mi300_rank0of8.json.gz", 0),
        ("rank12345678.json", None), ("step5.json", None), ("", None),
        ("replica1_rank2.json", 2), ("rank3/worker1.json", 1),
    ],
)  # fmt: skip
def test_ranks_in_names(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def test_what_recordings_say_counts_for_more_than_their_names() -> None:
    job = settle(
        [recording("rank0.json", rank=1, world_size=4), recording("rank1.json", rank=0, world_size=4)]
    )
    assert {rank: one.source for rank, one in job.workers.items()} == {0: "rank1.json", 1: "rank0.json"}
    assert job.world_size == 4
    assert not job.notes


def test_names_and_then_their_order_tell_ranks() -> None:
    job = settle(
        [recording("rank1.json"), recording("b.json"), recording("a/rank3/t.json"), recording("c.json")]
    )
    assert {rank: one.source for rank, one in sorted(job.workers.items())} == {
        0: "b.json", 1: "rank1.json", 2: "c.json", 3: "a/rank3/t.json",
    }  # fmt: skip
    assert job.notes == [
        "The rank of 2 workers is in neither contents nor names: they are numbered by file name."
    ]
    alone = settle([recording("trace.json")])
    assert (list(alone.workers), alone.world_size, alone.notes) == ([0], 1, [])


def test_several_ranks_in_one_document_are_numbered_in_order() -> None:
    job = settle([recording("rank5.json"), recording("rank5.json")])
    assert list(job.workers) == [0, 1]


def test_one_rank_of_many() -> None:
    job = settle([recording("x", rank=34, world_size=300)])
    assert (list(job.workers), job.world_size) == ([34], 300)
    job = settle([recording("rank9.json")])
    assert (list(job.workers), job.world_size) == ([9], 10)


@pytest.mark.parametrize("more", [{"world_size": 10**9}, {"rank": -3, "world_size": 2**70}])
def test_worlds_that_cannot_be(more: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="rank out of range"):
        settle([recording("x", **more)])


def test_ranks_that_cannot_be_count_as_untold() -> None:
    job = settle([recording("a", rank=MAX_WORLD_SIZE), recording("b", rank=-1)])
    assert list(job.workers) == [0, 1]


def test_a_rank_that_is_there_twice() -> None:
    found = [recording("a.json", rank=1), recording("b.json", rank=1, rows=3), recording("c.json", rank=0)]
    with pytest.raises(
        TraceError, match=r"2 recordings claim rank 1; got a\.json, b\.json; expected one recording"
    ):
        settle(found)
    job = settle(found, lenient=True)
    assert {rank: one.source for rank, one in sorted(job.workers.items())} == {0: "c.json", 1: "b.json"}
    assert job.notes == ["2 recordings claim rank 1 (a.json, b.json): b.json was kept."]


def test_cycles_of_a_profiler_are_one_recording() -> None:
    cycles = [
        recording(f"{rank}-{cycle}.json", rank=rank, begin_ns=cycle * 30 * 10**9, steps=range(9 * cycle, 9 * cycle + 3),
                  dropped_events=cycle, notes=["both", f"cycle {cycle}"])
        for cycle in (2, 0, 1) for rank in (0, 1)
    ]  # fmt: skip
    job = settle(cycles)
    for one in job.workers.values():
        assert one.events.step.tolist() == [0, 1, 2, 9, 10, 11, 18, 19, 20]
        assert (np.diff(one.events.start_ns) > 0).all()
        assert (one.dropped_events, one.notes) == (3, ["both", "cycle 0", "cycle 1", "cycle 2"])


def test_cycles_repeat_their_operations() -> None:
    def computing(names: list[str], **more: Any) -> ForeignRank:
        one = recording(names[0], rank=0, **more)
        computed = Events.from_columns(
            kind=Kind.FORWARD, stream=Stream.COMPUTE, name=np.array(names, dtype=object),
            start_ns=np.full(len(names), one.events.start_ns[0]),
        )  # fmt: skip
        one.events = Events.concatenated([one.events, computed])
        return one

    later: dict[str, Any] = {"begin_ns": 30 * 10**9, "steps": range(9, 12)}
    job = settle([computing(["a", "b", "c"]), computing(["a", "b", "d"], **later)])
    assert job.workers[0].events.whole_steps == {1, 2, 3, 9, 10, 11}
    with pytest.raises(TraceError, match="2 recordings claim rank 0"):
        settle([computing(["a", "b", "c"]), computing(["x", "y", "c"], **later)])


@pytest.mark.parametrize(
    "more",
    [
        {"begin_ns": 10**9, "steps": range(9, 12)}, {"begin_ns": 30 * 10**9},
        {"absolute": False, "steps": range(9, 12)},
        {"begin_ns": 30 * 10**9, "steps": range(9, 12), "clock": "another"},
    ],
)  # fmt: skip
def test_what_does_not_follow_is_no_cycle(more: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="2 recordings claim rank 0"):
        settle([recording("a", rank=0), recording("b", rank=0, **more)])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"world_size": 8}, r"1 of pytorch on 2 ranks \(a\); 2 of pytorch on 8 ranks \(b\)"),
        (
            {"world_size": 2, "begin_ns": HOUR_NS},
            r"1 of pytorch on 2 ranks \(a\); 2 of pytorch on 2 ranks \(b\)",
        ),
    ],
)
def test_two_jobs(other: dict[str, Any], words: str) -> None:
    found = [
        recording("a", rank=0, world_size=2),
        *(recording(name, rank=rank, **other) for rank, name in enumerate("bc")),
    ]
    with pytest.raises(TraceError, match=rf"recordings of several jobs; got {words}"):
        settle(found)
    job = settle(found, lenient=True)
    assert [one.source for one in job.workers.values()] == ["b", "c"]
    assert job.world_size == other["world_size"]
    assert "kept: 2 of pytorch" in job.notes[0]


def test_a_recording_that_does_not_tell_its_world_belongs_to_the_only_job() -> None:
    job = settle([recording("rank0.json", rank=0, world_size=2), recording("rank1.json")])
    assert (sorted(job.workers), job.world_size) == ([0, 1], 2)


def test_servers_are_counted_by_themselves() -> None:
    found = [
        recording("worker0.json"), recording("rank0_server.json", role="server"), recording("worker1.json"),
        recording("rank1_server.json", role="server"),
    ]  # fmt: skip
    job = settle(found)
    assert (sorted(job.workers), sorted(job.servers), job.world_size) == ([0, 1], [0, 1], 2)
    with pytest.raises(TraceError, match=r"no recording of a worker; got 2 recordings of servers"):
        settle([one for one in found if one.role == "server"])


def test_servers_stay_with_their_workers_when_jobs_are_mixed() -> None:
    found = [
        recording("rank0.json", rank=0, world_size=2), recording("rank1.json", rank=1, world_size=2),
        recording("server.json", role="server"), recording("other.json", rank=0, world_size=2, begin_ns=HOUR_NS),
    ]  # fmt: skip
    job = settle(found, lenient=True)
    assert (sorted(job.workers), sorted(job.servers)) == ([0, 1], [0])


def imported(folder: Path, files: dict[str, bytes], *, lenient: bool = False) -> Imported:
    for name, data in files.items():
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return import_trace(folder / "in", folder / "out", lenient=lenient)


def test_ranks_of_whole_documents(tmp_path: Path) -> None:
    files = {
        "x.json": document(job_events(), rank=3, world=5), "1.json.gz": document(job_events(), rank=1, world=5),
        "0/a.json": document(job_events(), rank=0, world=5),
    }  # fmt: skip
    manifest = imported(tmp_path, files).manifest
    assert [info.rank for info in manifest.ranks] == [0, 1, 3]
    assert manifest.world_size == 5
    assert "2 of 5 ranks are not in this trace." in manifest.notes
    assert [Path(info.source).name for info in manifest.ranks] == ["a.json", "1.json.gz", "x.json"]


def test_cycles_of_whole_documents(tmp_path: Path) -> None:
    files = {
        f"host_{rank}.{cycle}.pt.trace.json": document(
            job_events((10 * cycle, 10 * cycle + 1), shift_us=10**7 * cycle), rank=rank
        )
        for rank in (0, 1)
        for cycle in (1, 2)
    }
    assert imported(tmp_path, files).manifest.steps == (10, 11, 20, 21)


def test_ranks_without_a_step_in_common(tmp_path: Path) -> None:
    files = {f"rank{rank}.json": document(job_events((rank, rank + 5)), rank=rank) for rank in (0, 1)}
    with pytest.raises(TraceError, match=r"the ranks share no step; got \{0: \[0, 5\], 1: \[1, 6\]\}"):
        imported(tmp_path, files)
    assert not (tmp_path / "out").exists()
