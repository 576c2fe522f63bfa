"""Our recordings of Gloo (see fixtures/kineto/make.py for what is true of them), imported as a whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.interop.readers.kineto_documents import (
    span,
)

from headway.diagnosis import diagnose
from headway.interop.readers.document import Sources
from headway.interop.readers.document import read_document as read_file
from headway.interop.readers.formats import SNIFFED_BYTES, readers, recognised
from headway.interop.readers.importing import import_trace
from headway.trace.events import Event, Kind, Stream
from headway.trace.folder import load_trace
from headway.trace.format import Trace

FIXTURES = Path(__file__).parent / "fixtures" / "kineto"
STEPS = (2, 3, 4)
ASKED = [  # of each step: group, name, bytes of the whole tensor, bucket
    ("0", "all_reduce", 541_760, 0), ("0", "all_reduce", 526_336, 1), ("0", "all_reduce", 1024, -1),
    ("1", "all_reduce", 1024, -1), ("0", "reduce_scatter", 2048, -1),
]  # fmt: skip


def imported(folder: Path, *patterns: str) -> Trace:
    """The trace of those fixtures."""
    (folder / "in").mkdir()
    for pattern in patterns:
        for path in FIXTURES.glob(pattern):
            shutil.copy(path, folder / "in")
    import_trace(folder / "in", folder / "out")
    return load_trace(folder / "out")


def collectives(trace: Trace, rank: int) -> list[Event]:
    """In the order in which they were asked for."""
    return sorted(trace.events[rank].of_kind(Kind.COLLECTIVE), key=lambda event: event.enqueue_ns)


def partners(trace: Trace) -> set[tuple[int, int]]:
    """Which collectives of rank 0 are which of rank 1, counted in the order in which they were asked for."""
    first, second = (
        {(one.group, one.name, one.sequence): place for place, one in enumerate(collectives(trace, rank))}
        for rank in (0, 1)
    )
    return {(place, second[key]) for key, place in first.items() if key in second}


def test_what_is_true_of_the_recording(tmp_path: Path) -> None:
    trace = imported(tmp_path, "*.gz")
    manifest = trace.manifest
    assert (manifest.framework, manifest.world_size, manifest.steps, manifest.notes) == (
        "pytorch",
        2,
        STEPS,
        (),
    )
    assert [(one.rank, one.host, one.backend) for one in manifest.ranks] == [
        (0, "host0", "gloo"),
        (1, "host0", "gloo"),
    ]
    assert manifest.groups == {"0": (0, 1), "1": (0, 1)}
    for rank in (0, 1):
        own = collectives(trace, rank)
        assert [(one.group, one.name, one.size_bytes, one.bucket) for one in own] == ASKED * len(STEPS)
        assert [one.step for one in own] == np.repeat(STEPS, len(ASKED)).tolist()
        assert all(one.enqueue_ns <= one.start_ns for one in own)
        assert {one.stream for one in own} == {Stream.COMMUNICATION}
        for group in ("0", "1"):
            assert set(np.diff([one.sequence for one in own if one.group == group])) == {1}
    numbers = [[one.sequence for one in collectives(trace, rank)] for rank in (0, 1)]
    assert numbers[0] == numbers[1]


def test_phases_and_input_of_each_step(tmp_path: Path) -> None:
    trace = imported(tmp_path, "*.gz")
    for rank, events in trace.events.items():
        for number in STEPS:
            own = events.of_step(number)
            (begin_ns,), (end_ns,) = own.of_kind(Kind.STEP).start_ns, own.of_kind(Kind.STEP).end_ns
            read_ms = own.of_kind(Kind.INPUT).duration_ns.sum() / 1e6
            assert (20 < read_ms < 22) if rank else (0 < read_ms < 2)
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.WAIT):
                some = own.of_kind(kind)
                assert len(some)
                assert (some.start_ns >= begin_ns).all()
                assert (some.end_ns <= end_ns).all()
            forward, backward = own.of_kind(Kind.FORWARD), own.of_kind(Kind.BACKWARD)
            assert forward.start_ns[0] < backward.start_ns[0] < own.of_kind(Kind.OPTIMIZER).start_ns[0]
            assert (backward.start_ns[1:] >= backward.end_ns[:-1]).all()
        waited = events.of_kind(Kind.WAIT)
        assert (waited.start_ns[1:] >= waited.end_ns[:-1]).all()


def test_the_verdict_names_the_rank_that_reads_slowly(tmp_path: Path) -> None:
    for number, patterns in enumerate((["*.gz"], ["rank*.gz"], ["rank*.gz", "*rank0.json.gz"])):
        (tmp_path / str(number)).mkdir()
        found = diagnose(imported(tmp_path / str(number), *patterns))
        assert found.verdict.startswith("Rank 1 is a straggler: the other ranks wait 2")
        assert "its wait for input takes longer" in found.verdict


@pytest.mark.parametrize(
    ("companions", "note"),
    [
        ("", "matched across ranks by common ends"), ("execution_trace*", "matched across ranks by common ends"),
        ("*_rank0*", "Rank 1 has no sequence numbers"), ("*_rank1*", "Rank 0 has no sequence numbers"),
    ],
)  # fmt: skip
def test_without_both_flight_recorders_it_is_known_what_belongs_together(
    tmp_path: Path, companions: str, note: str
) -> None:
    trace = imported(tmp_path, "rank*.gz", *([companions] if companions else []))
    for rank in (0, 1):
        own = collectives(trace, rank)
        assert [(one.name, one.size_bytes, one.bucket) for one in own] == [row[1:] for row in ASKED] * len(
            STEPS
        )
    assert partners(trace) == {(place, place) for place in range(len(ASKED) * len(STEPS))}
    assert note in " ".join(trace.manifest.notes)
    groups = [[one.group for one in collectives(trace, rank)] for rank in (0, 1)]
    assert groups[0] == groups[1]  # what one flight recorder tells, both know
    assert set(groups[0]) == ({"0", "1"} if "_rank" in companions else {""})


def test_it_is_recognised_and_others_are_not() -> None:
    kineto = readers()["kineto"]
    for path in sorted(FIXTURES.parent.glob("*/*")):
        if path.suffix not in (".py",) and path.is_file():
            with Sources(path) as sources:
                head = read_file(sources.find()[0]).data[:SNIFFED_BYTES]
            chosen = getattr(recognised(path.name, head), "name", None)
            is_kineto = path.parent.name == "kineto" and path.name.startswith("rank")
            assert (chosen == "kineto") == (is_kineto or path.name.startswith("kineto_")), path
    assert kineto.recognises("a", json.dumps([span("cpu_op", "aten::add", 0, 1)]).encode())
    assert not kineto.recognises("a", b"")
    assert not kineto.recognises("a", b'[{"name": "cpu_op"}]')
