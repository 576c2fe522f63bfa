import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.changed_events import changed_events
from tests.interop.readers.damaging import ODD_VALUES, damaged_bytes, damaged_json, refused

from headway.errors import TraceError
from headway.interop.readers.formats import SNIFFED_BYTES, readers, recognised
from headway.trace.events import Kind
from headway_readers import jax_json
from profiles import FIXTURES, ranks_of, recorded, steps_of, unpacked

# What is known of the jobs stands in fixtures/tensorflow/make.py and fixtures/jax/make.py.
NAMES = (
    "jax/single.trace.json.gz", "jax/single.perfetto_trace.json.gz", "jax/pair0.trace.json.gz",
    "jax/pair1.trace.json.gz", "tensorflow/loop0.trace.json.gz",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_recording_is_known_and_whole(name: str) -> None:
    head = unpacked(name)[:SNIFFED_BYTES]
    assert recognised(name, head) is readers()["jax"]
    for rank in recorded(name):
        assert not rank.absolute
        assert rank.clock == name
        assert rank.dropped_events == 0
        assert len(steps_of(rank.events)) == 3
        assert any("start of each recording" in note for note in rank.notes)


@pytest.mark.parametrize(
    ("form", "binary"),
    [
        ("jax/single.trace.json.gz", "jax/single.xplane.pb"),
        ("jax/single.perfetto_trace.json.gz", "jax/single.xplane.pb"),
        ("jax/pair1.trace.json.gz", "jax/pair1.xplane.pb"),
        ("tensorflow/loop0.trace.json.gz", "tensorflow/loop0.xplane.pb"),
    ],
)
def test_both_forms_tell_the_same_times(form: str, binary: str) -> None:
    for here, there in zip(recorded(form), recorded(binary), strict=True):
        assert (here.rank, here.framework) == (there.rank, there.framework)
        for kind in (Kind.STEP, Kind.COLLECTIVE):
            own, other = here.events.of_kind(kind), there.events.of_kind(kind)
            assert own.name.tolist() == other.name.tolist()
            assert own.step.tolist() == other.step.tolist()
            assert own.sequence.tolist() == other.sequence.tolist()
            apart = other.start_ns - own.start_ns
            assert np.ptp(apart) <= 2  # TensorBoard and JAX round to a nanosecond
            assert np.abs(other.duration_ns - own.duration_ns).max() <= 2


def test_jax_tells_ranks_but_neither_sizes_nor_phases() -> None:
    ranks = recorded("jax/pair0.trace.json.gz") + recorded("jax/pair1.trace.json.gz")
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    for rank in ranks:
        assert rank.world_size == 4
        assert steps_of(rank.events) == [0, 1, 2]
        collectives = rank.events.of_kind(Kind.COLLECTIVE)
        assert Counter(collectives.name.tolist()) == {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 3}
        assert (collectives.size_bytes == -1).all()
        assert not len(rank.events.of_kind(Kind.BACKWARD, Kind.OPTIMIZER))
        assert any("how much" in note for note in rank.notes)
        assert any("counts as forward" in note for note in rank.notes)


def test_tensorflow_tells_all_but_the_time_of_day() -> None:
    (rank,) = recorded("tensorflow/loop0.trace.json.gz")
    assert (rank.rank, rank.groups) == (0, {"1": (0, 1)})
    assert steps_of(rank.events) == [10, 11, 12]
    assert Counter(rank.events.of_kind(Kind.COLLECTIVE).step.tolist()) == {10: 3, 11: 3, 12: 3}
    assert len(rank.events.of_kind(Kind.BACKWARD)) == 21
    assert "sequential/dense" in rank.events.of_kind(Kind.FORWARD).name.tolist()


def test_the_host_is_told_by_where_the_file_lies() -> None:
    data = unpacked("jax/single.trace.json.gz")
    (first, *_) = ranks_of(data, "run/plugins/profile/2026_01_02/node7.trace.json.gz")
    assert first.host == "node7"
    assert ranks_of(data, "elsewhere.trace.json.gz")[0].host == ""


# Damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"{}", b'{"traceEvents": []}', b'{"traceEvents": {}}', b'{"traceEvents": [{}]}',
        b'{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1}]}',
        b'{"traceEvents": ' + b"[" * 100_000, b'{"traceEvents": [' + b"9" * 100_000 + b"]}",
        b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1e999, "dur": NaN}]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("lenient", [False, True])
def test_what_holds_nothing_is_refused_in_one_line(data: bytes, lenient: bool) -> None:
    with pytest.raises(TraceError) as caught:
        ranks_of(data, "x.trace.json", lenient=lenient)
    assert "\n" not in str(caught.value)


def test_leniently_the_whole_part_of_a_truncated_file_is_kept() -> None:
    name = "jax/single.trace.json.gz"
    data = unpacked(name)
    cut = data[: len(data) * 2 // 3]
    assert "damaged" in refused(lambda: ranks_of(cut, name))
    kept = ranks_of(cut, name, lenient=True)
    assert 1 <= len(kept) <= 4
    assert kept[0].dropped_events >= 1
    assert any("damaged" in note for note in kept[0].notes)
    assert refused(lambda: ranks_of(data, name, ending="the compressed file is truncated"))
    assert not refused(lambda: ranks_of(data, name, ending="the compressed file is truncated", lenient=True))


@pytest.mark.parametrize("spaces", [False, True])
def test_leniently_a_broken_event_costs_only_itself(spaces: bool) -> None:
    name = "tensorflow/loop0.trace.json.gz"
    document = json.loads(unpacked(name))
    text = json.dumps(document, separators=None if spaces else (",", ":"))
    whole = ranks_of(text.encode(), name)[0]
    separator = '"long_name": "' if spaces else '"long_name":"'
    at = text.index(separator) + len(separator)
    broken = (text[:at] + "\x01\\" + text[at + 3 :]).encode()
    assert "damaged" in refused(lambda: ranks_of(broken, name))
    (kept,) = ranks_of(broken, name, lenient=True)
    assert kept.dropped_events == 1
    assert len(kept.events.of_kind(Kind.COLLECTIVE)) == len(whole.events.of_kind(Kind.COLLECTIVE)) - 1
    assert len(kept.events.of_kind(Kind.FORWARD)) == len(whole.events.of_kind(Kind.FORWARD))


@pytest.mark.parametrize(
    ("field", "value"), [("ts", None), ("ts", 1e300), ("dur", -5), ("dur", "3"), ("dur", 1e13), ("name", 7)]
)
def test_events_that_cannot_be_are_refused_or_left_out(field: str, value: Any) -> None:
    name = "jax/pair0.trace.json.gz"
    document = json.loads(unpacked(name))
    spoilt = next(event for event in document["traceEvents"] if "hlo_op" in event.get("args", {}))
    spoilt[field] = value
    data = json.dumps(document).encode()
    assert "damaged" in refused(lambda: ranks_of(data, name))
    assert ranks_of(data, name, lenient=True)[0].dropped_events == 1


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), name=st.sampled_from(NAMES), lenient=st.booleans())
def test_damaged_bytes_raise_trace_errors_only(draw: st.DataObject, name: str, lenient: bool) -> None:
    data = damaged_bytes(draw, unpacked(name))
    refused(lambda: ranks_of(data, name, lenient=lenient))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), name=st.sampled_from(["jax/pair0.trace.json.gz", "tensorflow/loop0.trace.json.gz"]))
def test_damaged_json_raises_trace_errors_only(draw: st.DataObject, name: str) -> None:
    document = json.loads(unpacked(name))
    data = damaged_json(draw, document)
    refused(lambda: ranks_of(data, name, lenient=draw.draw(st.booleans())))


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data(), name=st.sampled_from(["jax/pair0.trace.json.gz", "tensorflow/loop0.trace.json.gz"]))
def test_changed_events_and_arguments_raise_trace_errors_only(draw: st.DataObject, name: str) -> None:
    document = json.loads(unpacked(name))
    for _ in range(draw.draw(st.integers(0, 20))):
        event = draw.draw(st.sampled_from([one for one in document["traceEvents"] if one.get("args")]))
        event["args"][draw.draw(st.sampled_from(sorted(event["args"])))] = draw.draw(
            st.sampled_from(ODD_VALUES)
        )
    document["traceEvents"] = draw.draw(changed_events(document["traceEvents"]))
    data = json.dumps(document).encode()
    refused(lambda: ranks_of(data, name, lenient=draw.draw(st.booleans())))


# Who reads what ----------------------------------------------------------------------------------------------


def test_other_tools_documents_are_left_alone() -> None:
    for path in FIXTURES.rglob("*"):
        own = path.relative_to(FIXTURES).parts[0] in ("tensorflow", "jax")
        if path.is_file() and path.suffix != ".py" and not (own and "json" in path.name):
            head = unpacked(str(path.relative_to(FIXTURES)))[:SNIFFED_BYTES]
            assert not jax_json.recognises(path.name, head), path


@pytest.mark.parametrize(
    "head",
    [
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "/host:CPU"}}]}',
        b'{"traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "cpu/0"}}]}',
        b'[{"ph": "M", "name": "process_name", "args": {"name": "/host:CPU"}}]',
        b'{"displayTimeUnit": "ns", "metadata": {"highres-ticks": true}, "traceEvents": []}',
    ],
)
def test_documents_that_only_resemble_are_left_alone(head: bytes) -> None:
    assert not jax_json.recognises("x.trace.json", head)
