"""Traces for Perfetto, and their files held against them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.interop.exporters.perfetto_file import PerfettoFile, Slice, read

from headway.diagnosis.communication import match
from headway.interop.exporters.perfetto import MARK, write_perfetto
from headway.interop.exporters.rank_tracks import clean, title
from headway.model import ModelSpec
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Manifest, RankInfo, Trace


def info(rank: int, **fields: object) -> RankInfo:
    values = {"host": f"host{rank}", "pid": 100 + rank, "world_size": 4, "backend": "gloo", "version": "2"}
    return RankInfo.model_validate({"rank": rank, **values, **fields})


def trace_of(rows: dict[int, list[Event]], **changes: object) -> Trace:
    manifest = Manifest(world_size=max(rows, default=0) + 1, steps=(0,), ranks=tuple(map(info, rows)))
    events = {rank: Events.from_rows(own) for rank, own in rows.items()}
    trace = Trace(Path("made"), manifest, ModelSpec(parameters=()), events)
    return replace(trace, **changes)  # type: ignore[arg-type]


def written(trace: Trace, folder: Path, name: str = "trace.pftrace") -> PerfettoFile:
    path = folder / name
    count = write_perfetto(trace, path)
    found = read(path)
    assert found.packets == count
    assert [one.name for one in folder.iterdir() if one.name.startswith(".")] == []
    return found


def check(trace: Trace, found: PerfettoFile, origin_ns: int = 0) -> None:
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


def collective(
    start: int, end: int, sequence: int = 0, enqueue: int = -1, kind: str = Kind.COLLECTIVE
) -> Event:
    return Event(
        kind, "all_reduce", Stream.COMMUNICATION, 0, start, end - start, enqueue, "0", sequence, 4_000_000, 1
    )
