"""What a trace holds is in its file for Perfetto: spans, arrows, counters."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.exporters.perfetto_checks import check, collective, trace_of, written
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.diagnosis.communication import match
from headway.diagnosis.links import sent_volumes
from headway.interop.exporters import perfetto
from headway.interop.exporters.perfetto import MARK
from headway.trace.events import Event, Kind, Stream

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


@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(job=JOBS)
def test_a_job_is_in_the_file_as_it_is_in_the_trace(job: SyntheticJob, tmp_path: Path) -> None:
    trace = synthetic_trace(job)
    found = written(trace, tmp_path)
    check(trace, found)
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


@settings(
    max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.dictionaries(st.integers(0, 3), st.lists(EVENTS | MESSAGES, max_size=25), max_size=3))
def test_any_events_are_in_the_file(rows: dict[int, list[Event]], tmp_path: Path) -> None:
    trace = trace_of(rows)
    check(trace, written(trace, tmp_path), perfetto.origin_ns(trace))


def test_the_last_to_come_points_at_who_waited(tmp_path: Path) -> None:
    trace = trace_of({0: [collective(10, 50)], 1: [collective(30, 50)], 2: [collective(31, 50, enqueue=29)]})
    found = written(trace, tmp_path)
    check(trace, found)
    (to_0, to_2) = sorted(found.flows, key=lambda flow: flow[1].process)
    assert to_0[0] is to_2[0]
    assert to_0[0].process == "rank 1 (host1)"
    assert (to_0[1].category, to_0[1].name, to_0[1].start_ns) == (MARK, "rank 1 arrived last", 30)
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
    trace = trace_of({0: receive, 1: receive[:0], 2: []} | {0: send, 1: receive})
    found = written(trace, tmp_path)
    check(trace, found)
    ends = [(source.start_ns, target.name, target.start_ns) for source, target in found.flows]
    assert ends == [
        (5, "receive", 7),
        (20, "rank 0 sent", 20),
    ]  # the third would have come before it was sent


def test_a_collective_without_counterpart_has_no_arrow(tmp_path: Path) -> None:
    trace = trace_of(
        {0: [collective(0, 5)], 1: [collective(0, 5, sequence=1), collective(6, 9, sequence=-1)]}
    )
    found = written(trace, tmp_path)
    check(trace, found)
    assert found.flows == []
    assert all(one.correlation is None and "last_rank" not in one.annotations for one in found.slices)
    assert found.counters == {}


def test_overlapping_collectives_lie_on_tracks_of_their_own(tmp_path: Path) -> None:
    events = [collective(0, 10, 0), collective(1, 5, 1), collective(5, 12, 2), collective(10, 12, 3)]
    found = written(trace_of({0: events}), tmp_path)
    assert {one.start_ns: one.track for one in found.slices} == {
        0: "network", 1: "network 2", 5: "network 2", 10: "network"
    }  # fmt: skip
    many = [collective(0, 10, number) for number in range(12)]
    assert {"network", "network 02", "network 12"} <= set(
        written(trace_of({0: many}), tmp_path).tracks.values()
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
    found = written(trace_of({0: events}), tmp_path)
    check(trace_of({0: events}), found)
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
