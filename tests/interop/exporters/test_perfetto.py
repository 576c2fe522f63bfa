from __future__ import annotations

import gzip
import itertools
import os
import shutil
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interop.exporters.perfetto_file import PerfettoFile, Slice, read
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.diagnosis.communication import match
from headway.diagnosis.links import sent_volumes
from headway.errors import UserError
from headway.interop.exporters import packets, perfetto
from headway.interop.exporters.perfetto import MARK, write_perfetto
from headway.interop.exporters.rank_tracks import clean, title
from headway.model import ModelSpec
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Manifest, RankInfo, Trace

BIN = (
    os.environ.get("TRACE_PROCESSOR")
    or shutil.which("trace_processor_shell")
    or shutil.which("trace_processor")
)


def _info(rank: int, **fields: object) -> RankInfo:
    values = {"host": f"host{rank}", "pid": 100 + rank, "world_size": 4, "backend": "gloo", "version": "2"}
    return RankInfo.model_validate({"rank": rank, **values, **fields})


def _trace(rows: dict[int, list[Event]], **changes: object) -> Trace:
    manifest = Manifest(world_size=max(rows, default=0) + 1, steps=(0,), ranks=tuple(map(_info, rows)))
    events = {rank: Events.from_rows(own) for rank, own in rows.items()}
    trace = Trace(Path("made"), manifest, ModelSpec(parameters=()), events)
    return replace(trace, **changes)  # type: ignore[arg-type]


def _written(trace: Trace, folder: Path, name: str = "trace.pftrace") -> PerfettoFile:
    path = folder / name
    count = write_perfetto(trace, path)
    found = read(path)
    assert found.packets == count
    assert [one.name for one in folder.iterdir() if one.name.startswith(".")] == []
    return found


def _check(trace: Trace, found: PerfettoFile, origin_ns: int = 0) -> None:
    """The file says what the trace says: every event, its annotations, and the arrows."""
    for rank, events in trace.events.items():
        name = f"rank {rank} "
        drawn = [one for one in found.of_process(name) if one.category != MARK]
        assert Counter(map(_said, drawn)) == Counter(_expected(event, origin_ns) for event in events)
        for one in found.of_process(name):
            assert one.end_ns is not None
            if one.parent is not None and not one.instant:
                assert one.parent.end_ns is not None
                assert one.parent.start_ns <= one.start_ns <= one.end_ns <= one.parent.end_ns
                assert one.track != "network", "communication is not nested"
    _check_arrows(trace, found)


def _said(one: Slice) -> tuple[object, ...]:
    own = {key: value for key, value in one.annotations.items() if key != "last_rank"}
    return one.category, one.name, one.start_ns, one.end_ns, tuple(sorted(own.items()))


def _expected(event: Event, origin_ns: int) -> tuple[object, ...]:
    numbers = {
        "step": event.step, "bytes": event.size_bytes, "bucket": event.bucket, "peer": event.peer,
        "stage": event.stage, "micro_batch": event.micro_batch,
        "sequence": event.sequence,
    }  # fmt: skip
    texts = {"group": clean(event.group), "algorithm": clean(event.algorithm)}
    said: dict[str, object] = {key: value for key, value in numbers.items() if value >= 0}
    said |= {key: text for key, text in texts.items() if text}
    if event.enqueue_ns != -1:
        said["enqueue_ns"] = event.enqueue_ns - origin_ns
    name = str(event.step) if event.kind == Kind.STEP else clean(event.name)
    start, end = event.start_ns - origin_ns, event.end_ns - origin_ns
    return clean(event.kind), title(clean(event.kind), name), start, end, tuple(sorted(said.items()))


def _check_arrows(trace: Trace, found: PerfettoFile) -> None:
    rows = match(trace, messages=True)
    rows = rows.where((rows.kind != Kind.PUSH) & (rows.kind != Kind.PULL))
    spans = [
        (event.start_ns, event.end_ns)
        for _, events in sorted(trace.events.items())
        for event in events.of_kind(Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE)
    ]
    causes: dict[int, int] = {}
    for row, instance in enumerate(rows.instance.tolist()):
        if rows.kind[row] != Kind.RECEIVE and rows.rank[row] == rows.last_rank[row]:
            assert instance not in causes
            causes[instance] = row
    expected: Counter[tuple[str, str, str, str]] = Counter()
    for row, instance in enumerate(rows.instance.tolist()):
        cause = causes.get(instance, row)
        # What was over before its cause began has no arrow.
        if cause != row and spans[cause][0] < max(spans[row][0], spans[row][1]):
            ends = (f"rank {rows.rank[cause]} ", rows.kind[cause], f"rank {rows.rank[row]} ", rows.kind[row])
            expected[ends] += 1
    drawn: Counter[tuple[str, str, str, str]] = Counter()
    for source, target in found.flows:
        if target.category == MARK:
            assert target.start_ns == source.start_ns
            assert target.parent is not None
            target = target.parent
        else:
            assert source.start_ns < target.start_ns
        drawn[_rank(source), source.category, _rank(target), target.category] += 1
        assert source.correlation == target.correlation is not None
    assert drawn == expected


def _rank(one: Slice) -> str:
    return one.process.split("(", maxsplit=1)[0]


JOBS = st.builds(
    SyntheticJob,
    world_size=st.integers(1, 4),
    steps=st.integers(1, 3),
    ranks_a_host=st.integers(1, 4),
    jitter=st.sampled_from([0.0, 0.3]),
    blocking_loss=st.booleans(),
    rest_ms=st.sampled_from([0.0, 0.5]),
    bucket_bytes=st.sampled_from([(), (1000,), (1_000_000, 4), (1_000_000,) * 4]),
    seed=st.integers(0, 9),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=JOBS)
def test_a_job_is_in_the_file_as_it_is_in_the_trace(job: SyntheticJob, tmp_path: Path) -> None:
    trace = synthetic_trace(job)
    found = _written(trace, tmp_path)
    _check(trace, found)
    rows = match(trace)
    several = np.bincount(rows.instance, minlength=1)[rows.instance] > 1 if len(rows) else rows.instance > 0
    assert len(found.flows) == int((several & (rows.rank != rows.last_rank)).sum())
    crossed = {name: _crossed_bytes(steps) for name, steps in found.counters.items()}
    hosts = {rank: f"host{rank // job.ranks_a_host}" for rank in range(job.world_size)}
    apart = len(set(hosts.values())) > 1
    targets = [(rank + 1) % job.world_size for rank in rows.rank.tolist()]
    expected: defaultdict[str, float] = defaultdict(float)
    for rank, target, volume in zip(rows.rank.tolist(), targets, sent_volumes(rows).tolist(), strict=True):
        if volume and hosts[rank] != hosts[target]:
            expected[f"{hosts[rank]} to {hosts[target]}"] += volume
        elif volume and not apart:
            expected[f"within {hosts[rank]}"] += volume
    assert crossed == pytest.approx(expected)


def _crossed_bytes(steps: list[tuple[int, float]]) -> float:
    assert steps[-1][1] == 0.0
    assert all(rate >= 0 for _, rate in steps)
    return sum(rate * (after - at) / 8 for (at, rate), (after, _) in itertools.pairwise(steps))


TEXTS = st.one_of(st.just(""), st.just("all_reduce"), st.text(max_size=4), st.just("\x1b[2J\x00\ud800<b>"))
EVENTS = st.builds(
    Event,
    kind=st.sampled_from([*(value for key, value in vars(Kind).items() if key.isupper()), "odd\n", ""]),
    name=TEXTS,
    stream=st.sampled_from([Stream.COMPUTE, Stream.COMMUNICATION, "gradients ready", "\ud800", ""]),
    step=st.integers(-1, 2),
    start_ns=st.integers(-20, 40),
    duration_ns=st.just(0) | st.integers(1, 12),
    enqueue_ns=st.integers(-20, 40),
    group=TEXTS,
    sequence=st.integers(-1, 2),
    size_bytes=st.sampled_from([-1, 0, 2**62]),
    bucket=st.integers(-1, 1),
    peer=st.integers(-1, 3),
    algorithm=TEXTS,
    stage=st.integers(-1, 1),
    micro_batch=st.integers(-1, 1),
)

MESSAGES = st.builds(
    Event,
    kind=st.sampled_from([Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE]),
    name=st.just("x"),
    stream=st.just(Stream.COMMUNICATION),
    step=st.just(0),
    start_ns=st.integers(0, 12),
    duration_ns=st.integers(0, 6),
    enqueue_ns=st.integers(-1, 12),
    sequence=st.integers(0, 1),
    peer=st.integers(0, 2),
    group=st.just(""),
    size_bytes=st.just(8),
    bucket=st.just(-1),
    algorithm=st.just("ring"),
    stage=st.integers(-1, 1),
    micro_batch=st.integers(-1, 1),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.dictionaries(st.integers(0, 3), st.lists(EVENTS | MESSAGES, max_size=25), max_size=3))
def test_any_events_are_in_the_file(rows: dict[int, list[Event]], tmp_path: Path) -> None:
    trace = _trace(rows)
    _check(trace, _written(trace, tmp_path), perfetto.origin_ns(trace))


def _collective(
    start: int, end: int, sequence: int = 0, enqueue: int = -1, kind: str = Kind.COLLECTIVE
) -> Event:
    return Event(
        kind, "all_reduce", Stream.COMMUNICATION, 0, start, end - start, enqueue, "0", sequence, 4_000_000, 1
    )


def test_the_last_to_come_points_at_who_waited(tmp_path: Path) -> None:
    trace = _trace({0: [_collective(10, 50)], 1: [_collective(30, 50)], 2: [_collective(31, 50, enqueue=29)]})
    found = _written(trace, tmp_path)
    _check(trace, found)
    (to_0, to_2) = sorted(found.flows, key=lambda flow: flow[1].process)
    assert to_0[0] is to_2[0]
    assert to_0[0].process == "rank 1 (host1)"
    assert (to_0[1].category, to_0[1].name, to_0[1].start_ns) == (MARK, "rank 1 came last", 30)
    assert (to_2[1].category, to_2[1].name, to_2[1].start_ns) == (Kind.COLLECTIVE, "all_reduce", 31)
    assert {one.annotations["last_rank"] for one in found.slices if one.category == Kind.COLLECTIVE} == {1}
    assert len({one.correlation for one in found.slices if one.category == Kind.COLLECTIVE}) == 1


def test_a_send_points_at_its_receive_whichever_began_first(tmp_path: Path) -> None:
    def message(kind: str, peer: int, start: int, end: int) -> Event:
        return Event(kind, "", Stream.COMMUNICATION, 0, start, end - start, peer=peer, size_bytes=8)

    send = [message(Kind.SEND, 1, 5, 6), message(Kind.SEND, 1, 20, 25), message(Kind.SEND, 1, 50, 60)]
    receive = [
        message(Kind.RECEIVE, 0, 7, 8), message(Kind.RECEIVE, 0, 9, 26), message(Kind.RECEIVE, 0, 30, 40)
    ]  # fmt: skip
    trace = _trace({0: receive, 1: receive[:0], 2: []} | {0: send, 1: receive})
    found = _written(trace, tmp_path)
    _check(trace, found)
    ends = [(source.start_ns, target.name, target.start_ns) for source, target in found.flows]
    assert ends == [
        (5, "receive", 7),
        (20, "rank 0 sent", 20),
    ]  # the third would have come before it was sent


def test_a_collective_without_counterpart_has_no_arrow(tmp_path: Path) -> None:
    trace = _trace(
        {0: [_collective(0, 5)], 1: [_collective(0, 5, sequence=1), _collective(6, 9, sequence=-1)]}
    )
    found = _written(trace, tmp_path)
    _check(trace, found)
    assert found.flows == []
    assert all(one.correlation is None and "last_rank" not in one.annotations for one in found.slices)
    assert found.counters == {}


def test_overlapping_collectives_lie_on_tracks_beside_each_other(tmp_path: Path) -> None:
    events = [_collective(0, 10, 0), _collective(1, 5, 1), _collective(5, 12, 2), _collective(10, 12, 3)]
    found = _written(_trace({0: events}), tmp_path)
    assert {one.start_ns: one.track for one in found.slices} == {
        0: "network", 1: "network 2", 5: "network 2", 10: "network"
    }  # fmt: skip
    many = [_collective(0, 10, number) for number in range(12)]
    assert {"network", "network 02", "network 12"} <= set(
        _written(_trace({0: many}), tmp_path).tracks.values()
    )


def test_computation_nests_and_zero_lengths_stay(tmp_path: Path) -> None:
    def span(kind: str, name: str, start: int, end: int) -> Event:
        return Event(kind, name, Stream.COMPUTE, 3, start, end - start)

    events = [
        span(Kind.FORWARD, "layer.inner", 0, 10), span(Kind.FORWARD, "layer", 0, 10),
        span(Kind.FORWARD_PASS, "", 0, 10), span(Kind.STEP, "", 0, 20),
        span(Kind.OPERATOR, "", 5, 5), span(Kind.WAIT, "wait broadcast", 10, 10), span(Kind.BACKWARD, "", 10, 12),
        Event(Kind.GRADIENT_READY, "layer.weight", Stream.COMPUTE, 3, 11, 0),
        Event(Kind.GRADIENT_READY, "layer.bias", Stream.COMMUNICATION, 3, 11, 0),
    ]  # fmt: skip
    found = _written(_trace({0: events}), tmp_path)
    _check(_trace({0: events}), found)
    by_name = {one.name: one for one in found.slices}
    path, at = [], by_name["operator"]
    while at.parent is not None:
        at = at.parent
        path.append(at.name)
    assert path == ["forward layer.inner", "forward layer", "forward pass"]
    assert by_name["wait broadcast"].parent is by_name["backward"]
    assert (by_name["step 3"].track, by_name["step 3"].parent) == ("steps", None)
    assert (by_name["layer.weight"].track, by_name["layer.weight"].instant) == ("gradients ready", True)
    assert set(found.tracks.values()) == {"steps", "computation", "gradients ready"}


def test_odd_names_are_escaped_and_cut(tmp_path: Path) -> None:
    event = Event(Kind.OPERATOR, "a\x00b\ud800\n" + "x" * 10**5, Stream.COMPUTE, 0, 0, 1, group="\x1b")
    trace = _trace({0: [event]})
    hosts = (_info(0, host="h\x07" + "y" * 1000, backend="\u202e", pid=-5),)
    trace = replace(trace, manifest=trace.manifest.model_copy(update={"ranks": hosts}))
    found = _written(trace, tmp_path)
    (one,) = found.slices
    assert one.name.startswith("a\\x00b\\ud800\\nxxx")
    assert len(one.name) == 500
    assert one.annotations["group"] == "\\x1b"
    assert one.process.startswith("rank 0 (h\\x07yyy")


def test_missing_ranks_servers_and_shared_process_numbers(tmp_path: Path) -> None:
    push = Event(Kind.PUSH, "w", Stream.COMMUNICATION, 0, 0, 4, peer=0)
    trace = _trace(
        {3: [push], 1: [push], 7: [push]}, servers={0: Events.from_rows([push]), 1: Events.from_rows([])}
    )
    infos = (_info(1, pid=7), _info(3, pid=7))  # 7 has none
    manifest = trace.manifest.model_copy(update={"ranks": infos, "servers": (_info(0, host="s", pid=8),)})
    found = _written(replace(trace, manifest=manifest), tmp_path)
    assert found.order == ["rank 1 (host1)", "rank 3 (host3)", "rank 7", "server 0 (s)", "server 1"]
    assert found.processes["server 0 (s)"] == 8
    assert [one.name for one in found.slices] == ["push w"] * 4


def test_times_are_exact_to_the_ends_of_time(tmp_path: Path) -> None:
    latest = 2**63 - 1
    starts = [0, 1, 127, 128, 2**35 - 1, 2**35, 2**62, latest]
    events = [Event(Kind.OPERATOR, "o", Stream.COMPUTE, 0, start, 0) for start in starts]
    found = _written(_trace({0: events}), tmp_path)
    assert sorted(one.start_ns for one in found.slices) == starts
    beyond = Event(Kind.OPERATOR, "o", Stream.COMPUTE, 0, latest - 1, 10)
    (one,) = _written(_trace({0: [beyond]}), tmp_path).slices
    assert (one.start_ns, one.end_ns) == (latest - 1, latest)


def test_names_are_said_once_and_files_are_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = synthetic_trace(SyntheticJob(steps=50))
    names = {(row.kind, row.name, row.step * (row.kind == Kind.STEP)) for row in trace.events[0]}
    found = _written(trace, tmp_path, "a")
    kinds = {kind for kind, _, _ in names}
    assert found.names_said <= 4 * (len(names) + len(kinds) + 9) + 5
    monkeypatch.setattr(packets, "AT_ONCE", 7)
    _written(trace, tmp_path, "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    _written(trace, tmp_path, "c.gz")
    _written(trace, tmp_path, "d.gz")
    assert gzip.decompress((tmp_path / "c.gz").read_bytes()) == (tmp_path / "a").read_bytes()
    assert (tmp_path / "c.gz").read_bytes() == (tmp_path / "d.gz").read_bytes()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_an_empty_trace_is_a_file(tmp_path: Path) -> None:
    assert _written(_trace({}), tmp_path).packets == 1
    assert _written(_trace({0: []}), tmp_path).order == ["rank 0 (host0)"]


def test_progress_counts_processes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_perfetto(_trace({0: [], 1: []}), tmp_path / "a", lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    def fail(_done: int, _of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_perfetto(_trace({0: []}), tmp_path / "a", fail)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot be written"):
        write_perfetto(_trace({0: []}), tmp_path / "missing" / "a")


def test_without_the_package_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    monkeypatch.delitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", raising=False)
    with pytest.raises(UserError, match=r"pip install 'headway\[traces\]'"):
        write_perfetto(_trace({0: []}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(BIN is None, reason="no trace_processor on PATH or in TRACE_PROCESSOR")
def test_trace_processor_reads_the_same(tmp_path: Path) -> None:
    from perfetto.trace_processor import (  # type: ignore[import-untyped]
        TraceProcessor,
        TraceProcessorConfig,
    )

    trace = synthetic_trace(SyntheticJob(jitter=0.2))
    found = _written(trace, tmp_path)
    with TraceProcessor(
        trace=str(tmp_path / "trace.pftrace"), config=TraceProcessorConfig(bin_path=BIN)
    ) as processor:
        rows = processor.query("select s.ts, s.dur, s.name, s.category from slice s")
        read_back = Counter((row.ts, row.ts + row.dur, row.name, row.category) for row in rows)
        assert read_back == Counter(
            (one.start_ns, one.end_ns, one.name, one.category) for one in found.slices
        )
        (flows,) = processor.query("select count() as n from flow")
        assert flows.n == len(found.flows)
        problems = processor.query("select name, value from stats where severity != 'info' and value > 0")
        assert [(row.name, row.value) for row in problems] == []
