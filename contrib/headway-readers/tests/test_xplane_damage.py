"""Profiles that are damaged, empty, huge, or not profiles at all."""

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.damaging import damaged_bytes, refused

from headway.errors import TraceError
from headway.interop.readers.formats import SNIFFED_BYTES
from headway_readers.xplane import reader
from headway_readers.xplane.messages import program_class, space_class
from profiles import (
    FIXTURES,
    Happened,
    check,
    ranks_of,
    space_of,
    steps_of,
    unpacked,
)
from xplane_files import JAX, TENSORFLOW

# Damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00", b"\xff" * 100, b"{}", b"\x0a\x00", b"\x0a\xff\xff\xff\xff\x7f", b"\x1a" * 50,
        space_class("Space")().SerializeToString(), space_of({"/host:CPU": {"python": []}}).SerializeToString(),
        space_of({"/host:CPU": {"python": [Happened("main", 0, 5)]}}).SerializeToString(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lenient", [False, True])
def test_what_holds_nothing_is_refused_in_one_line(data: bytes, lenient: bool) -> None:
    with pytest.raises(TraceError) as caught:
        ranks_of(data, lenient=lenient)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused() -> None:
    data = unpacked("jax/single.xplane.pb")
    assert "damaged" in refused(lambda: ranks_of(data[: len(data) // 2]))
    assert "damaged" in refused(lambda: ranks_of(data, ending="the compressed file is truncated"))
    assert not refused(lambda: ranks_of(data, ending="the compressed file is truncated", lenient=True))


def test_leniently_a_broken_event_costs_only_itself() -> None:
    data = unpacked("tensorflow/loop0.xplane.pb")
    whole = ranks_of(data)[0]
    space = space_class("Space").FromString(data)
    written = {
        event.SerializeToString() for plane in space.planes for line in plane.lines for event in line.events
    }
    text = max((text for text in written if text in data), key=len)
    at = data.index(text)
    broken = data[:at] + b"\xff" * len(text) + data[at + len(text) :]
    assert "damaged" in refused(lambda: ranks_of(broken))
    (kept,) = ranks_of(broken, lenient=True)
    assert kept.dropped_events >= 1
    assert any("damaged" in note for note in kept.notes)
    assert len(kept.events) >= 0.9 * len(whole.events)


@pytest.mark.parametrize(
    ("field", "value"),
    [("duration_ps", -1), ("duration_ps", 2**63 - 1), ("timestamp_ns", 2**62), ("metadata_id", 12345)],
)
def test_events_that_cannot_be_are_refused_or_left_out(field: str, value: int) -> None:
    space = space_class("Space").FromString(unpacked("jax/single.xplane.pb"))
    plane = next(plane for plane in space.planes if plane.name == b"/host:CPU")
    setattr(plane.lines[1] if field == "timestamp_ns" else plane.lines[1].events[20], field, value)
    data = space.SerializeToString()
    assert "damaged" in refused(lambda: ranks_of(data))
    for rank in ranks_of(data, lenient=True):
        assert rank.dropped_events >= 1
        assert any("left out" in note for note in rank.notes)


def test_names_that_are_no_text_do_no_harm() -> None:
    space = space_class("Space").FromString(unpacked("jax/single.xplane.pb"))
    for plane in space.planes:
        for entry in plane.event_metadata:
            entry.value.name = b"\xff\xfe<script>\x00\x1b[31m" + entry.value.name
        for line in plane.lines:
            line.name = b"\xff" * 100_000
    for rank in ranks_of(space.SerializeToString()):
        check(rank)


def test_many_devices_are_refused_at_once() -> None:
    events = [Happened("fusion.1", at, 1, {"hlo_op": "fusion.1", "device_ordinal": at}) for at in range(6000)]
    space = space_of({"/host:CPU": {"threads": events}})
    assert "too many devices" in refused(lambda: ranks_of(space.SerializeToString()))


def test_deep_nesting_and_many_steps_take_no_long() -> None:
    deep = [Happened("ExecutorState::Process", at, 10**6 - 2 * at, {"id": at}) for at in range(20_000)]
    main = [Happened("train", 100 * at, 90, {"step_num": at}) for at in range(20_000)]
    main += [Happened("FunctionRun", 100 * at + 1, 5, {"id": at}) for at in range(20_000)]
    compute = [Happened("a/MatMul:MatMul", 50 * at, 7) for at in range(20_000)]
    space = space_of({"/host:CPU": {"python": main, "tf": [*deep, *compute]}})
    (rank,) = ranks_of(space.SerializeToString())
    assert len(steps_of(rank.events)) == 20_000


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), name=st.sampled_from([*TENSORFLOW, *JAX]), lenient=st.booleans())
def test_damaged_bytes_raise_trace_errors_only(draw: st.DataObject, name: str, lenient: bool) -> None:
    folder = "tensorflow" if name in TENSORFLOW else "jax"
    data = damaged_bytes(draw, unpacked(f"{folder}/{name}.xplane.pb"))
    refused(lambda: ranks_of(data, lenient=lenient))


_ODD_NUMBERS = (0, 1, -1, 2**31, 2**61, 2**62, 2**63 - 1, -(2**63), 10**17, 10**18)


_ODD_TEXTS = (
    b"", b"\xff", b"9" * 10**5, b"<script>\x00\x1b[31m", b"/device:GPU:1", b"Steps", b"Stream #1(Kernel)", b"hlo_op",
    b"step_num", b"run_id", b"ncclKernel_AllReduce", b"all-reduce-start.1", b"all-reduce-done.1", b"while.1", b"a/b:C",
)  # fmt: skip


def harmed(draw: st.DataObject, message: Any) -> None:
    """Change one field somewhere inside ``message``, or take one of its parts away, or repeat one."""
    while True:
        field = draw.draw(st.sampled_from([one.name for one in message.DESCRIPTOR.fields]))
        value = getattr(message, field)
        if hasattr(value, "add") or hasattr(value, "append"):
            if not len(value):
                return
            at = draw.draw(st.integers(0, len(value) - 1))
            what = draw.draw(st.sampled_from(["within"] * 8 + ["remove", "repeat"]))
            if what == "remove":
                del value[at]
            elif what == "repeat":
                value.append(value[at])
            if what != "within" or not hasattr(value, "add"):
                return
            message = value[at]
        elif hasattr(value, "DESCRIPTOR"):
            message = value
        else:
            odd = (
                _ODD_TEXTS
                if isinstance(value, bytes)
                else (math.nan,)
                if isinstance(value, float)
                else _ODD_NUMBERS
            )
            with suppress(ValueError, TypeError):  # protobuf refuses what its field cannot hold
                setattr(message, field, draw.draw(st.sampled_from(odd)))
            return


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), name=st.sampled_from(["loop1", "pair0", "single"]), lenient=st.booleans())
def test_messages_with_odd_values_raise_trace_errors_only(
    draw: st.DataObject, name: str, lenient: bool
) -> None:
    folder = "tensorflow" if name in TENSORFLOW else "jax"
    space = space_class("Space").FromString(unpacked(f"{folder}/{name}.xplane.pb"))
    for _ in range(draw.draw(st.integers(1, 30))):
        harmed(draw, space)
    refused(lambda: ranks_of(space.SerializeToString(), lenient=lenient))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), lenient=st.booleans())
def test_damaged_programs_cost_no_more_than_what_they_tell(draw: st.DataObject, lenient: bool) -> None:
    space = space_class("Space").FromString(unpacked("jax/single.xplane.pb"))
    plane = next(plane for plane in space.planes if plane.name == b"/host:metadata")
    for entry in plane.event_metadata:
        for stat in entry.value.stats:
            if stat.bytes_value:
                program = program_class().FromString(stat.bytes_value)
                for _ in range(draw.draw(st.integers(0, 10))):
                    harmed(draw, program)
                stat.bytes_value = damaged_bytes(draw, program.SerializeToString() or b"\x00")
    ranks = ranks_of(space.SerializeToString(), lenient=lenient)
    assert len(ranks) == 4
    assert all(np.isin([5, 6, 7], rank.events.step).all() for rank in ranks)


# Who reads what ----------------------------------------------------------------------------------------------


def test_other_tools_documents_are_left_alone() -> None:
    others = [
        path
        for path in FIXTURES.rglob("*")
        if path.is_file()
        and path.suffix != ".py"
        and path.relative_to(FIXTURES).parts[0] not in ("tensorflow", "jax")
    ]
    for path in others:
        head = unpacked(str(path.relative_to(FIXTURES)))[:SNIFFED_BYTES]
        assert not reader.recognises(path.name, head), path


def test_a_name_helps_where_the_head_does_not_tell() -> None:
    space = space_of({"unheard of": {"line": [Happened("x", 0, 1)]}})
    head = space.SerializeToString()
    assert not reader.recognises("x.pb", head)
    assert reader.recognises("run/host.xplane.pb", head)
    assert not reader.recognises("run/host.xplane.pb", b'{"traceEvents": []}')
    assert not reader.recognises("x", b"")
