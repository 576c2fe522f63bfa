"""Files for Perfetto as files: names, edges of what can be written, failures."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.interop.exporters.perfetto_checks import info, trace_of, written
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.errors import UserError
from headway.interop.exporters import perfetto_ranks
from headway.interop.exporters.perfetto import write_perfetto
from headway.trace.events import Event, Events, Kind, Stream


def test_odd_names_are_escaped_and_cut(tmp_path: Path) -> None:
    event = Event(Kind.OPERATOR, "a\x00b\ud800\n" + "x" * 10**5, Stream.COMPUTE, 0, 0, 1, group="\x1b")
    trace = trace_of({0: [event]})
    hosts = (info(0, host="h\x07" + "y" * 1000, backend="\u202e", pid=-5),)
    trace = replace(trace, manifest=trace.manifest.model_copy(update={"ranks": hosts}))
    found = written(trace, tmp_path)
    (one,) = found.slices
    assert one.name.startswith("a\\x00b\\ud800\\nxxx")
    assert len(one.name) == 500
    assert one.annotations["group"] == "\\x1b"
    assert one.process.startswith("rank 0 (h\\x07yyy")


def test_missing_ranks_servers_and_shared_process_numbers(tmp_path: Path) -> None:
    push = Event(Kind.PUSH, "w", Stream.COMMUNICATION, 0, 0, 4, peer=0)
    trace = trace_of(
        {3: [push], 1: [push], 7: [push]}, servers={0: Events.from_rows([push]), 1: Events.from_rows([])}
    )
    infos = (info(1, pid=7), info(3, pid=7))  # 7 has none
    manifest = trace.manifest.model_copy(update={"ranks": infos, "servers": (info(0, host="s", pid=8),)})
    found = written(replace(trace, manifest=manifest), tmp_path)
    assert found.order == ["rank 1 (host1)", "rank 3 (host3)", "rank 7", "server 0 (s)", "server 1"]
    assert found.processes["server 0 (s)"] == 8
    assert [one.name for one in found.slices] == ["push w"] * 4


def test_times_are_exact_to_the_ends_of_time(tmp_path: Path) -> None:
    latest = 2**63 - 1
    starts = [0, 1, 127, 128, 2**35 - 1, 2**35, 2**62, latest]
    events = [Event(Kind.OPERATOR, "o", Stream.COMPUTE, 0, start, 0) for start in starts]
    found = written(trace_of({0: events}), tmp_path)
    assert sorted(one.start_ns for one in found.slices) == starts
    beyond = Event(Kind.OPERATOR, "o", Stream.COMPUTE, 0, latest - 1, 10)
    (one,) = written(trace_of({0: [beyond]}), tmp_path).slices
    assert (one.start_ns, one.end_ns) == (latest - 1, latest)


def test_names_are_said_once_and_files_are_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = synthetic_trace(SyntheticJob(steps=50))
    names = {(row.kind, row.name, row.step * (row.kind == Kind.STEP)) for row in trace.events[0]}
    found = written(trace, tmp_path, "a")
    kinds = {kind for kind, _, _ in names}
    assert found.names_said <= 4 * (len(names) + len(kinds) + 9) + 5
    monkeypatch.setattr(perfetto_ranks, "AT_ONCE", 7)
    written(trace, tmp_path, "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    written(trace, tmp_path, "c.gz")
    written(trace, tmp_path, "d.gz")
    assert gzip.decompress((tmp_path / "c.gz").read_bytes()) == (tmp_path / "a").read_bytes()
    assert (tmp_path / "c.gz").read_bytes() == (tmp_path / "d.gz").read_bytes()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_an_empty_trace_is_a_file(tmp_path: Path) -> None:
    assert written(trace_of({}), tmp_path).packets == 1
    assert written(trace_of({0: []}), tmp_path).order == ["rank 0 (host0)"]


def test_progress_counts_processes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_perfetto(trace_of({0: [], 1: []}), tmp_path / "a", lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    def fail(_done: int, _of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_perfetto(trace_of({0: []}), tmp_path / "a", fail)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot be written"):
        write_perfetto(trace_of({0: []}), tmp_path / "missing" / "a")


def test_without_the_package_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    monkeypatch.delitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", raising=False)
    with pytest.raises(UserError, match=r"pip install .*'perfetto"):
        write_perfetto(trace_of({0: []}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


BIN = (
    os.environ.get("TRACE_PROCESSOR")
    or shutil.which("trace_processor_shell")
    or shutil.which("trace_processor")
)


@pytest.mark.skipif(BIN is None, reason="no trace_processor on PATH or in TRACE_PROCESSOR")
def test_trace_processor_reads_the_same(tmp_path: Path) -> None:
    from perfetto.trace_processor import (  # type: ignore[import-untyped]
        TraceProcessor,
        TraceProcessorConfig,
    )

    trace = synthetic_trace(SyntheticJob(jitter=0.2))
    found = written(trace, tmp_path)
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
