"""MXNet profiles that are empty, wrong or damaged."""

import json
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.changed_events import changed_events
from tests.interop.readers.damaging import ODD_VALUES, damaged_bytes, refused

from headway.errors import TraceError
from headway.trace.events import Kind
from mxnet_files import FORWARD, PUSH, fixture, profile, rank_of, spans


def small() -> list[Any]:
    """A part of a profile that has operators, calls and marks."""
    events = json.loads(fixture("module/worker0.json"))["traceEvents"]
    calls = [event for event in events if event.get("cat") == "MXNET_C_API" and event["ph"] != "C"]
    others = [event for event in events if event.get("cat") != "MXNET_C_API" and event["ph"] not in "be"]
    marks = [event for event in events if event["name"] == "step"]
    return [*others, *marks, *calls[:40]]


ODD_TIMES: tuple[Any, ...] = (float("nan"), float("inf"), -5, 10**30, None, "1", [])


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


ANY = settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
