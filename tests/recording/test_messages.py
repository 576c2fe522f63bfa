"""Messages and connections in a trace: what they say of links, and that they change nothing else of a diagnosis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.synthetic import MS, SyntheticJob, events_of, synthetic_trace, trace_of

from headway.cluster import Cluster, Host
from headway.collectives.live import Transfer
from headway.diagnosis.communication import Communications, match
from headway.diagnosis.diagnosis import Diagnosis, diagnose
from headway.diagnosis.links import Link
from headway.recording.connections import Use, link_rows
from headway.recording.derive import StrategySpan, transfer_rows
from headway.trace.events import Event, Events, Kind, Stream, inner_messages
from headway.trace.format import Trace

JOB = SyntheticJob(world_size=3, steps=4, slow={(1, "backward"): 30.0}, blocking_loss=True, gbps=1.0)
HERE, THERE, ELSEWHERE = ("10.0.0.1", 1000), ("10.0.0.2", 2000), ("10.0.0.3", 3000)


def plain(trace: Trace, *without: str) -> dict[int, list[Event]]:
    return {rank: [e for e in events if e.kind not in without] for rank, events in trace.events.items()}


def with_messages(rows: dict[int, list[Event]], step: int = 1, pieces: int = 3) -> dict[int, list[Event]]:
    """Every collective with messages of a ring that goes ``step`` ranks on, which each rank asks for as it comes to it.

    The messages of the first rank to arrive seem to be in flight for as long as others are late.
    """
    found = {}
    for rank, events in rows.items():
        own = list(events)
        for event in events:
            if event.kind != Kind.COLLECTIVE:
                continue
            size_bytes = ring_bytes(event.size_bytes, len(rows)) // pieces
            for piece in range(pieces):
                start_ns = event.enqueue_ns + piece
                own += (
                    event._replace(
                        kind=kind, start_ns=start_ns, duration_ns=event.end_ns - start_ns, enqueue_ns=start_ns,
                        size_bytes=size_bytes, peer=(rank + away) % len(rows), algorithm="",
                    )
                    for kind, away in ((Kind.RECEIVE, -step), (Kind.SEND, step))
                )  # fmt: skip
        found[rank] = own
    return found


def ring_bytes(size_bytes: int, world_size: int) -> int:
    return 2 * (world_size - 1) * size_bytes // world_size


def with_links(
    rows: dict[int, list[Event]], rates: dict[tuple[int, int], tuple[int, float]]
) -> dict[int, list[Event]]:
    """What connections carried in each step: bytes, and the share of the step for which they were busy."""
    found = {rank: list(events) for rank, events in rows.items()}
    for (rank, peer), (size_bytes, busy) in rates.items():
        found[rank] += [
            Event(
                Kind.LINK, "", Stream.COMMUNICATION, step.step, step.start_ns, round(busy * step.duration_ns),
                size_bytes=size_bytes, peer=peer,
            )
            for step in rows[rank] if step.kind == Kind.STEP
        ]  # fmt: skip
    return found


def the_same(one: Diagnosis, other: Diagnosis) -> None:
    """Two diagnoses that say the same, but for links."""
    assert replace(one, links=()) == replace(other, links=())


def test_messages_carry_what_their_collective_is() -> None:
    transfers = (Transfer(False, 2, 100, 10, 40), Transfer(True, 1, 60, 20, 90))
    span = StrategySpan(
        Kind.COLLECTIVE, "all_gather", 3, 5, 95, 160, enqueue_ns=1, sequence=7, algorithm="ring", step=6,
        transfers=transfers, strategy="parameter_server",
    )  # fmt: skip
    rows = transfer_rows([span, StrategySpan(Kind.WAIT, "all_gather", 3, 5, 95)])
    shared = {
        "name": "all_gather", "stream": Stream.COMMUNICATION, "step": 6, "group": "parameter_server", "sequence": 7,
        "bucket": 3,
    }  # fmt: skip
    assert [row._asdict() | shared for row in rows] == [row._asdict() for row in rows]
    assert [(row.kind, row.peer, row.size_bytes, row.start_ns, row.end_ns) for row in rows] == [
        (Kind.RECEIVE, 2, 100, 10, 40),
        (Kind.SEND, 1, 60, 20, 90),
    ]


def test_connections_to_other_ranks_become_rows_and_others_do_not() -> None:
    uses = [
        Use(HERE, THERE, 5, 1_000, 9_000, 500, 3_000, 70),
        Use(HERE, THERE, 6, 9_000, 9_500, 400, 3_000, 2**64 - 1),
        Use(HERE, THERE, 7, 9_500, 9_900, 400, 300, 0),
        Use(HERE, ELSEWHERE, 5, 1_000, 9_000, 900, 10, 70),
    ]
    rows = link_rows(uses, {(HERE, THERE): 3})
    assert {row.peer for row in rows} == {3}
    links = [
        (row.step, row.start_ns, row.duration_ns, row.size_bytes) for row in rows if row.kind == Kind.LINK
    ]
    # What was busy for longer than the step lasted was so for all of it.
    assert links == [(5, 1_000, 3_000, 500), (6, 9_000, 500, 400), (7, 9_500, 300, 400)]
    rates = [(row.step, row.start_ns, row.size_bytes) for row in rows if row.kind == Kind.DELIVERY_RATE]
    assert rates == [(5, 9_000, 70), (6, 9_500, 2**62)]
    assert np.iinfo(np.int64).max > 2**62


def test_messages_of_collectives_are_no_communication_of_their_own() -> None:
    rows = events_of(JOB)
    bare, full = trace_of(rows), trace_of(with_messages(rows))
    one, other = match(bare), match(full)
    assert set(other.kind) == {Kind.COLLECTIVE}
    for name in Communications.__dataclass_fields__:
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    whole = match(full, messages=True)
    assert len(whole) == sum(
        event.kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE) for e in full.events.values() for event in e
    )
    assert whole.inner.tolist() == (whole.kind != Kind.COLLECTIVE).tolist()


def test_messages_do_not_change_a_diagnosis() -> None:
    rows = events_of(JOB)
    bare, full = diagnose(trace_of(rows)), diagnose(trace_of(with_messages(rows)))
    assert bare.stragglers
    assert max(part.exposed_communication for part in bare.breakdown.values()) > 0
    the_same(bare, full)
    for one, other in zip(bare.links, full.links, strict=True):
        assert (one.source, one.target, one.utilisation) == (other.source, other.target, other.utilisation)
        assert other.gbps == pytest.approx(one.gbps, rel=1e-5)


def test_connections_do_not_change_where_time_went() -> None:
    rows = events_of(JOB)
    bare, full = diagnose(trace_of(rows)), diagnose(trace_of(with_links(rows, {(0, 1): (1_000_000, 0.1)})))
    assert (bare.breakdown, bare.stragglers, bare.critical_path) == (
        full.breakdown,
        full.stragglers,
        full.critical_path,
    )


def communication(kind: str, name: str, sequence: int, peer: int = -1, start_ns: int = 10) -> Event:
    return Event(
        kind,
        name,
        Stream.COMMUNICATION,
        0,
        start_ns,
        5,
        group="0",
        sequence=sequence,
        size_bytes=8,
        peer=peer,
    )


def test_only_messages_with_group_name_and_number_of_a_collective_are_part_of_it() -> None:
    events = Events.from_rows(
        [
            communication(Kind.COLLECTIVE, "all_reduce", 3),
            communication(Kind.SEND, "all_reduce", 3, 1),
            communication(Kind.SEND, "all_reduce", 4, 1),
            communication(Kind.SEND, "all_reduce", -1, 1),
            communication(Kind.SEND, "send", 3, 1),  # of a pipeline, numbered too
            communication(Kind.RECEIVE, "all_reduce", 3, 1)._replace(group="1"),
            communication(Kind.RECEIVE, "all_reduce", 3, 1),
            communication(Kind.FORWARD, "all_reduce", 3),
        ]
    )
    assert inner_messages(events).tolist() == [False, True, False, False, False, False, True, False]
    assert not inner_messages(events.of_kind(Kind.SEND)).any()


def test_messages_are_matched_within_their_collective() -> None:
    # Two collectives at a time: rank 0 sends of the second first, rank 1 receives of the first first.
    both = [communication(Kind.COLLECTIVE, "all_gather", sequence, start_ns=0) for sequence in (0, 1)]
    sends = [communication(Kind.SEND, "all_gather", 1 - n, 1, 10 + n) for n in range(2)]
    receives = [communication(Kind.RECEIVE, "all_gather", n, 0, 10 + n) for n in range(2)]
    trace = replace(
        synthetic_trace(SyntheticJob(world_size=2, steps=1)),
        events={0: Events.from_rows(both + sends), 1: Events.from_rows(both + receives)},
    )
    rows = match(trace, messages=True)
    for instance in set(rows.instance[rows.inner].tolist()):
        members = rows.instance == instance
        assert sorted(rows.kind[members]) == [Kind.RECEIVE, Kind.SEND]
        assert len(set(rows.sequence[members].tolist())) == 1


def links_of(trace: Trace, cluster: Cluster | None = None) -> dict[tuple[str, str], Link]:
    return {(link.source, link.target): link for link in diagnose(trace, cluster).links}


def test_links_are_what_messages_crossed() -> None:
    rows = events_of(replace(JOB, steps=3))
    ring = links_of(trace_of(rows))
    assert set(ring) == {("host0", "host1"), ("host1", "host2"), ("host2", "host0")}
    backwards = links_of(trace_of(with_messages(rows, step=-1)))
    assert set(backwards) == {(target, source) for source, target in ring}
    assert backwards["host1", "host0"].gbps == pytest.approx(ring["host1", "host2"].gbps, rel=1e-5)


def test_a_rank_without_messages_is_taken_for_a_ring() -> None:
    rows = events_of(JOB)
    mixed = {0: rows[0], 1: with_messages(rows, step=-1)[1], 2: rows[2]}
    assert set(links_of(trace_of(mixed))) == {("host0", "host1"), ("host1", "host0"), ("host2", "host0")}


def test_messages_beside_collectives_count_by_themselves() -> None:
    rows = events_of(replace(JOB, bucket_bytes=(), blocking_loss=False))
    for step in [event for event in rows[0] if event.kind == Kind.STEP]:
        rows[0].append(
            Event(
                Kind.SEND, "send", Stream.COMMUNICATION, step.step, step.start_ns, MS, group="pp",
                sequence=step.step, size_bytes=125_000, peer=2,
            )
        )  # fmt: skip
    (link,) = diagnose(trace_of(rows)).links
    assert (link.source, link.target) == ("host0", "host2")
    assert link.gbps == pytest.approx(1.0)


def test_links_are_what_the_kernel_counted() -> None:
    rows = events_of(JOB)
    lengths = [event.duration_ns for event in rows[0] if event.kind == Kind.STEP]
    trace = trace_of(
        with_links(with_messages(rows), {(0, 2): (3_000_000, 0.25), (1, 0): (10, 1e-5), (2, 1): (7, 1e-5)})
    )
    found = links_of(trace)
    assert set(found) == {("host0", "host2"), ("host1", "host0"), ("host2", "host1")}
    link = found["host0", "host2"]
    assert link.utilisation == pytest.approx(0.25)
    assert link.gbps == pytest.approx(8 * 3_000_000 * len(lengths) / (0.25 * sum(lengths)))
    slow = links_of(
        trace,
        Cluster(hosts=tuple(Host(name=f"h{n}", workers=1, up_gbps=2.0, down_gbps=1.0) for n in range(3))),
    )
    assert slow["h0", "h2"].capacity_gbps == 1.0
    assert slow["h0", "h2"].utilisation == pytest.approx(8 * 3_000_000 * len(lengths) / sum(lengths))


def test_a_rank_whose_kernel_did_not_count_is_known_by_its_collectives() -> None:
    rows = events_of(JOB)
    assert set(links_of(trace_of(with_links(rows, {(0, 2): (3_000_000, 0.25)})))) == {
        ("host0", "host2"), ("host1", "host2"), ("host2", "host0")
    }  # fmt: skip


def test_connections_of_one_link_are_busy_independently_of_each_other() -> None:
    rows = events_of(replace(JOB, world_size=4, ranks_a_host=2))
    infos = synthetic_trace(replace(JOB, world_size=4, ranks_a_host=2)).manifest.ranks
    busy = {(0, 2): (1000, 0.5), (1, 3): (3000, 0.5), (2, 0): (1, 0.1), (3, 1): (1, 2.0)}
    found = {
        (link.source, link.target): link
        for link in diagnose(trace_of(with_links(rows, busy), infos=infos)).links
    }
    assert set(found) == {("host0", "host1"), ("host1", "host0")}
    assert found["host0", "host1"].utilisation == pytest.approx(0.75)
    lengths = [event.duration_ns for event in rows[0] if event.kind == Kind.STEP]
    assert found["host0", "host1"].gbps == pytest.approx(8 * 4000 * len(lengths) / (0.75 * sum(lengths)))
    assert found["host1", "host0"].utilisation == pytest.approx(1.0)


def test_a_link_is_no_quicker_than_the_kernel_saw_data_arrive() -> None:
    rows = with_links(events_of(JOB), {(0, 2): (3_000_000, 1e-6), (1, 2): (3_000_000, 0.9)})
    for rank, events in rows.items():
        events += [
            event._replace(kind=Kind.DELIVERY_RATE, start_ns=event.end_ns, duration_ns=0, size_bytes=10**9)
            for event in events
            if (event.kind, rank) in ((Kind.LINK, 0), (Kind.LINK, 1))
        ]
    found = links_of(trace_of(rows))
    assert found["host0", "host2"].gbps == pytest.approx(8.0)
    assert found["host1", "host2"].utilisation == pytest.approx(0.9)


@pytest.mark.parametrize(
    "change",
    [{"peer": -1}, {"peer": 9}, {"size_bytes": 0}, {"size_bytes": -1}, {"duration_ns": 0}, {"start_ns": -(10**12)},
     {"start_ns": 10**15}],
    ids=lambda change: "-".join(f"{name}={value}" for name, value in change.items()),
)  # fmt: skip
def test_connections_that_make_no_sense_count_for_nothing(change: dict[str, Any]) -> None:
    rows = with_links(events_of(JOB), {(0, 2): (3_000_000, 0.25), (0, 1): (3_000_000, 0.25)})
    for events in rows.values():
        events[:] = [
            event._replace(**change) if (event.kind, event.peer) == (Kind.LINK, 1) else event
            for event in events
        ]
    found = links_of(trace_of(rows))
    assert ("host0", "host1") not in found
    assert found["host0", "host2"].utilisation == pytest.approx(0.25)
