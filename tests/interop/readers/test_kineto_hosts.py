"""Documents of ranks that compute on their host, made up here for what no recording of ours shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.damaging import damaged_bytes, damaged_json, refused
from tests.interop.readers.kineto_documents import (
    BASE_NS,
    Entry,
    document,
    gloo,
    job_events,
    read_document,
    span,
    step,
)

from headway.errors import TraceError
from headway.interop.readers.foreign import Document
from headway.interop.readers.kineto import reader
from headway.interop.readers.kineto.document import parse
from headway.trace.events import Kind


def test_elements_of_lists_of_tensors_are_as_large_as_gloo_says() -> None:
    events = [step(1, 0, 100), *gloo("allreduce", 10, 20, 5)]
    for kind, size_bytes in (
        ("float", 256),
        ("double", 512),
        ("c10::BFloat16", 128),
        ("long", 512),
        ("?", 256),
    ):
        events[-1]["args"]["Input type"] = [kind]
        assert read_document(events).events.of_kind(Kind.COLLECTIVE).size_bytes.tolist() == [size_bytes]


def test_a_message_names_its_peer() -> None:
    events = [step(1, 0, 100)]
    for name, concrete in (("send", ["", "", "3", "0"]), ("recv_", ["", "", "2", "0"])):
        told: Entry = {"Record function id": 8, "Input Dims": [[[4]]], "Input type": ["TensorList"]}
        call = span("cpu_op", f"c10d::{name}", 10, 1, **told)
        call["args"]["Concrete Inputs"] = concrete
        mark = span("user_annotation", "gloo:" + name.strip("_"), 12, 3, tid=2, **{"Record function id": 9})
        message = read_document([*events, call, mark]).events.of_kind(Kind.SEND, Kind.RECEIVE)
        assert (message.kind[0], message.peer[0]) == ((Kind.SEND, 3) if name == "send" else (Kind.RECEIVE, 2))
        assert message.size_bytes.tolist() == [16]


def test_nothing_marks_steps() -> None:
    found = read_document([one for one in job_events() if "ProfilerStep" not in one["name"]])
    assert found.events.of_kind(Kind.STEP).step.tolist() == [0]
    assert found.events.of_kind(Kind.STEP).duration_ns.tolist() == [29_000_000]
    assert any("everything counts as one step" in note for note in found.notes)


def test_steps_that_are_marked_twice_count_once() -> None:
    doubled = [*job_events(), step(1, 50, 9_000), span("cpu_op", "ProfilerStep#2", 10_000, 10_000)]
    steps = read_document(doubled).events.of_kind(Kind.STEP)
    assert (steps.step.tolist(), steps.start_ns.tolist()) == (
        [1, 2, 3],
        [BASE_NS + n * 10**7 for n in range(3)],
    )


def test_a_bare_list_of_events() -> None:
    found = reader.read(Document("rank3.json", json.dumps(job_events()).encode())).ranks[0]
    assert (found.rank, found.world_size, found.host) == (3, None, "")
    assert found.events.of_kind(Kind.STEP).step.tolist() == [1, 2, 3]


def test_times_that_count_from_nothing() -> None:
    stated = read_document(job_events())
    bare = read_document(job_events(), baseTimeNanoseconds=None)
    assert np.array_equal(stated.events.start_ns - BASE_NS, bare.events.start_ns)
    assert not any("origin of times" in note for note in stated.notes)
    assert any("origin of times is not recorded" in note for note in bare.notes)
    wall = read_document(job_events(shift_us=BASE_NS / 1000), baseTimeNanoseconds=None)
    assert not any("origin of times" in note for note in wall.notes)


def test_the_host_is_what_the_profiler_puts_into_names_of_files() -> None:
    found = read_document(
        job_events(), host_name=None, name="node-7.cluster_4242.1700000000123.pt.trace.json.gz"
    )
    assert found.host == "node-7.cluster"


def test_not_a_number_next_to_events_is_nothing_and_in_their_times_damage() -> None:
    events = job_events()
    with_note = document(events, note="@").replace(b'"@"', b"NaN")
    assert len(reader.read(Document("a", with_note)).ranks[0].events) == len(read_document(events).events)
    within = document([*events, span("cpu_op", "aten::add", 100, 5, weight="@")]).replace(
        b'"@"', b"-Infinity"
    )
    assert len(reader.read(Document("a", within)).ranks[0].events) > 0
    events[2]["dur"] = "@"
    data = document(events).replace(b'"@"', b"NaN")
    with pytest.raises(TraceError, match="a is damaged; got an event with ts"):
        reader.read(Document("a", data))
    found = reader.read(Document("a", data, lenient=True)).ranks[0]
    assert found.dropped_events == 1
    assert "1 events with impossible times were left out." in found.notes


@pytest.mark.parametrize(
    "change",
    [{"ts": None}, {"dur": -1}, {"ts": "soon"}, {"ts": 1e300}, {"dur": 10**400}, {"ts": [1]}, {"dur": None}],
    ids=repr,
)
def test_times_that_cannot_be(change: dict[str, Any]) -> None:
    events = job_events()
    events[2] |= change
    with pytest.raises(TraceError, match="is damaged"):
        read_document(events)
    assert read_document(events, lenient=True).dropped_events == 1


def test_a_truncated_document_keeps_its_beginning() -> None:
    data = document(job_events(range(1, 50)), rank=1)
    cut = data[: len(data) // 2]
    with pytest.raises(TraceError, match="a is damaged"):
        reader.read(Document("a", cut))
    with pytest.raises(TraceError, match="truncated"):
        reader.read(Document("a", data, ending="the file is truncated"))
    found = reader.read(Document("a", cut, lenient=True)).ranks[0]
    assert (found.rank, found.world_size, found.dropped_events) == (1, 2, 1)
    assert found.events.of_kind(Kind.STEP).step.tolist() == list(
        range(1, len(found.events.of_kind(Kind.STEP)) + 1)
    )
    assert 20 <= len(found.events.of_kind(Kind.STEP)) <= 27


def test_what_takes_no_time_is_no_recording() -> None:
    for events in ([], [{"ph": "M", "name": "process_name"}], [step(1, 0, 5) | {"ph": "i"}]):
        with pytest.raises(TraceError, match="contains no operators and no kernels"):
            read_document(events)


OPEN = b'{"schemaVersion": 1, "traceEvents": ['


@pytest.mark.timeout(120)  # a second or two each, if it does not grow with the square of their length
@pytest.mark.parametrize(
    "data",
    [
        OPEN + b"{" * 5_000_000, OPEN + b'{"a":' * 500_000, OPEN + b'{"ph": "X", "name": "a", "args": {' * 100_000,
        OPEN + b'{"name": "' + b'\\"{' * 1_000_000, OPEN + b'{"name": "' + b"{" * 5_000_000 + b'"', b"[" * 3_000_000,
        OPEN + b'{"ts": ' + b"9" * 3_000_000 + b"}", OPEN + (b'{"ts": ' + b"9" * 5_000 + b"},") * 1_000,
        OPEN + b"{}," * 500_000, OPEN + b":NaN" * 1_000_000, OPEN + b"NaN" + b", " * 500_000, OPEN + b" " * 5_000_000,
    ],
    ids=lambda data: data[:60].decode(),
)  # fmt: skip
def test_damage_without_end(data: bytes) -> None:
    harmed(lambda lenient: reader.read(Document("a.json", data, lenient=lenient)))


def test_not_a_number_in_a_text_stays() -> None:
    """Unless it looks just like a number there, too."""
    events = [*job_events(), span("cpu_op", "loss: NaN", 100, 5, weight="@")]
    data = document(events).replace(b'"@"', b"NaN")
    names = {entry.name for entry in parse(Document("a", data)).entries}
    assert "loss: NaN" in names


def harmed(make: Callable[[bool], object]) -> None:
    for lenient in (False, True):
        assert len(refused(partial(make, lenient)).splitlines()) <= 1


SMALL = json.loads(
    document(job_events((1, 2)), rank=0, distributed={"pg_config": [{"pg_name": "0", "ranks": [0, 1]}]})
)


@settings(max_examples=examples(200))
@given(st.data())
def test_damage_is_reported_and_nothing_else_escapes(draw: st.DataObject) -> None:
    if draw.draw(st.booleans()):
        data = damaged_bytes(draw, json.dumps(SMALL).encode())
    else:
        data = damaged_json(draw, SMALL)
    harmed(lambda lenient: reader.read(Document("a.json", data, lenient=lenient)))
